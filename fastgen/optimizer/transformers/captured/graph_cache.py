"""What has been captured, and is kept from one call to the next: decode steps, and passes of encoders.

The one cache of recordings. A model has those of its last states: adapters are used in turn.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fastgen import caches
from fastgen.decoding.captured import graph
from fastgen.decoding.guards import GuardedModel, GuardedState
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.locks import forkable_lock
from fastgen.memory import free_host_memory
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.models import attention_functions

# Steps of all models together; passes of the encoder of one, of which each is of one shape; and what is recorded of one
# for any number of inputs. A step has the K/V of a whole batch, and such a recording has memory for what a step of many
# inputs computes. So there is a limit to the bytes of both, too: that part of the GPU's memory, or of what is free on
# the CPU. What is kept is missing elsewhere. On the CPU K and V take no memory between two calls, and an engine has a
# step for each power of two of its slots, and each kind of options.
MOST, MOST_PASSES = 24, 32
MOST_ON_GPU = 8
MOST_SYMBOLIC = 12
MOST_OF_MEMORY = 0.25
# States of a model.
_MOST_STATES = 4


class Kept(Protocol):
    """A captured step, or a captured pass.

    Attributes:
        state: of the model that it is captured with.
    """

    key: Any
    state: Hashable

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def clear(self) -> None:
        """What the last call has left is of no use any more."""


@dataclass
class _OfModel:
    """What is kept of one model as it is now: what was captured, and what could not be."""

    state: Any  # a `GuardedState`, and the attention functions
    ledger: Ledger
    steps: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    refused: dict[Hashable, str] = field(default_factory=dict)
    symbolic: OrderedDict[Key, Any] = field(default_factory=OrderedDict)  # recorded for any number of inputs
    bound: set[Key] = field(default_factory=set)  # keys of any sizes, and batch, whose recordings are of one size
    shares_kv: bool | None = None  # whether rows can share K and V; None if no step has shown it
    former: list[_OfModel] = field(default_factory=list)  # of the model as it was before, the last one last


# What is kept: of which model, in which of its dictionaries, and under which key there.
_Place = tuple[_OfModel, OrderedDict[Any, Any], Hashable]

_models: weakref.WeakKeyDictionary[Any, _OfModel] = weakref.WeakKeyDictionary()
# One thread at a time changes them, or goes through them: `disable` may free steps at any time, and the CPU and a GPU
# may have a call each.
_lock = forkable_lock()


def take(model: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """What is kept under this key, or what `make` makes, for one call at a time.

    Raises:
        CannotBeCaptured: that has been tried before, or the model runs more than the libraries' own code.
    """
    with _lock:
        cached = _of(model)
        caches.limit(cached.refused)
        if key in cached.refused:
            raise CannotBeCaptured(cached.refused[key])
        found = cached.steps.pop(key, None)
        # Not when it is given back: a call like the last one finds its memory where it was.
        for idle in (kept for other in _all() for kept in other.steps.values()):
            idle.clear()
    found = found or make()
    found.state = cached.state
    return found


def state(model: Any) -> Hashable:
    """The model as it is now: what was captured with another one does not serve.

    Raises:
        CannotBeCaptured: the model runs more than the libraries' own code.
    """
    with _lock:
        return _of(model).state


def give_back(model: Any, found: Kept) -> None:
    """Keeps what was captured for the next call of its key; those that were not used for longest go for it."""
    with _lock:
        cached = _models.get(model)
        if cached is None or cached.state != found.state:  # it was dropped, or settings or the model have changed
            return
        cached.steps[found.key] = found
        _models[model] = _models.pop(model)  # the last one that was used
        _make_room(found.device)


def _make_room(device: torch.device) -> None:
    """Frees what was not used for longest, until there is room for what is kept on a device."""
    most_bytes, most = _most_bytes(device), MOST_ON_GPU if device.type == "cuda" else MOST
    while (oldest := _superfluous(device, most_bytes, most)) is not None:
        of, kept, key = oldest
        del kept[key]
        of.ledger.forget(key)  # or each call would record it again


def _superfluous(device: torch.device, most_bytes: float, most: int) -> _Place | None:
    """What is to go, of so many steps in so many bytes on this device; None if there is room for all."""
    steps, recordings = list[_Place](), list[_Place]()
    for of in _all():
        passes = [key for key in of.steps if not isinstance(key, Key)]
        if len(passes) > MOST_PASSES:
            return of, of.steps, passes[0]
        of_device = (key for key, step in of.steps.items() if step.device == device)
        steps += [(of, of.steps, key) for key in of_device if isinstance(key, Key)]
        if device.type == "cpu":
            recordings += [(of, of.symbolic, key) for key, found in of.symbolic.items() if found is not None]
    # Of a pass next to nothing is kept. Recordings share memory for what they compute.
    chunks = {chunk for _, kept, key in recordings for chunk in kept[key].chunks}
    nbytes = sum(kept[key].nbytes for _, kept, key in steps) + sum(chunk.nbytes for chunk in chunks)
    if len(steps) <= most and nbytes <= most_bytes:
        return None
    uncaptured = (each for each in steps if not each[1][each[2]].is_captured)
    # The programs that were made of a recording go on without it.
    others = steps if len(steps) > most else [*recordings, *steps]
    return next(uncaptured, next(iter(others), None))


def used(model: Any, key: Hashable) -> Any:
    """What is kept under this key, to be used where it is, by who has the turn; None if there is nothing.

    Raises:
        CannotBeCaptured: the model runs more than the libraries' own code.
    """
    with _lock:
        cached = _of(model)
        if key in cached.steps:
            cached.steps.move_to_end(key)
            _models[model] = _models.pop(model)  # the last one that was used
        return cached.steps.get(key)


def refuse(model: Any, key: Hashable, reason: str) -> None:
    """What has this key cannot be captured, and is not to be tried again."""
    with _lock:
        _known(model).refused[key] = reason


def symbolic(model: Any, key: Key, inputs: int, make: Callable[[], Any]) -> Any:
    """What was recorded for keys like this one, for so many inputs at least, or what `make` makes; or None."""
    with _lock:
        cached = _of(model)
        of_any = _of_any_batch(key)
        found = cached.symbolic.get(of_any)
        if of_any in cached.symbolic and (found is None or inputs <= found.most):
            cached.symbolic.move_to_end(of_any)
            return found
    made = make()
    device = torch.device("cpu")
    if made is not None and sum(chunk.nbytes for chunk in made.chunks) > _most_bytes(device):
        made = None  # each step is recorded for itself, in less memory
    with _lock:
        # What serves fewer inputs stays where there is nothing for so many.
        if _models.get(model) is cached and (made is not None or found is None):
            cached.symbolic[of_any] = made
            while len(cached.symbolic) > MOST_SYMBOLIC:
                cached.symbolic.popitem(last=False)
            _make_room(device)
    return made


def has_symbolic(model: Any, inputs: int, *keys: Key) -> bool:
    """Whether there is something recorded for keys like one of these of any number of inputs, so many among them."""

    def is_in(cached: _OfModel) -> bool:
        found = (cached.symbolic.get(_of_any_batch(key)) for key in keys)
        return any(recorded is not None and inputs <= recorded.most for recorded in found)

    with _lock:
        try:  # what has changed in the model is looked for only where there is a reason to
            return is_in(_known(model)) and is_in(_of(model))
        except CannotBeCaptured:
            return False


def bind(model: Any, step: Any) -> None:
    """What has been captured of this step does not go on with larger buffers: it is one for calls of its sizes."""
    with _lock:
        bound = _known(model).bound
        caches.limit(bound)
        bound.add(_of_any_batch(step.key))
    step.key = replace(step.key, sizes=step.sizes)


def is_bound(model: Any, key: Key) -> bool:
    """Whether steps of this key, which is one of any sizes, are known to be of one size each."""
    return _of_any_batch(key) in _known(model).bound


def is_refused(model: Any, key: Hashable) -> bool:
    """Whether what has this key is known not to be capturable."""
    with _lock:
        try:  # what has changed in the model is looked for only where there is a reason to
            return key in _known(model).refused and key in _of(model).refused
        except CannotBeCaptured:
            return True


def note_shared_kv(model: Any, can: bool) -> None:
    """A step has shown whether rows can share K and V, as those do that verify what is drafted."""
    with _lock:
        _known(model).shares_kv = can


def shares_kv(model: Any) -> bool | None:
    """Whether rows of the model as it is now can share K and V; None if no step has shown it."""
    with _lock:
        try:  # what has changed in the model is looked for only where there is a reason to
            return None if _known(model).shares_kv is None else _of(model).shares_kv
        except CannotBeCaptured:
            return False


def kept(model: Any, key: Hashable) -> Any:
    """What is kept under this key, or None: to look at what it was measured to take; others may take it."""
    return _known(model).steps.get(key)


def others(model: Any, key: Key) -> list[Key]:
    """The keys of steps for other numbers of inputs."""
    of_any = _of_any_batch(key)
    return [other for other in tuple(_known(model).steps) if isinstance(other, Key) and _of_any_batch(other) == of_any]


def forget(model: Any, is_old: Callable[[Key], bool]) -> None:
    """Frees the steps of a model that will not be asked for any more."""
    with _lock:
        cached = _known(model)
        for state in (cached, *cached.former):
            for kept in (state.steps, state.refused):
                for key in [key for key in kept if isinstance(key, Key) and is_old(key)]:
                    del kept[key]


def drop(model: Any) -> None:
    """Frees the steps of a model, which hold the weights that they were recorded with."""
    with _lock:
        _models.pop(model, None)


def drop_all() -> bool:
    """Frees the steps that are not in use; says whether there were any."""
    with _lock:
        found = any(cached.steps or cached.symbolic for cached in _all())
        for cached in _models.values():
            cached.ledger.forget()  # what was recorded has to pay again
        _models.clear()
    graph.let_pools_go()
    return found


caches.register(drop_all, captured_steps=True)


def _of_any_batch(key: Key) -> Key:
    return replace(key, batch=0)


def _most_bytes(device: torch.device) -> float:
    is_gpu = device.type == "cuda"
    return MOST_OF_MEMORY * (torch.cuda.get_device_properties(device).total_memory if is_gpu else free_host_memory())


def _known(model: Any) -> _OfModel:
    """What is kept of a model, whatever it is now; of one of which nothing is, what goes here is kept nowhere."""
    return _models.get(model) or _OfModel(None, Ledger())


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
    """What is kept of a model that has changed: of adapters that are used in turn, the steps of all. Steps of weights
    that are gone are freed.
    """
    known = [*before.former, before]
    before.former = []
    of_state = next((each for each in known if each.state == state), None)
    if of_state is None:  # what is recorded for it has to pay, or each change would make a recording
        before.ledger.forget()
        of_state = _OfModel(state, before.ledger)
    others = [each for each in known if each is not of_state]
    same_weights = [each for each in others if each.state[0].model.tensors == state[0].model.tensors]
    of_state.former = same_weights[1 - _MOST_STATES :]
    return of_state


def _all() -> Iterator[_OfModel]:
    """What is kept of all models as they are, and as they were before."""
    for cached in _models.values():
        yield from cached.former
        yield cached
