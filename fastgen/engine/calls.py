"""Runs one call of `model.generate` for several requests, and decides which models allow that."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList
from transformers.modeling_outputs import ModelOutput

from fastgen import patching, releases
from fastgen.decoding import guards, library_code
from fastgen.decoding.layer_forms import runs_own_forward
from fastgen.decoding.library_code import modules_of
from fastgen.engine import adapters
from fastgen.engine.options import least_new_tokens, options_of, why_by_itself
from fastgen.engine.requests import Request, is_form
from fastgen.interrupts import forkable_lock
from fastgen.optimizer.transformers import buckets, cache_layers, models, row_adapters
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.encoders.stacks import way_of

# Held by the engine that draws from torch's generator, which all threads share. A call may wait, in the user's code,
# for a call of another engine, so an engine proceeds without the lock after this many seconds.
_draws = forkable_lock()
_PATIENCE = 10.0
# Attributes by which peft's layers, and Transformers' own interface to peft, select the adapters of a forward pass.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def call(model: Any, batch: Sequence[Request], enters_slots: bool = False) -> list[Any]:
    """Returns the result of each request, as a call of its own would return it. Returns an empty list for a batch whose
    call returns more than sequences, because such a result cannot be split.

    The requests agree in their options. The call ends with the step in which the last of them is cancelled.
    """
    request, options = batch[0], _until_cancelled(batch)
    with _having(model, request.adapter, len(batch)) as of_peft:
        options |= of_peft
        with drawing(batch, model.device):
            if len(batch) > 1:
                return _together(model, batch, options)
            given = request.options_in_slots if enters_slots else request.options
            return [by_itself(model, request, given | options)]


@contextlib.contextmanager
def _having(model: Any, adapter: str | None, rows: int) -> Iterator[dict[str, Any]]:
    """Makes all rows of a call use the request's own adapter. Yields the peft options that do so if FastGen is off or
    the model has changed, because peft's own code then has to select the adapter.
    """
    if adapter is None:
        yield {}
        return
    inside = adapters.model_inside(model)
    with fast_layers(inside):
        is_served = patching.is_active() and alone_for_model(model) is None
        if is_served and row_adapters.unsupported(inside, adapter) is None and row_adapters.has_forms(inside):
            with row_adapters.choosing(inside, (adapter,)):
                yield {}
        else:
            yield {adapters.ADAPTER_NAMES: [adapter] * rows}


@contextlib.contextmanager
def drawing(batch: Sequence[Request], device: torch.device) -> Iterator[None]:
    """Keeps other engines from drawing from torch's generator if one of these requests may draw. For a single request
    with a seed, seeds torch's generator inside this context, and restores it.

    A request that enters slots gets a generator of its own there, but its seed is drawn from torch's; and a request
    that cannot enter draws until its call ends.
    """
    may_draw = any(each.seed is not None or each.config is None or each.config.do_sample for each in batch)
    has_it, seed = may_draw and _draws.acquire(timeout=_PATIENCE), batch[0].seed if len(batch) == 1 else None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        if has_it:
            _draws.release()


def by_itself(model: Any, request: Request, options: dict[str, Any]) -> Any:
    """Returns the result of a call for this request alone."""
    given = {name: _copied(value) for name, value in {**request.inputs, **options}.items()}
    with adapters.without_hooks_left(model, options):
        return (request.generate or model.generate)(**given)


def _copied(value: Any) -> Any:
    """Copies an encoder's output, sharing its tensors: `generate` repeats it in place for each sequence, and the
    request may begin again.
    """
    if isinstance(value, ModelOutput):
        return copy.copy(value)
    return {key: _copied(part) for key, part in value.items()} if type(value) is dict else value


def _until_cancelled(batch: Sequence[Request]) -> dict[str, Any]:
    """Returns options that end the call once nobody wants its results. They add a criterion of the library's own class,
    which is not mistaken for user code and ends all rows at once.
    """
    first = batch[0]
    if first.config is None or first.config.max_time is not None or first.options.get("custom_generate") is not None:
        return {}
    criterion = MaxTimeCriteria(math.inf)

    def note(done: Any) -> None:
        if all(request.future.done() for request in batch):
            criterion.max_time = -math.inf

    for request in batch:
        request.future.add_done_callback(note)
    return {"stopping_criteria": StoppingCriteriaList([*(first.options.get("stopping_criteria") or ()), criterion])}


def _together(model: Any, batch: Sequence[Request], options: dict[str, Any]) -> list[Tensor]:
    """Returns the sequences [rows, length] of each request."""
    first, has_encoder = batch[0], model.config.is_encoder_decoder
    side = "right" if has_encoder else "left"  # a decoder continues after the last column
    tokens = [request.tokens for request in batch if request.tokens is not None]
    masks = [
        torch.ones_like(row) if request.mask is None else request.mask
        for request, row in zip(batch, tokens, strict=True)
    ]
    if is_form(form := first.options.get("logits_processor")):  # in slots, each request's own form is used instead
        options["logits_processor"] = form
    padding = first.config.pad_token_id  # any value works, because the attention mask hides it
    ids = pad_sequence(tokens, True, 0 if padding is None else padding, side)
    prompt = 1 if has_encoder else ids.shape[1]
    made = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=pad_sequence(masks, True, 0, side).to(model.device),
        **_options(first, prompt, max(request.new_tokens or 0 for request in batch)),
        **options,
    )
    if not isinstance(made, Tensor):
        return []
    counts, each = written(made[:, prompt:], first.config), made.shape[0] // len(batch)
    results = []
    for number, request in enumerate(batch):
        rows = slice(number * each, (number + 1) * each)
        begin = 0 if has_encoder else prompt - request.length
        results.append(made[rows, begin : prompt + max(counts[rows])].clone())
    return results


def _options(first: Request, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Returns the options of a batch with prompts of `prompt` tokens, padding included.

    All options are passed by name: in a generation config, the library would replace those that are None with the
    model's defaults.
    """
    config, least = first.config, least_new_tokens(first.config, first.prompt)
    # The library warns if a call gives both max_new_tokens and max_length.
    lengths: dict[str, Any] = {"max_length": prompt + new_tokens}
    if config.max_new_tokens is not None:
        lengths = {"max_length": None, "max_new_tokens": new_tokens}
    lengths["min_length"] = (prompt + least if least else 0) if config.min_new_tokens is None else None
    return {**options_of(config), **lengths}


