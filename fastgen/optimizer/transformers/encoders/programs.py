"""Records forward passes of few tokens without padding, and replays them without the model's Python code.

A pass of one short text consists of a few hundred small operations, and launching them takes as long as computing them.
Frequent shapes are recorded like a decode step. The first replay must reproduce the model's result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import counters, interrupts, memory, settings
from fastgen.decoding import linear_ops
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.graph import CapturedPart, Piece
from fastgen.decoding.captured.recording import tensors_in
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.library_code import modules_of
from fastgen.optimizer.transformers import models
from fastgen.optimizer.transformers.captured import graph_cache, pays
from fastgen.optimizer.transformers.encoders.unpadded_forward import mapped

ENTRY_POINT = "transformers.encoder, recorded"
# Most tokens of a batch: with more, linear ops take nearly all of the time.
MOST_TOKENS = 256
_INPUTS = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
_FLAGS = (bool, type(None))
_CPU = torch.device("cpu")
_PLAIN = (Tensor, torch.nn.Parameter)
TOLERANCE = 1e-5


class _Key(NamedTuple):
    """Everything that a recorded pass fixes."""

    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    flags: tuple[tuple[str, bool | None], ...]
    threads: int
    is_inference: bool


class _Pass:
    """A recorded pass for inputs of one shape."""

    device = _CPU
    state: Hashable = None

    def __init__(
        self, key: _Key, forward: Callable[..., Any], inputs: dict[str, Tensor], flags: dict[str, Any]
    ) -> None:
        self.key = key
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._result: Any = None
        self._buffers: list[Tensor] = []
        self._part = CapturedPart(_CPU)

        def function() -> None:
            result = forward(**self._inputs, **flags)
            found = tensors_in(result)
            if not self._buffers:
                # A number in the result may differ in the next call, so a result with one is declined.
                self._result = mapped(result, lambda tensor: tensor, (type(None),))
                self._buffers = [tensor.new_empty(tensor.shape) for tensor in found]
            for buffer, tensor in zip(self._buffers, found, strict=True):
                buffer.copy_(tensor)

        pieces: list[Piece] = [(function, None)]
        self._part.run(pieces)  # allocates the buffers before the recording
        with linear_ops.panels_suspended():
            self._part.capture(pieces)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self._inputs.values(), *self._buffers))

    def clear(self) -> None:
        """Does nothing: what the last call has left is small."""

    def run(self, inputs: dict[str, Tensor]) -> Any:
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._part.replay()
        buffers = iter(self._buffers)
        return mapped(self._result, lambda _: next(buffers).clone())


def run(original: Callable[[], Any], forward: Callable[..., Any], model: Any, given: dict[str, Any]) -> Any:
    """Returns the result of a short pass without padding; None if it is not recorded.

    Args:
        original: the pass as the user called it.
        forward: the model's forward pass, with named arguments and without a mask.
    """
    wanted = counters.decided(ENTRY_POINT, _wanted, model, given)
    if wanted is None:
        return None
    key, inputs, flags = wanted
    try:
        with graph.taken(_CPU):
            found = counters.decided(ENTRY_POINT, _found, model, key)
            if isinstance(found, _Pass):
                counters.count_accelerated(ENTRY_POINT)
                return found.run(inputs)
            return _record(original, forward, model, key, inputs, flags) if found else None
    except CannotBeCaptured:  # another thread uses the memory of recordings: this call does without
        return None


def _wanted(model: Any, given: dict[str, Any]) -> tuple[_Key, dict[str, Tensor], dict[str, Any]] | None:
    """Returns the parts of a pass that is recorded or due for recording; None for another pass."""
    inputs = {name: given[name] for name in _INPUTS if given.get(name) is not None}
    flags = {name: value for name, value in given.items() if name not in (*_INPUTS, "attention_mask")}
    if (
        getattr(model, "_compiled_call_impl", None) is not None
        or not _serves(inputs, flags)
        or _may_have_padding(given)
    ):
        return None
    shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in inputs.items())
    key = _Key(shapes, tuple(sorted(flags.items())), torch.get_num_threads(), torch.is_inference_mode_enabled())
    is_kept = graph_cache.kept(model, key) is not None
    return (key, inputs, flags) if is_kept or _is_due(model, key) else None


def _may_have_padding(given: dict[str, Any]) -> bool:
    """Whether some position may be padding, judging by the inputs."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if type(ids) is not Tensor or mask is None:
        return type(ids) is not Tensor
    is_of_ids = type(mask) is Tensor and mask.shape == ids.shape and mask.device == ids.device
    return not (is_of_ids and bool((mask == 1).all()))


