"""Captured steps that are kept from one call to the next."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from fastgen.decoding.layers import Replacement
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.optimizer.transformers.captured.step import CapturedStep, Shape

# Of all models together. Each has the K/V of a whole batch.
MOST = 8


class _OfModel:
    """The steps of one model, what its parameters were when they were captured, and what could not be captured."""

    def __init__(self, state: Hashable) -> None:
        self.state = state
        self.steps: OrderedDict[Shape, CapturedStep] = OrderedDict()
        self.refused: dict[Shape, str] = {}


_models: weakref.WeakKeyDictionary[Any, _OfModel] = weakref.WeakKeyDictionary()


def take(model: Any, shape: Shape, make: Callable[[], CapturedStep]) -> CapturedStep:
    """A step of this shape, which nobody else uses until it is given back.

    Raises:
        CannotBeCaptured: that has been tried before.
    """
    kept = _of(model)
    if shape in kept.refused:
        raise CannotBeCaptured(kept.refused[shape])
    step = kept.steps.pop(shape, None)
    return make() if step is None else step


def give_back(model: Any, step: CapturedStep) -> None:
    """Keeps a captured step for the next call of its shape; the one that was not used for longest goes for it."""
    kept = _of(model)
    kept.steps[step.shape] = step
    _models[model] = _models.pop(model)  # the last one that was used
    while sum(len(other.steps) for other in _models.values()) > MOST:
        oldest = next(other for other in list(_models.values()) if other.steps)
        oldest.steps.popitem(last=False)


def refuse(model: Any, shape: Shape, reason: str) -> None:
    """A step of this shape cannot be captured, and is not to be tried again."""
    _of(model).refused[shape] = reason


def drop_all() -> None:
    """Frees the steps that are not in use."""
    _models.clear()


def _of(model: Any) -> _OfModel:
    """What is kept of a model; nothing that was captured with other parameters."""
    state = _state(model)
    kept = _models.get(model)
    if kept is None or kept.state != state:
        kept = _models[model] = _OfModel(state)
    return kept


def _state(model: Any) -> Hashable:
    """What a graph has frozen of a model: its modules, and where its parameters and buffers are.

    What is written into them is not frozen: a replay reads it.
    """
    modules = tuple((id(module), type(module), _forward(module)) for module in model.modules())
    tensors = tuple((t.data_ptr(), t.dtype, tuple(t.shape)) for t in (*model.parameters(), *model.buffers()))
    return modules, tensors


def _forward(module: Any) -> Any:
    """A forward pass of a module's own, unless it is FastGen's, which comes and goes with each call."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, Replacement) else forward
