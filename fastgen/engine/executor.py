"""What runs requests: static batches, each a call of `model.generate`."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList

from fastgen import releases
from fastgen.decoding import library_code
from fastgen.decoding.modules import modules_of
from fastgen.engine.options import least_new_tokens, options_of
from fastgen.engine.planning import Costs, next_batch
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers import buckets, models
from fastgen.optimizer.transformers.encoders.stacks import way_of

# So often a call is made again because the model has changed while it ran.
_MOST_REPEATS = 3
CHANGED = "the model has changed while the request ran: its weights, modules or training mode"


class StaticBatches:
    """Requests that agree in their options run together, in one call of `generate`; the others in calls of their own.

    A batch ends when its longest output does.

    Attributes:
        counts: "batches", calls of several requests or one; "rows" and "tokens" of them, those generated; "repeated",
            calls that were made again; and "finished" and "failed", requests.
        alone: requests that ran in a call of their own although others were waiting, or might have been, by reason.
    """

    name = "static batches"

    def __init__(self, model: Any, most_rows: int, costs: Costs | None = None) -> None:
        self.model, self.most_rows = model, most_rows
        self.counts: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        self._costs = costs or Costs()
        self._criterion: MaxTimeCriteria | None = None
        self._batch: list[Request] = []  # that it ends

    # ---- which requests share a batch

    def choose(self, waiting: Sequence[Request]) -> list[Request]:
        """The requests that run next: the first one, and what shares its batch."""
        first = waiting[0]
        reason = first.alone or alone_for_model(self.model)
        if reason is not None:
            self.alone[reason] += 1
            return [first]
        return self.together([request for request in waiting if request.group == first.group], self.most_rows)

    def together(self, waiting: Sequence[Request], most_rows: int) -> list[Request]:
        """Those that are cheapest in one batch with the first one, of requests that may share it by their options."""
        one_length = None if pads(self.model) else waiting[0].length
        fitting = [each for each in waiting if each.alone is None and one_length in (None, each.length)]
        return next_batch(fitting, most_rows, self._costs)

    # ---- running them

    def run(self, requests: list[Request], can_stop: bool = True) -> None:
        """Runs requests, and settles their futures. What raises is run again in halves, down to single requests.

        Args:
            can_stop: whether `stop` ends the call.
        """
        left = [requests]
        while left:
            batch = [request for request in left.pop() if not request.future.done()]
            for request in batch:
                request.future.has_begun = True
            results = self._tried(batch, can_stop) if batch else []
            if not isinstance(results, BaseException):
                for request, result in zip(batch, results, strict=True):
                    self.settle(request, result)
            elif len(batch) == 1 or not isinstance(results, Exception):
                for request in batch:
                    self.settle(request, results)
            else:
                results = None  # with the tensors of the frames that it came through
                self.counts["repeated"] += 1
                middle = len(batch) // 2
                left += [batch[middle:], batch[:middle]]

    def why(self) -> str:
        """What limits which requests share a batch."""
        reason = alone_for_model(self.model)
        if reason is not None:
            return f"each request has a call of its own: {reason}"
        return f"requests {'of one length ' if not pads(self.model) else ''}that agree in their options share a call"

    def stop(self) -> None:
        """Ends the call that runs, in its next step, if nobody wants its results. Another thread calls this."""
        criterion = self._criterion
        if criterion is not None and all(request.future.done() for request in self._batch):
            criterion.max_time = -math.inf

    def attempt(self, batch: list[Request]) -> Any:
        """The results of a batch in one call, or what was raised."""
        try:
            return self._run(batch, can_stop=True)
        except BaseException as error:  # whatever the user's code raises: nothing ends the thread of the engine
            return error

    def settle(self, request: Request, result: Any) -> None:
        if request.future.settle(result):
            self.counts["failed" if isinstance(result, BaseException) else "finished"] += 1

    def _tried(self, batch: list[Request], can_stop: bool) -> Any:
        """The results of a batch, or what was raised."""
        try:
            for _ in range(_MOST_REPEATS):
                before = state_of(self.model)
                results = self._run(batch, can_stop)
                if state_of(self.model) == before:
                    return results
                if any(request.runs_user_code for request in batch):
                    break
                self.counts["repeated"] += 1
            raise RuntimeError(CHANGED)
        except BaseException as error:  # whatever the user's code raises: nothing ends the thread of the engine
            return error

    def _run(self, batch: list[Request], can_stop: bool) -> list[Any]:
        start = time.perf_counter()
        with self._stoppable(batch, can_stop) as options:
            results = [self._call(batch[0], options)] if len(batch) == 1 else self._together(batch, options)
        first = batch[0]
        if first.alone is None:
            longest, rows = max(request.length for request in batch), sum(request.rows for request in batch)
            most = max(request.new_tokens or 0 for request in batch)
            self._costs.note(longest, rows, most, time.perf_counter() - start)
        self.counts.update(batches=1, rows=sum(request.rows for request in batch))
        return results

    @contextlib.contextmanager
    def _stoppable(self, batch: list[Request], can_stop: bool) -> Iterator[dict[str, Any]]:
        """Options with which `stop` ends the call: a criterion of the library's own, which nothing takes for the
        user's, and which ends all rows at once.
        """
        first = batch[0]
        if not can_stop or first.config is None or first.config.max_time is not None or first.has_own_loop:
            yield {}
            return
        self._batch, self._criterion = batch, MaxTimeCriteria(math.inf)
        self.stop()
        try:
            own = first.options.get("stopping_criteria") or ()
            yield {"stopping_criteria": StoppingCriteriaList([*own, self._criterion])}
        finally:
            self._batch, self._criterion = [], None

    def _call(self, request: Request, options: dict[str, Any]) -> Any:
        """A call of its own."""
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=request.seed is not None):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            result = self.model.generate(**request.inputs, **{**request.options, **options})
        self.count(request, result)
        return result

    def count(self, request: Request, result: Any) -> None:
        """Counts what a request has generated."""
        sequences = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
        if request.config is not None and isinstance(sequences, Tensor) and sequences.dim() == 2:
            self.counts["tokens"] += sum(written(sequences[:, request.prompt :], request.config))

    def _together(self, batch: list[Request], options: dict[str, Any]) -> list[Tensor]:
        """The sequences of each request [rows, length], as a call of its own returns them."""
        first, has_encoder = batch[0], self.model.config.is_encoder_decoder
        side = "right" if has_encoder else "left"  # a decoder goes on behind the last column
        tokens = [request.tokens for request in batch if request.tokens is not None]
        masks = [
            torch.ones_like(row) if request.mask is None else request.mask
            for request, row in zip(batch, tokens, strict=True)
        ]
        ids = pad_sequence(tokens, True, _padding(first.config), side)
        prompt = 1 if has_encoder else ids.shape[1]
        made = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=pad_sequence(masks, True, 0, side).to(self.model.device),
            **_options(first, prompt, max(request.new_tokens or 0 for request in batch)),
            **options,
        )
        if not isinstance(made, Tensor):
            return []  # each of them is called again, alone: what is returned beside the sequences is of all of them
        counts = written(made[:, prompt:], first.config)
        self.counts["tokens"] += sum(counts)
        each = made.shape[0] // len(batch)
        results = []
        for number, request in enumerate(batch):
            rows = slice(number * each, (number + 1) * each)
            begin = 0 if has_encoder else prompt - request.length
            results.append(made[rows, begin : prompt + max(counts[rows])].clone())
        return results


def pads(model: Any) -> bool:
    """Whether requests of several lengths may share a batch: padding is known to change nothing."""
    if model.config.is_encoder_decoder:
        return way_of(model.get_encoder()) is not None
    return type(model).forward.__module__ in buckets.DECODERS


def alone_for_model(model: Any) -> str | None:
    """Why no requests of this model may share a batch, as it is now; None where they may. A whitelist decides."""
    kind = type(model)
    is_known = kind.__module__.startswith("transformers.models.") and kind.__name__ in releases.MODELS
    if not is_known and kind.forward.__module__ not in buckets.DECODERS:
        return f"{kind.__name__} is not known to treat the rows of a batch alike"
    if "forward" in vars(model) or not library_code.is_own(kind.forward) or library_code.unusual() is not None:
        return "other code in the place of the library's"
    reason = models.modules_unsupported(model)
    if reason is None and models.rows_depend_on_each_other(model):
        reason = "what the model says of an input depends on the others of the batch"
    return reason


def _options(first: Request, prompt: int, new_tokens: int) -> dict[str, Any]:
    """The options of a batch whose prompts, padding included, have so many tokens, and get as many new ones.

    All of them, by name: in a generation config, the library would take the model's own for those that are None.
    """
    config, least = first.config, least_new_tokens(first.config, first.prompt)
    # With a number of new tokens the library would warn of another length.
    lengths: dict[str, Any] = {"max_length": prompt + new_tokens}
    if config.max_new_tokens is not None:
        lengths = {"max_length": None, "max_new_tokens": new_tokens}
    lengths["min_length"] = (prompt + least if least else 0) if config.min_new_tokens is None else None
    return {**options_of(config), **lengths}


def _ends(config: Any) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _padding(config: Any) -> int:
    """A token to pad with, which the attention mask hides."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(_ends(config)), 0)