def _found(model: Any, key: _Key) -> _Pass | bool:
    """Returns the pass recorded for the model in its present state; otherwise, whether to record one."""
    if models.has_global_hooks():
        return False
    try:
        kept = graph_cache.used(model, key)
    except CannotBeCaptured as reason:
        counters.count_not_used(ENTRY_POINT, str(reason))
        return False
    if isinstance(kept, _Pass):
        return kept
    is_due = pays.Ledger.of(model).has_asked_for(key, 0, pays.PASSES)  # false if the model has just changed
    return is_due and models.modules_unsupported(model) is None and _has_plain_tensors(model)


def _is_due(model: Any, key: _Key) -> bool:
    """Whether a pass like this one has been called often enough to be recorded now."""
    asks_for_more = model.config.output_hidden_states or getattr(model.config, "output_attentions", False)
    if asks_for_more or model.dtype is not torch.float32 or model.device.type != "cpu":
        return False
    if not pays.Ledger.of(model).has_asked_for(key, 1, pays.PASSES):
        return False
    if graph_cache.is_refused(model, key):
        pays.Ledger.of(model).forget(key)  # finding out takes a while
        return False
    return graph.unavailable(_CPU) is None


def _record(
    original: Callable[[], Any],
    forward: Callable[..., Any],
    model: Any,
    key: _Key,
    inputs: dict[str, Tensor],
    flags: dict[str, Any],
) -> Any:
    expected = original()
    try:
        made = graph_cache.take(model, key, lambda: _Pass(key, forward, inputs, flags))
        found = made.run(inputs)
        if not _are_close(found, expected):
            raise RuntimeError("the recorded pass gives another result")
    except Exception as reason:
        interrupts.pass_on(reason)
        if memory.is_out(reason):  # there may be more memory when such passes have come as often again
            said = "out of memory"
            pays.Ledger.of(model).forget(key)
        else:
            said = f"{type(reason).__name__}: {reason}"[:200]
            graph_cache.refuse(model, key, said)
        counters.count_not_used(ENTRY_POINT, said)
        return expected
    graph_cache.give_back(model, made)
    return expected


def _serves(inputs: dict[str, Tensor], flags: dict[str, Any]) -> bool:
    """Whether passes with such arguments and settings are recorded."""
    now = settings.current()
    first = next(iter(inputs.values()), None)
    return (
        isinstance(first, Tensor)
        and first.dim() >= 2
        and 0 < first.shape[:2].numel() <= MOST_TOKENS
        and all(type(value) is Tensor and value.device.type == "cpu" for value in inputs.values())
        and all(isinstance(value, _FLAGS) for value in flags.values())
        and not any(flags.get(name) for name in ("output_attentions", "output_hidden_states", "use_cache"))
        and now.captured_step != "never"
        and now.weight_dtype == "fp32"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _has_plain_tensors(model: Any) -> bool:
    """Whether all parameters and buffers are plain torch tensors, whose memory addresses are known."""
    held = (
        tensor for module in modules_of(model) for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    return all(tensor is None or type(tensor) in _PLAIN for tensor in held)


def _are_close(found: Any, expected: Any) -> bool:
    pairs = zip(tensors_in(found), tensors_in(expected), strict=True)
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * max(1.0, float(other.abs().max())))
        for one, other in pairs
    )