def written(generated: Tensor, config: Any) -> list[int]:
    """Returns the number of generated tokens in each row [rows, longest]: with the end token, without padding."""
    tokens = [] if config.eos_token_id is None else config.eos_token_id
    ends = torch.isin(generated.cpu(), torch.as_tensor(tokens, dtype=torch.long).cpu())
    first = ends.int().argmax(dim=1) + 1 if generated.shape[1] else torch.zeros(len(generated), dtype=torch.long)
    return torch.where(ends.any(dim=1), first, generated.shape[1]).tolist()


def pads(model: Any) -> bool:
    """Whether requests of different lengths may share a batch: padding is known not to change their results."""
    model = adapters.model_that_decodes(model)
    if model.config.is_encoder_decoder:
        return way_of(model.get_encoder()) is not None
    return buckets.ignores_padding(model)


def what_shares_a_call(model: Any) -> str:
    """Says, in a sentence, which requests of a model share a static batch."""
    reason = alone_for_model(model) or why_by_itself(adapters.model_inside(model))
    if reason is not None:
        return f"each request has a call of its own: {reason}"
    return f"requests {'' if pads(model) else 'of one length '}that agree in their options share a call"


def alone_for_model(model: Any) -> str | None:
    """Returns why requests of this model must not share a batch now; None if they may. A whitelist decides."""
    reason = adapters.alone_for_adapters(model)
    if reason is not None:
        return reason
    inside, model = adapters.model_inside(model), adapters.model_that_decodes(model)
    kind = type(model)
    is_known = kind.__module__.startswith("transformers.models.") and kind.__name__ in releases.MODELS
    known = (buckets.is_decoder, cache_layers.states_are_known, models.has_independent_rows)
    is_known |= all(any(knows(part) for knows in known) for part in models.parts_that_decode(model))
    if not is_known:
        return f"{kind.__name__} is not known to treat the rows of a batch alike"
    if not (runs_own_forward(model) and library_code.is_own(kind.forward)) or guards.unusual() is not None:
        return "other code in the place of the library's"
    reason = models.modules_unsupported(inside)
    if reason is None and models.rows_depend_on_each_other(model):
        reason = "what the model says of an input depends on the others of the batch"
    return reason


def state_of(model: Any) -> list[tuple[Any, ...]]:
    """Returns a list that stays equal while the model keeps its weights, modules, mode and adapters within a call."""
    found: list[tuple[Any, ...]] = []
    for module in modules_of(model):
        own = vars(module)
        found.append((id(module), module.training, *(repr(own[name]) for name in _OF_ADAPTERS if name in own)))
        for weight in module._parameters.values():
            # A forward pass replaces weights that are fetched for it, and position tables that it rebuilds for longer
            # inputs.
            if weight is None or weight.is_meta or (isinstance(module, nn.Embedding) and not weight.requires_grad):
                continue
            place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
            found.append((id(weight), place, weight.requires_grad, 0 if weight.is_inference() else weight._version))
    return found


class ModelState:
    """The state of a model when `has_changed` was last called.

    Attributes:
        latest: the state.
        changes: how often the state has changed.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.changes = model, 0
        self.latest: list[tuple[Any, ...]] | None = None

    def has_changed(self) -> bool:
        """Whether the state differs from that of the previous call."""
        before, self.latest = self.latest, state_of(self._model)
        self.changes += self.latest != before
        return self.latest != before
