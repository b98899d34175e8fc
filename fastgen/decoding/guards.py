"""Guards: what a recording takes for granted of a model, checked before the recording is repeated.

A user may change a model between two calls: exchange modules or parameters, switch adapters by attributes, set scales,
register hooks, exchange forward passes and functions. What is written into the memory of a parameter needs no look: a
recording reads it there. An attribute that no code of the model's names changes nothing. What is more than the
libraries' own code has no recording at all (`fastgen.decoding.library_code`). docs/architecture.md says what is not
seen.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen import interrupts, settings
from fastgen.decoding import library_code
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layers import Replacement
from fastgen.decoding.library_code import Reached
from fastgen.decoding.modules import modules_of

_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# What torch keeps in modules, but for the hooks; and what needs no copy.
_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS | {"forward"}
_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
# Where modules hold others, and tensors.
_HELD = frozenset({"_modules", "_parameters", "_buffers"})


class _Everything:
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING: Container[str] = _Everything()


class ModelState(NamedTuple):
    """What a recording takes for granted of a model itself."""

    modules: Hashable
    tensors: Hashable  # where parameters and buffers are
    code: Hashable
    config: Hashable
    chosen: Hashable


class GuardedState(NamedTuple):
    """What a recording takes for granted: the key of its guards."""

    model: ModelState
    functions: Hashable


def state_of(model: Any, names: Container[str] = _EVERYTHING) -> ModelState:
    """What a recording takes for granted: modules, their settings and code, and where parameters and buffers are.

    Args:
        names: those of attributes that count.
    """
    found, look = modules_of(model), _Look(model.config)
    modules = tuple(
        [
            (id(module), type(module), module.training, _forward(module), _settings(module, look, names))
            for module in found
        ]
    )
    held = [tensor for module in found for kept in (module._parameters, module._buffers) for tensor in kept.values()]
    tensors = tuple([_memory(tensor) for tensor in held if tensor is not None])
    code = _code_of(_classes_of(map(type, found)))
    return ModelState(modules, tensors, code, _settings(model.config, look, names), _chosen())


def _classes_of(types: Iterable[type]) -> list[Any]:
    """What is defined in these types and those that they are made of, each once."""
    return list(map(vars, {base: None for kind in dict.fromkeys(types) for base in kind.__mro__}))


def _code_of(classes: list[Any]) -> tuple[Hashable, ...]:
    """Their forward passes, which somebody may exchange for all modules of a class."""
    return tuple([IdentityGuard.of(each.get("forward")) for each in classes])


def _chosen() -> Hashable:
    """The settings of FastGen that decide what is recorded."""
    now = settings.current()
    return now.packed_weights == "never", now.weight_dtype, now.weight_group_size, now.activations


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _settings(owner: Any, look: _Look, names: Container[str]) -> Hashable:
    """What a forward pass reads of an object besides modules, parameters and buffers, by name.

    Adapters are switched on and off in this way, scales are set, and implementations chosen.
    """
    return tuple(
        [
            (name, value if type(value) in _ATOMS else look.guarded(value))
            for name, value in vars(owner).items()
            if name not in _OF_TORCH and name in names
        ]
    )


class IdentityGuard:
    """Equals what stands for the same object, as long as that is there. The object is not held."""

    __slots__ = ("_number", "_object")

    def __init__(self, value: Any) -> None:
        self._object, self._number = weakref.ref(value), id(value)

    @classmethod
    def of(cls, value: Any) -> Hashable:
        """Of what no weak reference can be made, the type."""
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


class _Look:
    """What values are, none of which is held. An object that comes again is named by its number.

    Args:
        known: objects that are described elsewhere.
    """

    def __init__(self, *known: Any) -> None:
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def guarded(self, value: Any) -> Any:
        """A copy of numbers, words and tensors' memory, also in collections; of anything else what `about` says."""
        if type(value) in _ATOMS:
            return value
        if isinstance(value, dict):
            return tuple((str(key), self.guarded(part)) for key, part in value.items()) if value else None
        if isinstance(value, (list, tuple)):
            return tuple(map(self.guarded, value))
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.guarded, value))
        return _memory(value) if isinstance(value, Tensor) else self.about(value)

    def about(self, value: Any) -> Hashable:
        """Which function, module or member of an enumeration it is; what can be called, with what it computes with; the
        contents of configurations; of anything else the type."""
        if isinstance(value, Enum):
            return value
        if isinstance(value, (type, nn.Module)):
            return IdentityGuard.of(value)
        kind: type = type(value)
        if not (callable(value) or hasattr(kind, "model_type")):
            return kind
        known = len(self._numbers)
        number = self._numbers.setdefault(id(value), known)
        if number != known:
            return kind, number
        return (kind, *self._parts(value))

    def _parts(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, partial):
            return self.about(value.func), self.guarded(value.args), self.guarded(value.keywords)
        if isinstance(value, MethodType):
            return IdentityGuard.of(value.__func__), self.about(value.__self__)
        if isinstance(value, FunctionType):
            cells = [_contents(cell) for cell in value.__closure__ or ()]
            return IdentityGuard.of(value), *map(self.guarded, (cells, value.__defaults__, value.__kwdefaults__))
        if isinstance(value, BuiltinFunctionType):
            return (IdentityGuard.of(value),)
        if hasattr(type(value), "model_type"):
            return (self.guarded(vars(value)),)
        # Numbers and tensors alone: a tokenizer can be called, too, and has a vocabulary.
        parts = getattr(value, "__dict__", {}).items()
        return IdentityGuard.of(value), *[
            (name, self.guarded(part)) for name, part in parts if type(part) in (*_ATOMS, Tensor)
        ]


