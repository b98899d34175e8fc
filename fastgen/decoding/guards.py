"""Guards: what a recording assumes about a model, checked before the recording is replayed.

Between two calls, a user may replace modules or parameters, switch adapters through attributes, set scales, register
hooks, and replace forward passes and functions. The contents of parameters need no guard: a recording reads them from
memory. An attribute that the model's code does not name has no effect. A model with third-party code is never recorded
(`fastgen.decoding.library_code`). docs/architecture.md lists changes that are not noticed.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from fastgen import settings
from fastgen.decoding import library_code
from fastgen.decoding.kv import view
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layers import Replacement
from fastgen.decoding.library_code import Reached, are_the_same, is_own, modules_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HELD = ("_parameters", "_buffers")
# Attributes that torch keeps in modules; and types whose values need no copy.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


class ModelState(NamedTuple):
    """What a recording assumes about the model itself."""

    modules: Hashable
    tensors: Hashable  # addresses, dtypes and shapes of parameters and buffers
    config: Hashable
    chosen: Hashable


class GuardedState(NamedTuple):
    """Everything that a recording assumes: the key of its guards."""

    model: ModelState
    functions: Hashable


def state_of(model: Any, names: Container[str]) -> ModelState:
    """Returns what a recording assumes: modules, their settings, and the memory of parameters and buffers. What their
    classes run is in `Reached`.

    Args:
        names: names of the attributes that are guarded.
    """
    found, describer = modules_of(model), _Describer(names, model.config)
    attributes = list(map(vars, found))
    kinds, modes = tuple(map(type, found)), tuple(map(attrgetter("training"), found))
    replaced = [(at, _forward(own["forward"])) for at, own in enumerate(attributes) if "forward" in own]
    forwards = tuple([each for each in replaced if each[1] is not None])
    settings, hooks = describer.settings(attributes), _hooks(attributes, describer)
    modules = tuple(map(id, found)), kinds, modes, forwards, settings, hooks
    held = [each for own in attributes for kept in _HELD for each in own[kept].values()]
    tensors = [each for each in held if each is not None]
    memory = tuple([tuple(map(read, tensors)) for read in _READ])
    return ModelState(modules, memory, describer.settings([vars(model.config)]), _chosen())


def _state(model: Any, reached: Reached) -> GuardedState:
    return GuardedState(state_of(model, reached.names), reached.functions)


def _hooks(attributes: list[dict[str, Any]], describer: _Describer) -> tuple[Hashable, ...]:
    """Returns the hooks of modules with these attributes, without those of the library that have no effect."""
    found = [(at, name, own[name]) for at, own in enumerate(attributes) for name in _HOOKS if own[name]]
    counting = [(at, name, library_code.without_capturing(hooks)) for at, name, hooks in found]
    return tuple([(at, name, describer.describe(hooks)) for at, name, hooks in counting if hooks])


def _chosen() -> Hashable:
    """Returns FastGen's settings that affect what is recorded, and torch's default dtype."""
    now, default = settings.current(), torch.get_default_dtype()
    return now.packed_weights == "never", now.weight_dtype, now.weight_group_size, now.activations, default


# Facts of a tensor's memory. Reading one fact of all tensors after the other takes a third of the time.
_READ: tuple[Callable[[Tensor], Hashable], ...] = (Tensor.data_ptr, attrgetter("dtype", "shape"), Tensor.stride)


def _memory(tensor: Tensor) -> Hashable:
    return tuple([read(tensor) for read in _READ])


class IdentityGuard:
    """Equals a guard of the same object while the object lives. It holds no reference to the object."""

    __slots__ = ("_number", "_object")

    def __init__(self, value: Any) -> None:
        self._object, self._number = weakref.ref(value), id(value)

    @classmethod
    def of(cls, value: Any) -> Hashable:
        """Returns a guard of the object, or its type if it cannot be weakly referenced."""
        try:
            return cls(value)
        except TypeError:
            kind: type = type(value)
            return kind

    def __eq__(self, other: object) -> bool:
        mine = self._object()
        return isinstance(other, IdentityGuard) and mine is not None and mine is other._object()

    def __hash__(self) -> int:
        return self._number


class _Describer:
    """Describes values without holding them. An object that occurs again is described by its index.

    Args:
        names: names of the attributes that are guarded.
        known: objects that are described elsewhere.
    """

    def __init__(self, names: Container[str], *known: Any) -> None:
        self._names = names
        self._guarded: dict[tuple[str, ...], tuple[str, ...]] = {}  # names that are guarded, by those of all attributes
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def settings(self, owners: Iterable[dict[str, Any]]) -> tuple[Hashable, Hashable]:
        """Returns what a forward pass may read from objects besides modules, parameters and buffers: names, values.

        Users switch adapters, set scales and choose implementations through such attributes.

        Args:
            owners: the attributes of each object.
        """
        names: list[tuple[str, ...]] = []
        values: list[Any] = []
        for attributes in owners:
            every = tuple(attributes)
            guarded = self._guarded.get(every)
            if guarded is None:
                guarded = tuple([name for name in every if name not in _OF_TORCH and name in self._names])
                self._guarded[every] = guarded
            names.append(guarded)
            values += map(attributes.__getitem__, guarded)
        return tuple(names), tuple([each if type(each) in _ATOMS else self.describe(each) for each in values])

    def describe(self, value: Any) -> Any:
        """Copies atoms and the memory layout of tensors, also in collections, and identifies anything else."""
        if type(value) in _ATOMS:
            return value
        if id(value) in self._numbers:
            return type(value), self._numbers[id(value)]
        if isinstance(value, dict):
            return tuple((str(key), self.describe(part)) for key, part in value.items()) if value else None
        if isinstance(value, (list, tuple)):
            return tuple(map(self.describe, value))
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.describe, value))
        return _memory(value) if isinstance(value, Tensor) else self.identify(value)

    def identify(self, value: Any) -> Hashable:
        """Returns the identity of functions, modules and enum members; for other callables, also what they compute
        with; for configurations, their contents; for anything else, the type.
        """
        if isinstance(value, Enum):
            return value
        if isinstance(value, (type, nn.Module)):
            return IdentityGuard.of(value)
        kind: type = type(value)
        if not (callable(value) or hasattr(kind, "model_type")):
            return kind
        known = len(self._numbers)
        number = self._numbers.setdefault(id(value), known)
        return (kind, number) if number != known else (kind, *self._parts(value))

    def _parts(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, partial):
            return self.identify(value.func), self.describe(value.args), self.describe(value.keywords)
        if isinstance(value, MethodType):
            return IdentityGuard.of(value.__func__), self.identify(value.__self__)
        if isinstance(value, FunctionType):
            cells = [_contents(cell) for cell in value.__closure__ or ()]
            return IdentityGuard.of(value), *map(self.describe, (cells, value.__defaults__, value.__kwdefaults__))
        if isinstance(value, BuiltinFunctionType):
            return (IdentityGuard.of(value),)
        if hasattr(type(value), "model_type"):
            return (self.describe(vars(value)),)
        # Only atoms and tensors: a tokenizer is callable, too, and has a vocabulary.
        parts = getattr(value, "__dict__", {}).items()
        return IdentityGuard.of(value), *[
            (name, self.describe(part)) for name, part in parts if type(part) in (*_ATOMS, Tensor)
        ]


def _contents(cell: Any) -> Any:
    """Returns the contents of a closure cell; None if its variable has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _forward(forward: Any) -> Hashable:
    """Returns the identity of a module's own forward pass. A form of FastGen's comes and goes with each call, and is
    identified by what is captured of it, or None. Attributes of the function are not guarded: users may count calls
    there.
    """
    if isinstance(forward, Replacement):
        return forward.guarded()
    if isinstance(forward, MethodType):  # a new object at each access
        return IdentityGuard.of(forward.__func__), IdentityGuard.of(forward.__self__)
    return IdentityGuard.of(forward)


