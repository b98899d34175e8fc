"""The one cache of recordings: decode steps and encoder passes that were captured and are kept from call to call.

A model keeps the recordings of its last few states, because callers may alternate between adapters.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fastgen import memory
from fastgen.decoding.captured import graph
from fastgen.decoding.guards import GuardedModel, GuardedState
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.interrupts import forkable_lock
from fastgen.memory import free_host_memory
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.models import attention_functions

# Limits: steps of all models together; encoder passes of one model, each of one shape; and recordings of one model that
# serve any number of inputs. A step holds K and V of a whole batch, and such a recording holds memory for the results
# of a step of many inputs. So the bytes of both are limited, too: to a part of the GPU's memory, or of the CPU's free
# memory, which others may need. On a CPU, K and V take no memory between two calls, and an engine has a step for each
# power of two of its slots, and for each kind of options.
MOST, MOST_PASSES = 24, 32
MOST_ON_GPU = 8
MOST_SYMBOLIC = 12
MOST_OF_MEMORY = 0.25
# States of a model whose recordings are kept.
_MOST_STATES = 4


class Kept(Protocol):
    """A captured step, or a captured encoder pass.

    Attributes:
        state: the state of the model with which it is captured.
    """

    key: Any
    state: Hashable

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def clear(self) -> None:
        """Discards what the last call has left in the buffers."""


@dataclass
class _OfModel:
    """What is kept of one state of a model: its recordings, and the keys that could not be captured."""

    state: Any  # a `GuardedState`, and the attention functions
    ledger: Ledger
    steps: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    refused: dict[Hashable, str] = field(default_factory=dict)
    symbolic: OrderedDict[Key, Any] = field(default_factory=OrderedDict)  # recordings for any number of inputs
    bound: set[Key] = field(default_factory=set)  # keys of any sizes, and any batch, whose recordings have fixed sizes
    shares_kv: bool | None = None  # whether rows can share K and V; None if no step has shown it
    former: list[_OfModel] = field(default_factory=list)  # of earlier states of the model, the most recent last


# Where a recording is kept: the model's state, one of its dictionaries, and the key there.
_Place = tuple[_OfModel, OrderedDict[Any, Any], Hashable]

_models: weakref.WeakKeyDictionary[Any, _OfModel] = weakref.WeakKeyDictionary()
# Only one thread at a time changes or iterates them: `disable` may free steps at any time, and a call on the CPU and a
# call on a GPU may run at the same time.
_lock = forkable_lock()


def take(model: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the step kept under this key, or the result of `make`, and takes it out of the cache for one call.

    Raises:
        CannotBeCaptured: capturing failed before, or the model runs code that is not the libraries' own.
    """
    with _lock:
        cached = _of(model)
        memory.limit(cached.refused)
        if key in cached.refused:
            raise CannotBeCaptured(cached.refused[key])
        found = cached.steps.pop(key, None)
        # Buffers are cleared here, not in `give_back`, so that a call like the last one finds its memory in place.
        for idle in (kept for other in _all() for kept in other.steps.values()):
            idle.clear()
    found = found or make()
    found.state = cached.state
    return found


def state(model: Any) -> Hashable:
    """Returns the present state of the model. Recordings of another state do not serve it.

    Raises:
        CannotBeCaptured: the model runs code that is not the libraries' own.
    """
    with _lock:
        return _of(model).state


def give_back(model: Any, found: Kept) -> None:
    """Keeps a captured step for the next call of its key, and evicts the least recently used ones to make room."""
    with _lock:
        cached = _models.get(model)
        if cached is None or cached.state != found.state:  # dropped meanwhile, or settings or the model have changed
            return
        cached.steps[found.key] = found
        _models[model] = _models.pop(model)  # now the most recently used model
        _make_room(found.device)


