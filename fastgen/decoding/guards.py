"""Guards: what a recording assumes about a model, checked before the recording is replayed.

Between two calls, a user may replace modules or parameters, switch adapters through attributes, set scales, register
hooks, and replace forward passes and functions. The contents of parameters need no guard: a recording reads them from
memory. An attribute that the model's code does not name has no effect. A model with third-party code is never recorded
(`fastgen.decoding.library_code`). docs/architecture.md lists changes that are not noticed.
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

from fastgen import interrupts, patching, settings
from fastgen.decoding import library_code, torch_functions
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layers import Replacement
from fastgen.decoding.library_code import Reached
from fastgen.decoding.modules import modules_of

_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# Attributes that torch keeps in modules, except hooks; and types whose values need no copy.
_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS | {"forward"}
_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
# Attributes in which modules keep other modules, and tensors.
_HELD = frozenset({"_modules", "_parameters", "_buffers"})


class ModelState(NamedTuple):
    """What a recording assumes about the model itself."""

    modules: Hashable
    tensors: Hashable  # addresses, dtypes and shapes of parameters and buffers
    code: Hashable
    config: Hashable
    chosen: Hashable


class GuardedState(NamedTuple):
    """Everything that a recording assumes: the key of its guards."""

    model: ModelState
    functions: Hashable


def state_of(model: Any, names: Container[str]) -> ModelState:
    """Returns what a recording assumes: modules, their settings and code, and the memory of parameters and buffers.

    Args:
        names: names of the attributes that are guarded.
    """
    found, describer = modules_of(model), _Describer(model.config)
    modules = tuple([(id(m), type(m), m.training, _forward(m), _settings(m, describer, names)) for m in found])
    held = [tensor for module in found for kept in (module._parameters, module._buffers) for tensor in kept.values()]
    tensors = tuple([_memory(tensor) for tensor in held if tensor is not None])
    code = _code_of(_classes_of(map(type, found)))
    return ModelState(modules, tensors, code, _settings(model.config, describer, names), _chosen())


def _classes_of(types: Iterable[type]) -> list[Any]:
    """Returns the namespaces of these types and their bases, each once."""
    return list(map(vars, {base: None for kind in dict.fromkeys(types) for base in kind.__mro__}))


def _code_of(classes: list[Any]) -> tuple[Hashable, ...]:
    """Returns guards of the classes' forward passes, which a user may replace for all modules of a class."""
    return tuple([IdentityGuard.of(each.get("forward")) for each in classes])


def _chosen() -> Hashable:
    """Returns FastGen's settings that affect what is recorded, and torch's default dtype."""
    now, default = settings.current(), torch.get_default_dtype()
    return now.packed_weights == "never", now.weight_dtype, now.weight_group_size, now.activations, default


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _settings(owner: Any, describer: _Describer, names: Container[str]) -> Hashable:
    """Returns what a forward pass may read from an object besides modules, parameters and buffers, by name.

    Users switch adapters, set scales and choose implementations through such attributes.
    """
    return tuple(
        [
            (name, value if type(value) in _ATOMS else describer.describe(_guarded(name, value)))
            for name, value in vars(owner).items()
            if name not in _OF_TORCH and name in names
        ]
    )


def _guarded(name: str, value: Any) -> Any:
    return library_code.without_capturing(value) if name in _HOOKS else value


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
        known: objects that are described elsewhere.
    """

    def __init__(self, *known: Any) -> None:
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def describe(self, value: Any) -> Any:
        """Copies atoms and the memory layout of tensors, also in collections, and identifies anything else."""
        if type(value) in _ATOMS:
            return value
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
        if number != known:
            return kind, number
        return (kind, *self._parts(value))

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


def _forward(module: Any) -> Any:
    """Returns the identity of a module's own forward pass. A form of FastGen's comes and goes with each call, and is
    identified by what is captured of it. Attributes of the function are not guarded: users may count calls there.
    """
    forward = vars(module).get("forward")
    if forward is None:
        return None
    if isinstance(forward, Replacement):
        return forward.guarded()
    if isinstance(forward, MethodType):  # a new object at each access
        return IdentityGuard.of(forward.__func__), IdentityGuard.of(forward.__self__)
    return IdentityGuard.of(forward)


class Guards:
    """The guards of a model in its present state. Checking them takes a fraction of the time of `state_of`.

    The attributes of all modules are compared with a copy in a single comparison of lists. The guards never hold for a
    model with a tensor among its attributes, or whose modules might refer to the model: the guards reference modules,
    and must not keep the model alive.

    Args:
        names: names of the attributes that are guarded.
    """

    def __init__(self, model: Any, names: Container[str]) -> None:
        everything = modules_of(model)
        self._names = names
        self._types = list(map(type, everything))
        self._classes = _classes_of(self._types)
        self._code = _code_of(self._classes)
        inside = [(each, name, value) for each in everything[1:] for name, value in vars(each).items()]
        self._is_comparable = all(
            _is_own_forward(each, value) or _is_harmless(name, value, model.config) for each, name, value in inside
        )
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
        # Comparing tensors of one element compares values, so the identity of these tensors is compared, too.
        self._single = [each for each in held if each[-1].numel() == 1]
        self._config = {name: _copy(value) for name, value in vars(model.config).items()}
        self._chosen = _chosen()

    def hold(self, model: Any) -> bool:
        """Whether nothing of `state_of` has changed, and no hook counts. If False, something may have changed."""
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
        except Exception as error:  # for example, a tensor was replaced, and several elements were compared
            interrupts.pass_on(error)
            return False

    def _have_attributes(self) -> bool:
        now = list(map(vars, self._others))
        return self._attributes == now or all(map(self._are_alike, now, self._attributes))

    def _are_alike(self, now: dict[str, Any], before: dict[str, Any]) -> bool:
        """Whether an object's guarded attributes are unchanged; it may have got other attributes."""
        if before == now:  # in this order, so that the copy's `__eq__` is called
            return True
        guarded = [name for name in {*now, *before} if _is_guarded(name, self._names)]
        return all(name in now and name in before and before[name] == _guarded(name, now[name]) for name in guarded)


