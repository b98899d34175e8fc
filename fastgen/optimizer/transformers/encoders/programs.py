"""Forward passes of few tokens without padding, recorded and repeated without the model's Python code.

A pass of one short text is a few hundred small operations, and starting them takes as long as computing them. A
shape that comes often is recorded, as a decoding step is (`fastgen.decoding.captured.program`). The first replay must
give what the model gives.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fastgen import caches, counters, interrupts, settings
from fastgen.decoding import panel_ops
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.recording import tensors_in
from fastgen.decoding.guards import GuardedModel, GuardedState
from fastgen.decoding.modules import modules_of
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.locks import forkable_lock
from fastgen.optimizer.transformers import models

ENTRY_POINT = "transformers.encoder, recorded"
# Tokens of a batch: with more, the products take nearly all of the time.
MOST_TOKENS = 256
# Recording takes as long as tens of passes, so that a shape must have come so often.
PAYS_FROM = 64
# Of a model, as it is in each of so many states: adapters are used in turn.
MOST, MOST_STATES = 32, 4
_INPUTS = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
_FLAGS = (bool, type(None))
_CPU = torch.device("cpu")
_PLAIN = (Tensor, torch.nn.Parameter)
TOLERANCE = 1e-5


class _Pass:
    """A recorded pass for inputs of one shape."""

    def __init__(self, forward: Callable[..., Any], inputs: dict[str, Tensor], flags: dict[str, Any]) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._result: Any = None
        self._buffers: list[Tensor] = []
        self._program = Program()

        def function() -> None:
            result = forward(**self._inputs, **flags)
            found = tensors_in(result)
            if not self._buffers:
                self._result = result
                self._buffers = [tensor.new_empty(tensor.shape) for tensor in found]
            for buffer, tensor in zip(self._buffers, found, strict=True):
                buffer.copy_(tensor)

        function()  # the buffers are there before the recording
        with panel_ops.suspended():
            self._program.capture(graph.capturable(function))

    def run(self, inputs: dict[str, Tensor]) -> Any:
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._program.replay()
        return _with_tensors(self._result, iter([buffer.clone() for buffer in self._buffers]))


class _OfModel:
    """The recorded passes of one model, and what it was when they were recorded."""

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[GuardedState, Hashable], OrderedDict[Hashable, _Pass]] = OrderedDict()
        self._has_state = False
        self.passes: OrderedDict[Hashable, _Pass] = OrderedDict()
        self.wanted: Counter[Hashable] = Counter()
        self.refused: set[Hashable] = set()

    def may_run(self, model: Any) -> bool:
        """Whether the model may have recorded passes; `passes` are those of the model as it is. Those of other weights
        are dropped.

        Raises:
            CannotBeCaptured: it runs more than the libraries' own code.
        """
        if models.has_global_hooks():
            return False
        state = GuardedModel.of(model).check(model)
        known = state, models.attention_functions()
        if known in self._states:
            self._states.move_to_end(known)
        elif models.modules_unsupported(model) is None and _is_served(model) and _has_plain_tensors(model):
            if self._has_state:  # a shape has to come as often once more, or each change would make a recording
                self.wanted.clear()
            for former in [each for each in self._states if each[0].model.tensors != state.model.tensors]:
                del self._states[former]
            self._states[known], self._has_state = OrderedDict(), True
            while len(self._states) > MOST_STATES:
                self._states.popitem(last=False)
        else:
            return False
        self.passes = self._states[known]
        return True


_models: weakref.WeakKeyDictionary[Any, _OfModel] = weakref.WeakKeyDictionary()
_lock = forkable_lock()  # one thread at a time adds to them, or goes through them


def _drop_all() -> bool:
    with _lock:
        found = any(of.passes for of in _models.values())
        _models.clear()
    return found


caches.register(_drop_all, captured_steps=True)


def run(original: Callable[[], Any], forward: Callable[..., Any], model: Any, given: dict[str, Any]) -> Any:
    """The result of a pass whose mask, if there is one, has no padding; None where it is not recorded.

    Args:
        original: the pass as the user has called it.
        forward: of the model, by names, without a mask.
    """
    wanted = counters.decided(ENTRY_POINT, _wanted, model, given)
    if wanted is None:
        return None
    of, key, inputs, flags = wanted
    try:
        with graph.taken(_CPU):
            if not counters.decided(ENTRY_POINT, _may_run, of, key, model):
                return None
            return _run(original, forward, of, key, inputs, flags)
    except CannotBeCaptured:  # another thread has the memory of programs: this call does without
        return None


def _wanted(model: Any, given: dict[str, Any]) -> tuple[_OfModel, Hashable, dict[str, Tensor], dict[str, Any]] | None:
    """What is recorded of the model, and a pass that is kept or due; None for one that is neither."""
    inputs = {name: given[name] for name in _INPUTS if given.get(name) is not None}
    flags = {name: value for name, value in given.items() if name not in (*_INPUTS, "attention_mask")}
    if not _serves(inputs, flags):
        return None
    key = _key(inputs, flags)
    with _lock:
        of = _models.get(model)
        if of is None:
            of = _models[model] = _OfModel()
    if key in of.refused or (key not in of.passes and not _is_due(of, key, model)):
        return None
    return of, key, inputs, flags


def _may_run(of: _OfModel, key: Hashable, model: Any) -> bool:
    try:
        return of.may_run(model) and (key in of.passes or of.wanted[key] >= PAYS_FROM)
    except CannotBeCaptured as reason:
        counters.count_not_used(ENTRY_POINT, str(reason))
        return False


def _is_due(of: _OfModel, key: Hashable, model: Any) -> bool:
    """Whether a pass like this one has come so often that it is recorded now."""
    if not _is_served(model):
        return False
    caches.limit(of.wanted, of.refused)
    of.wanted[key] += 1
    return of.wanted[key] >= PAYS_FROM and graph.unavailable(_CPU) is None


def _run(
    original: Callable[[], Any],
    forward: Callable[..., Any],
    of: _OfModel,
    key: Hashable,
    inputs: dict[str, Tensor],
    flags: dict[str, Any],
) -> Any:
    kept = of.passes.get(key)
    if kept is not None:
        of.passes.move_to_end(key)
        counters.count_accelerated(ENTRY_POINT)
        return kept.run(inputs)
    expected = original()
    try:
        made = _Pass(forward, inputs, flags)
        found = made.run(inputs)
        if not _are_close(found, expected):
            raise RuntimeError("the recorded pass gives another result")
    except Exception as reason:
        interrupts.pass_on(reason)
        of.refused.add(key)
        counters.count_not_used(ENTRY_POINT, f"{type(reason).__name__}: {reason}"[:200])
        return expected
    of.passes[key] = made
    while len(of.passes) > MOST:
        oldest, _ = of.passes.popitem(last=False)
        del of.wanted[oldest]
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


def _is_served(model: Any) -> bool:
    """Whether passes of such a model are recorded."""
    asks_for_more = model.config.output_hidden_states or getattr(model.config, "output_attentions", False)
    return model.dtype is torch.float32 and model.device.type == "cpu" and not asks_for_more


def _has_plain_tensors(model: Any) -> bool:
    """Whether all parameters and buffers are torch's own, which say where their memory is."""
    held = (
        tensor for module in modules_of(model) for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    return all(tensor is None or type(tensor) in _PLAIN for tensor in held)


def _key(inputs: dict[str, Tensor], flags: dict[str, Any]) -> Hashable:
    shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in inputs.items())
    return shapes, tuple(sorted(flags.items())), torch.get_num_threads(), torch.is_inference_mode_enabled()


def _with_tensors(result: Any, tensors: Any) -> Any:
    """A result like this one, with other tensors."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, dict):
        return type(result)(**{name: _with_tensors(value, tensors) for name, value in result.items()})
    if isinstance(result, tuple | list):
        return type(result)(_with_tensors(value, tensors) for value in result)
    if result is None:
        return None
    raise RuntimeError(f"a result of type {type(result).__name__}")


def _are_close(found: Any, expected: Any) -> bool:
    pairs = zip(tensors_in(found), tensors_in(expected), strict=True)
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * max(1.0, float(other.abs().max())))
        for one, other in pairs
    )