def written(generated: Tensor, config: Any) -> list[int]:
    """How many tokens [rows, longest] the model has written in each row, the end included: behind it is padding."""
    ends = torch.isin(generated.cpu(), torch.tensor(_ends(config), dtype=torch.long))
    first = ends.int().argmax(dim=1) + 1 if generated.shape[1] else torch.zeros(len(generated), dtype=torch.long)
    return torch.where(ends.any(dim=1), first, generated.shape[1]).tolist()


def state_of(model: Any) -> list[tuple[Any, ...]]:
    """What a call must not mix: an equal list as long as nobody changes the model's weights, modules or mode."""
    found: list[tuple[Any, ...]] = []
    for module in modules_of(model):
        found.append((id(module), module.training))
        found += [
            _state_of(each) for each in module._parameters.values() if each is not None and _is_kept(module, each)
        ]
    return found


def _is_kept(module: nn.Module, weight: Tensor) -> bool:
    """Whether a forward pass leaves a weight where it is: not one that is fetched for the pass, nor a table of
    positions that the model makes anew for a longer input.
    """
    return not (weight.is_meta or (isinstance(module, nn.Embedding) and not weight.requires_grad))


def _state_of(weight: Tensor) -> tuple[Any, ...]:
    place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
    return id(weight), place, weight.requires_grad, 0 if weight.is_inference() else weight._version