# A model that has changed in this many checks in a row is not checked during a back-off of at most this many calls.
_MOST_CHANGES, _MOST_CALLS = 4, 64
# The limit for models with third-party code, which may be temporary.
_MOST_CALLS_OF_FOREIGN = 2
# Known states of a model, which it may return to, such as alternating adapters.
_KEPT = 4


class GuardedModel:
    """The guarded states of one model. Only this class decides whether the model may be recorded, and in which state.

    If each check finds a new state, the next calls are not captured (back-off).
    """

    _of: weakref.WeakKeyDictionary[Any, GuardedModel] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        # With what the model reaches in each state. The state found last is first.
        self._known: list[tuple[GuardedState, Reached]] = []
        self._changes = 0  # consecutive checks that have found an unknown state
        self._reason = ""  # why the next calls are not captured
        self._left = self._length = 0  # remaining calls, and length in calls, of the back-off

    @classmethod
    def of(cls, model: Any) -> GuardedModel:
        return cls._of.setdefault(model, cls())

    def check(self, model: Any) -> GuardedState:
        """Returns what a recording assumes of the model in its present state.

        Raises:
            CannotBeCaptured: the model cannot be recorded.
        """
        reason = unusual()
        if reason is not None:
            raise CannotBeCaptured(reason)
        found: dict[int, GuardedState | None] = {}  # states with the same classes share what they reach
        for known, reached in tuple(self._known):  # another thread may check the model meanwhile
            if id(reached) not in found:
                found[id(reached)] = _state(model, reached) if reached.hold() else None
            if known == found[id(reached)]:
                self._known = [(known, reached), *(each for each in self._known if each[0] is not known)]
                self._changes = self._length = 0
                return known
        return self._new_state(model)

    def _new_state(self, model: Any) -> GuardedState:
        if self._left:
            self._left -= 1
            raise CannotBeCaptured(self._reason)
        reason = library_code.foreign(model)
        if reason is not None:
            self._known = []
            self._back_off(reason, _MOST_CALLS_OF_FOREIGN)
            raise CannotBeCaptured(reason)
        reached = Reached.of(model)
        state = _state(model, reached)
        before = next((known for known, _ in self._known if known == state), None)
        is_new = bool(self._known) and before is None
        state = before or state  # one object stands for a state
        others = [each for each in self._known if each[0] is not state]
        self._known = [(state, reached), *others[: _KEPT - 1]]
        self._changes = self._changes + 1 if is_new else 0
        if self._changes >= _MOST_CHANGES:
            self._back_off("the model changes from call to call")
        return state

    def _back_off(self, reason: str, most: int = _MOST_CALLS) -> None:
        """Prevents the capture of the next calls: none after the first time, then 1, 2, 4 and so on."""
        self._reason, self._left = reason, self._length
        self._length = min(max(2 * self._length, 1), most)


