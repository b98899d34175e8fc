"""Calls of `model.generate`: one for several requests (`call`), and those of a model with its own (`OwnGenerate`).

A `generate` of the model's own, such as Whisper's, prepares inputs, calls the library's `generate` once or for each
window of a recording, and builds its result from what that returns. So that these inner calls run in slots, it runs in
a thread of its own, but never at the same time as the engine's thread: it blocks from its call of the library's
`generate` until the result is there. The inner call is an ordinary request.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList
from transformers.modeling_outputs import ModelOutput

from fastgen import openmp, patching
from fastgen.engine import models
from fastgen.engine.options import least_new_tokens, make_inner, options_of
from fastgen.engine.requests import Request, is_form
from fastgen.interrupts import forkable_lock
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.entering import Elsewhere, running_elsewhere

# Held by the engine that draws from torch's generator, which all threads share. A call may wait, in the user's code,
# for a call of another engine, so an engine proceeds without the lock after this many seconds.
_draws = forkable_lock()
_PATIENCE = 10.0


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
    inside = models.model_inside(model)
    with fast_layers(inside):
        is_served = patching.is_active() and models.alone_for_model(model) is None
        if is_served and row_adapters.unsupported(inside, adapter) is None and row_adapters.has_forms(inside):
            with row_adapters.choosing(inside, (adapter,)):
                yield {}
        else:
            yield {models.ADAPTER_NAMES: [adapter] * rows}


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
    with models.without_hooks_left(model, options):
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


class _Abandoned(BaseException):
    """Ends a call whose result nobody wants any more."""


class OwnGenerate:
    """One request, run by the model's own `generate`.

    Args:
        model: the model whose `generate` runs.
        inside: the model whose steps the engine runs; calls of any other one run as they are.
        request: a request of that model.
        most_rows: limit of rows of an inner request.
        changes: how often the model has changed so far.

    Attributes:
        outcome: what the call returns or raises, once it is over.
        changes: as given.
        thread: the thread in which it runs.
    """

    def __init__(self, model: Any, inside: Any, request: Request, most_rows: int, changes: int) -> None:
        self.request, self.changes = request, changes
        self.outcome: Any = None
        self._model, self._inside, self._most_rows = model, inside, most_rows
        self._inner: Request | None = None
        self._is_over, self._is_abandoned = False, False
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(self._ask,), name="fastgen-generate", daemon=True)
        request.future.add_done_callback(lambda done: self._end_inner())  # in case it is cancelled

    @property
    def why_alone(self) -> list[str]:
        """The reason for running alone, if the request did."""
        return [self.request.alone] if self._inner is None and self.request.alone is not None else []

    @property
    def may_go_on(self) -> bool:
        """Whether it is not waiting for an inner request."""
        return self._inner is None or self._inner.future.done()

    def go_on(self) -> Request | None:
        """Runs the call to its next inner request, and returns that; None if it is over. Blocks the caller."""
        openmp.end_team()  # of this thread, because the other one computes now
        if self.thread.ident is None:
            self._start()
        else:
            self._may_run.release()
        try:
            self._stands.acquire()
        except BaseException:  # an interrupt
            self.abandon()
            raise
        return None if self._is_over else self._inner

    def abandon(self) -> None:
        """Ends the call's thread instead of continuing it."""
        self._is_abandoned = True
        self._may_run.release()

    def _start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError:  # no more threads can start: the call runs to its end in this one
            self._run(self._as_ever)

    # ---- in the thread of the call

    def _run(self, how: Elsewhere) -> None:
        try:
            with running_elsewhere(how):
                self.outcome = by_itself(self._model, self.request, self.request.options)
        except BaseException as error:  # user code may raise anything
            self.outcome = error
        self._is_over = True
        self._stop()

    def _stop(self) -> None:
        openmp.end_team()
        self._stands.release()

    def _ask(self, model: Any, arguments: dict[str, Any], as_ever: Callable[[], Any]) -> Any:
        """Replaces a call of the library's `generate` by a request to the engine, and returns its result."""
        self._end_if_abandoned()
        is_own = model is self._inside  # user code may call other models, or exchange a part
        made = make_inner(model, arguments, self._most_rows, self.request.seed) if is_own else None
        if made is None:
            return self._as_ever(model, arguments, as_ever)
        self._inner = made
        if self.request.future.done():
            self._end_inner()
        self._stop()
        self._may_run.acquire()
        self._end_if_abandoned()
        return made.future.result()

    def _as_ever(self, model: Any, arguments: dict[str, Any], as_ever: Callable[[], Any]) -> Any:
        """Runs the call itself, without the engine."""
        with running_elsewhere(None), drawing([self.request], model.device):
            return as_ever()

    def _end_inner(self) -> None:
        if self._inner is not None:
            self._inner.future.cancel()

    def _end_if_abandoned(self) -> None:
        if self._is_abandoned:
            raise _Abandoned
