"""What a recording has frozen of a model: whether it is still so, before the recording is repeated.

A user may change a model between two calls: exchange modules or parameters, switch adapters by attributes, set scales,
register hooks, exchange forward passes. What is written into the memory of a parameter needs no look: a recording reads
it there. docs/captured-step.md says what is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import settings
from fastgen.decoding.layers import Replacement
from fastgen.decoding.modules import modules_of

_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# What torch keeps in modules, but for the hooks; and what needs no copy.
_OF_TORCH = frozenset(vars(nn.Module())) - _HOOKS | {"forward"}
_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
# Where modules hold others, and tensors.
_HELD = frozenset({"_modules", "_parameters", "_buffers"})


def state_of(model: Any) -> Hashable:
    """What a recording has frozen: modules, their settings and code, and where parameters and buffers are."""
    found, look = modules_of(model), _Look(model.config)
    modules = tuple([(id(module), type(module), _forward(module), _settings(module, look)) for module in found])
    held = [tensor for module in found for kept in (module._parameters, module._buffers) for tensor in kept.values()]
    tensors = tuple([_memory(tensor) for tensor in held if tensor is not None])
    code = _code_of(_classes_of(map(type, found)))
    return modules, tensors, code, _settings(model.config, look), _chosen()


def _classes_of(types: Iterable[type]) -> list[Any]:
    """What is defined in these types and those that they are made of, each once."""
    return list(map(vars, {base: None for kind in dict.fromkeys(types) for base in kind.__mro__}))


def _code_of(classes: list[Any]) -> tuple[Hashable, ...]:
    """Their forward passes, which somebody may exchange for all modules of a class."""
    return tuple([Same.of(each.get("forward")) for each in classes])


def _chosen() -> Hashable:
    """The settings of FastGen that decide what is recorded."""
    now = settings.current()
    products = now.packed_weights == "never", now.linear_products
    return *products, now.weight_dtype, now.weight_group_size, now.activations


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _settings(owner: Any, look: _Look) -> Hashable:
    """What a forward pass reads of an object besides modules, parameters and buffers, by name.

    Adapters are switched on and off in this way, scales are set, and implementations chosen.
    """
    return tuple(
        [
            (name, value if type(value) in _ATOMS else look.frozen(value))
            for name, value in vars(owner).items()
            if name not in _OF_TORCH
        ]
    )


class Same:
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
            return type(value)

    def __eq__(self, other: object) -> bool:
        mine = self._object()
        return isinstance(other, Same) and mine is not None and mine is other._object()

    def __hash__(self) -> int:
        return self._number


class _Look:
    """What values are, none of which is held. An object that comes again is named by its number.

    Args:
        known: objects that are described elsewhere.
    """

    def __init__(self, *known: Any) -> None:
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def frozen(self, value: Any) -> Any:
        """A copy of numbers, words and tensors' memory, also in collections; of anything else what `about` says."""
        if type(value) in _ATOMS:
            return value
        if isinstance(value, dict):
            return tuple((str(key), self.frozen(part)) for key, part in value.items()) if value else None
        if isinstance(value, (list, tuple)):
            return tuple(map(self.frozen, value))
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.frozen, value))
        return _memory(value) if isinstance(value, Tensor) else self.about(value)

    def about(self, value: Any) -> Hashable:
        """Which function, module or member of an enumeration it is; what can be called, with what it computes with; the
        contents of configurations; of anything else the type."""
        if isinstance(value, Enum):
            return value
        if isinstance(value, (type, nn.Module)):
            return Same.of(value)
        if not (callable(value) or hasattr(type(value), "model_type")):
            return type(value)
        known = len(self._numbers)
        number = self._numbers.setdefault(id(value), known)
        if number != known:
            return type(value), number
        return (type(value), *self._parts(value))

    def _parts(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, partial):
            return self.about(value.func), self.frozen(value.args), self.frozen(value.keywords)
        if isinstance(value, MethodType):
            return Same.of(value.__func__), self.about(value.__self__)
        if isinstance(value, FunctionType):
            cells = [_contents(cell) for cell in value.__closure__ or ()]
            return Same.of(value), *map(self.frozen, (cells, value.__defaults__, value.__kwdefaults__))
        if isinstance(value, BuiltinFunctionType):
            return (Same.of(value),)
        if hasattr(type(value), "model_type"):
            return (self.frozen(vars(value)),)
        # Numbers and tensors alone: a tokenizer can be called, too, and has a vocabulary.
        parts = getattr(value, "__dict__", {}).items()
        return Same.of(value), *[(name, self.frozen(part)) for name, part in parts if type(part) in (*_ATOMS, Tensor)]


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
        return forward.frozen()
    if isinstance(forward, MethodType):  # made anew whenever it is asked for
        return Same.of(forward.__func__), Same.of(forward.__self__)
    return Same.of(forward)


class Seen:
    """A model as it has been seen, for a look at whether it still is so that takes a fraction of `state_of`'s time.

    The attributes of all modules are compared with a copy of theirs, which Python does in one go. A model with a tensor
    among its attributes is never taken for unchanged, nor is one whose modules might know it: modules are held, and
    their model must go when its user lets go of it.

    """

    def __init__(self, model: Any) -> None:
        everything = modules_of(model)
        self._types = list(map(type, everything))
        self._classes = _classes_of(self._types)
        self._code = _code_of(self._classes)
        inside = [(*attribute, model.config) for each in everything[1:] for attribute in vars(each).items()]
        self._is_comparable = all(_is_harmless(*attribute) for attribute in inside)
        if not self._is_comparable:
            return
        self._others = everything[1:]
        self._orders = _orders(everything)
        self._own, *self._attributes = [_copy_of_module(each, model.config) for each in everything]
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

    def is_still(self, model: Any) -> bool:
        """Whether nothing has changed that `state_of` looks at, there are no hooks, and no module is in another mode.

        If this is False, something may have changed.
        """
        if not self._is_comparable:
            return False
        everything = [model, *self._others]
        try:
            return bool(
                vars(model) == self._own
                and list(map(vars, self._others)) == self._attributes
                and list(map(type, everything)) == self._types
                and _orders(everything) == self._orders
                and _code_of(self._classes) == self._code
                and all(getattr(everything[n], kind).get(name) is tensor for n, kind, name, tensor in self._single)
                and _memory_of_all(self._tensors) == self._memory
                and vars(model.config) == self._config
                and _chosen() == self._chosen
            )
        except Exception:  # another tensor, say, whose numbers have been compared
            return False


def _orders(modules: Sequence[nn.Module]) -> list[list[str]]:
    """The names of what each holds, in the order in which a Sequential runs them: equal dictionaries may differ."""
    return [list(each._modules) for each in modules]


_READ: tuple[Callable[[Tensor], Any], ...] = (Tensor.data_ptr, attrgetter("dtype"), attrgetter("shape"), Tensor.stride)


def _memory_of_all(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """What `_memory` says of each, in another order."""
    return [list(map(read, tensors)) for read in _READ]


def _copy_of_module(module: nn.Module, config: Any) -> dict[str, Any]:
    """The attributes of a module, to be compared with what they are later; without hooks."""
    return {name: _copy_of_attribute(name, value, config) for name, value in vars(module).items()}


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
    """What equals a value only as long as `_Look.frozen` gives the same for it."""
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

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._about = _Look().about(value)

    def __eq__(self, other: object) -> bool:
        return _Look().about(other) == self._about