def _make_room(device: torch.device) -> None:
    """Frees the least recently used recordings of a device until the rest fits."""
    most_bytes, most = _most_bytes(device), MOST_ON_GPU if device.type == "cuda" else MOST
    while (oldest := _superfluous(device, most_bytes, most)) is not None:
        of, kept, key = oldest
        del kept[key]
        of.ledger.forget(key)  # otherwise each call would record the step again


def _superfluous(device: torch.device, most_bytes: float, most: int) -> _Place | None:
    """Returns what to evict, given at most this many steps and bytes on this device; None if everything fits."""
    steps, recordings = list[_Place](), list[_Place]()
    for of in _all():
        passes = [key for key in of.steps if not isinstance(key, Key)]
        if len(passes) > MOST_PASSES:
            return of, of.steps, passes[0]
        of_device = (key for key, step in of.steps.items() if step.device == device)
        steps += [(of, of.steps, key) for key in of_device if isinstance(key, Key)]
        if device.type == "cpu":
            recordings += [(of, of.symbolic, key) for key, found in of.symbolic.items() if found is not None]
    # An encoder pass keeps next to nothing. Recordings share the memory of their intermediate results.
    chunks = {chunk for _, kept, key in recordings for chunk in kept[key].chunks}
    nbytes = sum(kept[key].nbytes for _, kept, key in steps) + sum(chunk.nbytes for chunk in chunks)
    if len(steps) <= most and nbytes <= most_bytes:
        return None
    uncaptured = (each for each in steps if not each[1][each[2]].is_captured)
    # Programs that were made from a recording run without it.
    others = steps if len(steps) > most else [*recordings, *steps]
    return next(uncaptured, next(iter(others), None))


def used(model: Any, key: Hashable) -> Any:
    """Returns the step kept under this key, to be used in place by the thread that has the turn; None if there is none.

    Raises:
        CannotBeCaptured: the model runs code that is not the libraries' own.
    """
    with _lock:
        cached = _of(model)
        if key in cached.steps:
            cached.steps.move_to_end(key)
            _models[model] = _models.pop(model)  # now the most recently used model
        return cached.steps.get(key)


def refuse(model: Any, key: Hashable, reason: str) -> None:
    """Notes that a step of this key cannot be captured, so that no call tries again."""
    with _lock:
        _known(model).refused[key] = reason


def symbolic(model: Any, key: Key, inputs: int, make: Callable[[], Any]) -> Any:
    """Returns the recording for keys like this one that serves at least `inputs`, or the result of `make`; or None."""
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
        made = None  # each step is recorded separately, in less memory
    with _lock:
        # A recording for fewer inputs is kept if none could be made for this many.
        if _models.get(model) is cached and (made is not None or found is None):
            cached.symbolic[of_any] = made
            while len(cached.symbolic) > MOST_SYMBOLIC:
                cached.symbolic.popitem(last=False)
            _make_room(device)
    return made


def has_symbolic(model: Any, inputs: int, *keys: Key) -> bool:
    """Whether a recording for any number of inputs exists for one of these keys, and serves this many inputs."""

    def is_in(cached: _OfModel) -> bool:
        found = (cached.symbolic.get(_of_any_batch(key)) for key in keys)
        return any(recorded is not None and inputs <= recorded.most for recorded in found)

    with _lock:
        try:  # changes of the model are only looked for if there is a reason to
            return is_in(_known(model)) and is_in(_of(model))
        except CannotBeCaptured:
            return False


def bind(model: Any, step: Any) -> None:
    """Notes that the captured parts of this step cannot use larger buffers: it serves calls of its own sizes only."""
    with _lock:
        bound = _known(model).bound
        memory.limit(bound)
        bound.add(_of_any_batch(step.key))
    step.key = replace(step.key, sizes=step.sizes)


def is_bound(model: Any, key: Key) -> bool:
    """Whether steps of this key, which is open to any sizes, are known to have fixed sizes."""
    return _of_any_batch(key) in _known(model).bound