def _orders(modules: Sequence[nn.Module]) -> list[list[str]]:
    """Returns the children's names of each module, in order: a Sequential runs in it, but dict equality ignores it."""
    return [list(each._modules) for each in modules]


_READ: tuple[Callable[[Tensor], Any], ...] = (Tensor.data_ptr, attrgetter("dtype"), attrgetter("shape"), Tensor.stride)


def _memory_of_all(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Returns the same facts as `_memory` of each tensor, in another arrangement."""
    return [list(map(read, tensors)) for read in _READ]


def _copy_of_module(module: nn.Module, config: Any, names: Container[str]) -> dict[str, Any]:
    """Copies the attributes of a module for later comparison. Leaves out hooks, and unguarded attributes that may refer
    to the model.
    """
    return {
        name: _copy_of_attribute(name, value, config)
        if _is_guarded(name, names) or _is_harmless(name, value, config)
        else None
        for name, value in vars(module).items()
    }


def _is_guarded(name: str, names: Container[str]) -> bool:
    return name in names or name in _HOOKS or name in _OF_TORCH


def _copy_of_attribute(name: str, value: Any, config: Any) -> Any:
    if name in _HOOKS:
        return {}
    if name in _HELD:
        return dict(value)
    return value if value is config else _copy(value)


def _is_own_forward(module: nn.Module, value: Any) -> bool:
    """Whether a value is a module's forward pass, as of its class or as of before a patch: it only refers to that."""
    of_class = type(module).forward
    known = (of_class, patching.original_of(of_class))
    return type(value) is MethodType and value.__self__ is module and value.__func__ in known


def _is_harmless(name: str, value: Any, config: Any) -> bool:
    """Whether an attribute of a module certainly does not refer to the model that contains it."""
    if name in _HOOKS:
        return not _guarded(name, value)
    # A form of FastGen's only refers to its own layer.
    is_leaf = type(value) in _ATOMS or isinstance(value, (Tensor, Enum, BuiltinFunctionType, Replacement))
    if is_leaf or name in _HELD or value is config:
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
    """Returns an object that equals a value only as long as `_Describer.describe` returns the same for it."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    if kind in (list, tuple):
        return kind(map(_copy, value))
    if kind in (set, frozenset):
        return kind(value) if all(type(part) in _ATOMS for part in value) else _NOTHING
    return _NOTHING if isinstance(value, Tensor) else _IdentityCopy(value)


# Equals no attribute.
_NOTHING = object()


class _IdentityCopy:
    """Equals objects of the same identity. It does not hold the value, which may refer to the model."""

    __hash__ = None  # type: ignore[assignment]  # how Python says that there is none

    def __init__(self, value: Any) -> None:
        self._identity = _identity(value)

    def __eq__(self, other: object) -> bool:
        return _identity(other) == self._identity


def _identity(value: Any) -> Hashable:
    """Returns `_Describer.identify`; for a form of FastGen's, which is new in each call, what is captured of it."""
    return (Replacement, value.guarded()) if isinstance(value, Replacement) else _Describer().identify(value)


# A model that has changed in this many checks in a row is not checked during a back-off of at most this many calls.
_MOST_CHANGES, _MOST_CALLS = 4, 64
# The limit for models with third-party code, which may be temporary.
_MOST_CALLS_OF_FOREIGN = 2
# Known states of a model, which it may return to, such as alternating adapters.
_KEPT = 4


class GuardedModel:
    """The guarded states of one model. Only this class decides whether the model may be recorded, and in which state.

    Checking an unchanged model takes a fraction of the time of `state_of`. If each check finds a new state, the next
    calls are not captured (back-off).
    """

    _of: weakref.WeakKeyDictionary[Any, GuardedModel] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._known: OrderedDict[GuardedState, tuple[Guards, Reached]] = OrderedDict()
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
        unusual = torch_functions.unusual()
        if unusual is not None:
            raise CannotBeCaptured(unusual)
        for state, (guards, reached) in reversed(self._known.items()):
            if guards.hold(model) and reached.hold():
                self._known.move_to_end(state)
                self._changes = self._length = 0
                return state
        return self._new_state(model)

    def _new_state(self, model: Any) -> GuardedState:
        if self._left:
            self._left -= 1
            raise CannotBeCaptured(self._reason)
        reason = library_code.foreign(model)
        if reason is not None:
            self._known.clear()
            self._back_off(reason, _MOST_CALLS_OF_FOREIGN)
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
        if self._changes >= _MOST_CHANGES:
            self._back_off("the model changes from call to call")
        return state

    def _back_off(self, reason: str, most: int = _MOST_CALLS) -> None:
        """Prevents the capture of the next calls: none after the first time, then 1, 2, 4 and so on."""
        self._reason, self._left = reason, self._length
        self._length = min(max(2 * self._length, 1), most)