def _contents(cell: Any) -> Any:
    """None for a variable that has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _forward(module: Any) -> Any:
    """A forward pass of a module's own; of one of FastGen's, which comes and goes with each call, what is captured.

    What it keeps for itself does not count: somebody counts calls there, or measures time.
    """
    forward = vars(module).get("forward")
    if forward is None:  # as one of FastGen's that has nothing to say
        return None
    if isinstance(forward, Replacement):
        return forward.guarded()
    if isinstance(forward, MethodType):  # made anew whenever it is asked for
        return IdentityGuard.of(forward.__func__), IdentityGuard.of(forward.__self__)
    return IdentityGuard.of(forward)


class Guards:
    """The guards of a model as it is now. Checking them takes a fraction of `state_of`'s time.

    The attributes of all modules are compared with a copy of theirs, which Python does in one go. A model with a tensor
    among its attributes is never taken for unchanged, nor is one whose modules might know it: modules are held, and
    their model must go when its user lets go of it.

    Args:
        names: those of attributes that count.
    """

    def __init__(self, model: Any, names: Container[str] = _EVERYTHING) -> None:
        everything = modules_of(model)
        self._names = names
        self._types = list(map(type, everything))
        self._classes = _classes_of(self._types)
        self._code = _code_of(self._classes)
        inside = [(name, value, model.config) for each in everything[1:] for name, value in vars(each).items()]
        self._is_comparable = all(_is_harmless(*attribute) for attribute in inside)
        if not self._is_comparable:
            return
        self._others = everything[1:]
        self._orders = _orders(everything)
        self._own, *self._attributes = [_copy_of_module(each, model.config, names) for each in everything]
        held = [
            (n, kind, name, tensor)
            for n, module in enumerate(everything)
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(module, kind).items()
            if tensor is not None
        ]
        self._tensors = [tensor for *_, tensor in held]
        self._memory = _memory_of_all(self._tensors)
        # Another tensor of one number equals the one that was there if that number does: these are looked at by name.
        self._single = [each for each in held if each[-1].numel() == 1]
        self._config = {name: _copy(value) for name, value in vars(model.config).items()}
        self._chosen = _chosen()

    def hold(self, model: Any) -> bool:
        """Whether nothing has changed that `state_of` looks at, there are no hooks, and no module is in another mode.

        If this is False, something may have changed.
        """
        if not self._is_comparable:
            return False
        everything = [model, *self._others]
        try:
            return bool(
                self._are_alike(vars(model), self._own)
                and self._have_attributes()
                and list(map(type, everything)) == self._types
                and _orders(everything) == self._orders
                and _code_of(self._classes) == self._code
                and all(getattr(everything[n], kind).get(name) is tensor for n, kind, name, tensor in self._single)
                and _memory_of_all(self._tensors) == self._memory
                and self._are_alike(vars(model.config), self._config)
                and _chosen() == self._chosen
            )
        except Exception as error:  # another tensor, say, whose numbers have been compared
            interrupts.pass_on(error)
            return False

    def _have_attributes(self) -> bool:
        now = list(map(vars, self._others))
        return self._attributes == now or all(map(self._are_alike, now, self._attributes))

    def _are_alike(self, now: dict[str, Any], before: dict[str, Any]) -> bool:
        """Whether attributes that count are as they were, in an object that may have got others."""
        if before == now:  # in this order: what stands for a value is asked first
            return True
        counting = [name for name in {*now, *before} if _counts(name, self._names)]
        return all(name in now and name in before and before[name] == now[name] for name in counting)


def _orders(modules: Sequence[nn.Module]) -> list[list[str]]:
    """The names of what each holds, in the order in which a Sequential runs them: equal dictionaries may differ."""
    return [list(each._modules) for each in modules]


_READ: tuple[Callable[[Tensor], Any], ...] = (Tensor.data_ptr, attrgetter("dtype"), attrgetter("shape"), Tensor.stride)


def _memory_of_all(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """What `_memory` says of each, in another order."""
    return [list(map(read, tensors)) for read in _READ]


def _copy_of_module(module: nn.Module, config: Any, names: Container[str]) -> dict[str, Any]:
    """The attributes of a module, to be compared with what they are later; without hooks. Of those that do not count,
    none is looked into that may lead to the model.
    """
    return {
        name: _copy_of_attribute(name, value, config)
        if _counts(name, names) or _is_harmless(name, value, config)
        else None
        for name, value in vars(module).items()
    }


def _counts(name: str, names: Container[str]) -> bool:
    return name in names or name in _HOOKS or name in _OF_TORCH


def _copy_of_attribute(name: str, value: Any, config: Any) -> Any:
    if name in _HOOKS:
        return {}
    if name in _HELD:
        return dict(value)
    return value if value is config else _copy(value)


def _is_harmless(name: str, value: Any, config: Any) -> bool:
    """Whether an attribute of a module certainly does not lead to the model that it is in."""
    if (
        name in _HELD
        or value is config
        or type(value) in _ATOMS
        or isinstance(value, (Tensor, Enum, BuiltinFunctionType))
    ):
        return True
    if isinstance(value, dict):
        return all(_is_harmless("", part, config) for part in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_harmless("", part, config) for part in value)
    if not isinstance(value, FunctionType) or value.__closure__:
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return all(_is_harmless("", part, config) for part in defaults)


def _copy(value: Any) -> Any:
    """What equals a value only as long as `_Look.guarded` gives the same for it."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    if kind in (list, tuple):
        return kind(map(_copy, value))
    if kind in (set, frozenset):
        return kind(value) if all(type(part) in _ATOMS for part in value) else _NOTHING
    return _NOTHING if isinstance(value, Tensor) else _Alike(value)