# ---- torch itself

# Functions of torch.nn.functional that a step may run. Losses are left out: libraries for training replace them.
_OF_STEPS = sorted(name for name in vars(F) if not name.startswith("_") and not re.search("loss|entropy", name))
# Functions of torch and its tensors that FastGen's tensors replace.
_OF_VIEWS = sorted({getattr(each, "__name__", "") for each in view.RULES} - {"", "__get__"})
_WATCHED: tuple[tuple[Any, Sequence[str]], ...] = (
    (F, _OF_STEPS),
    (torch, _OF_VIEWS),
    (Tensor, _OF_VIEWS),
    (nn.Linear, ("forward",)),
)
_seen: list[Any] = []  # these functions when all were torch's own; no user's functions


def unusual() -> str | None:
    """Returns why FastGen must not replace torch functions here and now, or None.

    A mode of the user's sees each operation. A default device is a mode of torch's own, which is allowed.
    """
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():
            if not type(mode).__module__.startswith(("torch.utils._device", "fastgen.")):
                return f"a TorchFunctionMode is active ({type(mode).__name__})"
    for n in range(torch._C._len_torch_dispatch_stack()):
        kind = type(torch._C._get_dispatch_stack_at(n))
        if not kind.__module__.startswith("fastgen."):
            return f"a TorchDispatchMode is active ({kind.__name__})"
    replaced = _replaced()
    return None if replaced is None else f"a function of torch has been replaced ({replaced})"


def _replaced() -> str | None:
    """Returns the name of a function that is not torch's own any more, or None."""
    global _seen
    now = [value for owner, names in _WATCHED for value in map(vars(owner).get, names)]
    if are_the_same(now, _seen):
        return None
    for owner, names in _WATCHED:
        for name in names:
            value = vars(owner).get(name)
            if callable(value) and not is_own(value):
                return f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}"
    _seen = now
    return None
