"""Captured steps that are kept from one call to the next, on a GPU and on the CPU."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastgen import caches
from fastgen.decoding.captured import graph
from fastgen.decoding.guards import GuardedModel, GuardedState
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.locks import forkable_lock
from fastgen.memory import free_host_memory
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.models import attention_functions

# Of all models together. Each has the K/V of a whole batch, so there is a limit to their bytes, too: that part of the
# GPU's memory, or of what is free on the CPU. What is kept is missing elsewhere.
MOST = 8
MOST_OF_MEMORY = 0.25


@dataclass
class _OfModel:
    """The steps of one model, what its parameters were when they were captured, and what could not be captured."""

    state: tuple[GuardedState, Hashable]
    ledger: Ledger
    steps: OrderedDict[Key, DecodeStep] = field(default_factory=OrderedDict)
    refused: dict[Key, str] = field(default_factory=dict)
    bound: set[Key] = field(default_factory=set)  # keys of any sizes, and batch, whose recordings are of one size
    former: _OfModel | None = None  # of the model as it was before, which it may go back to: adapters in turn


_models: weakref.WeakKeyDictionary[Any, _OfModel] = weakref.WeakKeyDictionary()
# One thread at a time changes them, or goes through them: `disable` may free steps at any time, and the CPU and a GPU
# may have a call each.
_lock = forkable_lock()


def take(model: Any, key: Key, make: Callable[[], DecodeStep]) -> DecodeStep:
    """A step of this key, for one call at a time.

    Raises:
        CannotBeCaptured: that has been tried before, or the model runs more than the libraries' own code.
    """
    with _lock:
        cached = _of(model)
        caches.limit(cached.refused)
        if key in cached.refused:
            raise CannotBeCaptured(cached.refused[key])
        step = cached.steps.pop(key, None)
        # Not when it is given back: a call like the last one finds its memory where it was.
        for idle in (kept for other in _all() for kept in other.steps.values()):
            idle.clear()
    step = step or make()
    step.state = cached.state
    return step


def give_back(model: Any, step: DecodeStep) -> None:
    """Keeps a captured step for the next call of its key; those that were not used for longest go for it."""
    most = _most_bytes(step.device)
    with _lock:
        cached = _models.get(model)
        if cached is None or cached.state != step.state:  # it was dropped, or settings or the model have changed
            return
        cached.steps[step.key] = step
        _models[model] = _models.pop(model)  # the last one that was used
        while (steps := [x for other in _all() for x in other.steps.values()]) and (
            len(steps) > MOST or sum(x.nbytes for x in steps) > most
        ):
            oldest = next(other for other in _all() if other.steps)
            key, _ = oldest.steps.popitem(last=False)
            oldest.ledger.forget(key)  # or each call would record it again


def refuse(model: Any, key: Key, reason: str) -> None:
    """A step of this key cannot be captured, and is not to be tried again."""
    with _lock:
        cached = _models.get(model)
        if cached is not None:
            cached.refused[key] = reason


def bind(model: Any, step: DecodeStep) -> None:
    """What has been captured of this step does not go on with larger buffers: it is one for calls of its sizes."""
    with _lock:
        cached = _models.get(model)
        if cached is not None:
            cached.bound.add(_of_any_batch(step.key))
    step.key = replace(step.key, sizes=step.sizes)


def is_bound(model: Any, key: Key) -> bool:
    """Whether steps of this key, which is one of any sizes, are known to be of one size each."""
    cached = _models.get(model)
    return cached is not None and _of_any_batch(key) in cached.bound


def is_refused(model: Any, key: Key) -> bool:
    """Whether a step of this key is known not to be capturable."""
    with _lock:
        cached = _models.get(model)  # what has changed in the model is looked for only where there is a reason to
        try:
            return cached is not None and key in cached.refused and key in _of(model).refused
        except CannotBeCaptured:
            return True


def kept(model: Any, key: Key) -> DecodeStep | None:
    """The step of this key if there is one, to look at what it was measured to take; others may take it."""
    cached = _models.get(model)
    return None if cached is None else cached.steps.get(key)


def others(model: Any, key: Key) -> list[Key]:
    """The keys of steps for other numbers of inputs."""
    cached = _models.get(model)
    kept = () if cached is None else tuple(cached.steps)
    return [other for other in kept if _of_any_batch(other) == _of_any_batch(key)]


def forget(model: Any, is_old: Callable[[Key], bool]) -> None:
    """Frees the steps of a model that will not be asked for any more."""
    with _lock:
        cached = _models.get(model)
        for kept in () if cached is None else (cached.steps, cached.refused):
            for key in [key for key in kept if is_old(key)]:
                del kept[key]


def drop(model: Any) -> None:
    """Frees the steps of a model, which hold the weights that they were recorded with."""
    with _lock:
        _models.pop(model, None)


def drop_all() -> bool:
    """Frees the steps that are not in use; says whether there were any."""
    with _lock:
        found = any(cached.steps for cached in _all())
        _models.clear()
    graph.let_pools_go()
    return found


caches.register(drop_all, captured_steps=True)


def _of_any_batch(key: Key) -> Key:
    return replace(key, batch=0)


def _most_bytes(device: torch.device) -> float:
    is_gpu = device.type == "cuda"
    return MOST_OF_MEMORY * (torch.cuda.get_device_properties(device).total_memory if is_gpu else free_host_memory())


def _of(model: Any) -> _OfModel:
    """What is kept of a model; nothing that was captured with other parameters."""
    state = GuardedModel.of(model).check(model), attention_functions()
    cached = _models.get(model)
    if cached is None:
        cached = _models[model] = _OfModel(state, Ledger.of(model))
    elif cached.state != state:
        cached = _models[model] = _changed(cached, state)
    return cached


def _changed(before: _OfModel, state: tuple[GuardedState, Hashable]) -> _OfModel:
    """What is kept of a model that has changed: of adapters that are used in turn, the steps of both. Steps of weights
    that are gone are freed.
    """
    former, before.former = before.former, None
    if former is not None and former.state == state:
        former.former = before
        return former
    is_kept = before.state[0].model.tensors == state[0].model.tensors
    for dropped in (former, None if is_kept else before):
        for key in () if dropped is None else dropped.steps:
            before.ledger.forget(key)
    return _OfModel(state, before.ledger, former=before if is_kept else None)


def _all() -> Iterator[_OfModel]:
    """What is kept of all models as they are, and as they were before."""
    for cached in _models.values():
        if cached.former is not None:
            yield cached.former
        yield cached