# Equals nothing that an attribute may be.
_NOTHING = object()


class _Alike:
    """Equals what `_Look.about` does not tell from a value, if that leaves it to this. The value may hold the model: it
    is not held.
    """

    __hash__ = None  # type: ignore[assignment]  # how Python says that there is none

    def __init__(self, value: Any) -> None:
        self._about = _Look().about(value)

    def __eq__(self, other: object) -> bool:
        return _Look().about(other) == self._about


# A model that has changed before so many looks is left alone for a while, for so many calls at the most.
_PATIENCE, _LONGEST_PAUSE = 4, 64
# One that has been found to be more than the libraries' own code may be so for a while only.
_PAUSE_OF_FOREIGN = 2
# States that a model may go back to: adapters that are used in turn.
_KEPT = 4


class GuardedModel:
    """What one model is from call to call: the one place that says whether there may be recordings of it, and which.

    A look at a model that has not changed takes a fraction of the time of one that has. Where each look finds another
    model, the next calls do without.
    """

    _of: weakref.WeakKeyDictionary[Any, GuardedModel] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._known: OrderedDict[GuardedState, tuple[Guards, Reached]] = OrderedDict()
        self._changes = 0  # looks one after the other that have found a model that was not known
        self._reason = ""  # why there is no recording in the next calls
        self._pause = self._length = 0

    @classmethod
    def of(cls, model: Any) -> GuardedModel:
        return cls._of.setdefault(model, cls())

    def check(self, model: Any) -> GuardedState:
        """What a recording takes for granted of the model, as it is now.

        Raises:
            CannotBeCaptured: there can be no recording of it.
        """
        unusual = library_code.unusual()
        if unusual is not None:
            raise CannotBeCaptured(unusual)
        for state, (guards, reached) in reversed(self._known.items()):
            if guards.hold(model) and reached.hold():
                self._known.move_to_end(state)
                self._changes = self._length = 0
                return state
        return self._looked_into(model)

    def _looked_into(self, model: Any) -> GuardedState:
        if self._pause:
            self._pause -= 1
            raise CannotBeCaptured(self._reason)
        reason = library_code.foreign(model)
        if reason is not None:
            self._known.clear()
            self._leave_alone(reason, _PAUSE_OF_FOREIGN)
            raise CannotBeCaptured(reason)
        reached = Reached.of(model)
        state = GuardedState(state_of(model, reached.names), reached.functions)
        is_new = bool(self._known) and state not in self._known
        if state not in self._known:
            self._known[state] = Guards(model, reached.names), reached
        self._known.move_to_end(state)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        self._changes = self._changes + 1 if is_new else 0
        if self._changes >= _PATIENCE:
            self._leave_alone("the model changes from call to call")
        return state

    def _leave_alone(self, reason: str, longest: int = _LONGEST_PAUSE) -> None:
        """The next calls do without a look, which takes longer the more is new: first none, then twice as many."""
        self._reason, self._pause = reason, self._length
        self._length = min(max(2 * self._length, 1), longest)