def is_refused(model: Any, key: Hashable) -> bool:
    """Whether a step of this key is known not to be capturable."""
    with _lock:
        try:  # changes of the model are only looked for if there is a reason to
            return key in _known(model).refused and key in _of(model).refused
        except CannotBeCaptured:
            return True


def note_shared_kv(model: Any, can: bool) -> None:
    """Notes whether rows can share K and V, as rows do that verify the draft of another row."""
    with _lock:
        _known(model).shares_kv = can


def shares_kv(model: Any) -> bool | None:
    """Returns whether rows of the model in its present state can share K and V; None if no step has shown it."""
    with _lock:
        try:  # changes of the model are only looked for if there is a reason to
            return None if _known(model).shares_kv is None else _of(model).shares_kv
        except CannotBeCaptured:
            return False


def kept(model: Any, key: Hashable) -> Any:
    """Returns the step kept under this key, or None, to read its measurements only: other calls may take it."""
    return _known(model).steps.get(key)


def others(model: Any, key: Key) -> list[Key]:
    """Returns the keys of kept steps that differ from `key` in the number of inputs at most."""
    of_any = _of_any_batch(key)
    return [other for other in tuple(_known(model).steps) if isinstance(other, Key) and _of_any_batch(other) == of_any]


def forget(model: Any, is_old: Callable[[Key], bool]) -> None:
    """Frees the steps of a model that no call will ask for any more."""
    with _lock:
        cached = _known(model)
        for state in (cached, *cached.former):
            for kept in (state.steps, state.refused):
                for key in [key for key in kept if isinstance(key, Key) and is_old(key)]:
                    del kept[key]


def drop(model: Any) -> None:
    """Frees the steps of a model, which hold the weights they were recorded with."""
    with _lock:
        _models.pop(model, None)


def drop_all() -> bool:
    """Frees the steps that are not in use. Returns whether there were any."""
    with _lock:
        found = any(cached.steps or cached.symbolic for cached in _all())
        for cached in _models.values():
            cached.ledger.forget()  # a new recording has to pay again
        _models.clear()
    graph.let_pools_go()
    return found


memory.register(drop_all, captured_steps=True)


def _of_any_batch(key: Key) -> Key:
    return replace(key, batch=0)


def _most_bytes(device: torch.device) -> float:
    is_gpu = device.type == "cuda"
    return MOST_OF_MEMORY * (torch.cuda.get_device_properties(device).total_memory if is_gpu else free_host_memory())


def _known(model: Any) -> _OfModel:
    """Returns what is kept of a model in whatever state; an empty record, kept nowhere, if there is nothing."""
    return _models.get(model) or _OfModel(None, Ledger())


def _of(model: Any) -> _OfModel:
    """Returns what is kept of a model in its present state."""
    state = GuardedModel.of(model).check(model), attention_functions()
    cached = _models.get(model)
    if cached is None:
        cached = _models[model] = _OfModel(state, Ledger.of(model))
    elif cached.state != state:
        cached = _models[model] = _changed(cached, state)
    return cached


def _changed(before: _OfModel, state: tuple[GuardedState, Hashable]) -> _OfModel:
    """Returns what is kept of a model that has changed. Earlier states with the same weights are kept, because callers
    may alternate between adapters. Steps of other weights are freed.
    """
    known = [*before.former, before]
    before.former = []
    of_state = next((each for each in known if each.state == state), None)
    if of_state is None:  # its recordings have to pay, or each change would lead to a recording
        before.ledger.forget()
        of_state = _OfModel(state, before.ledger)
    others = [each for each in known if each is not of_state]
    same_weights = [each for each in others if each.state[0].model.tensors == state[0].model.tensors]
    of_state.former = same_weights[1 - _MOST_STATES :]
    return of_state


def _all() -> Iterator[_OfModel]:
    """Iterates over what is kept of all models, in their present and earlier states."""
    for cached in _models.values():
        yield from cached.former
        yield cached
