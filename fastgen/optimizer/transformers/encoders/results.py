"""The tensors of a result, wherever they are: in tuples and lists, in mappings, in attributes of objects.

`BatchEncoding`, which tokenizers give and sentence-transformers passes from module to module, is a mapping and no dict.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# What holds no tensor of a result; a module's are its own.
_WITHOUT = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Generator, nn.Module,
)  # fmt: skip


class Unknown(Exception):
    """A result has something in it of which nobody knows whether it holds tensors; the message says what."""


def mapped(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The result with `function` of each tensor in the tensor's place. Lists, mappings and objects stay the same ones.

    Raises:
        Unknown: of a part of it, that is all that is known.
    """
    return _mapped(result, function, set())


def rebuilt(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A new result like this one, of dicts, tuples and lists, with `function` of each tensor in the tensor's place.

    Raises:
        Unknown: there is something else in it.
    """

    def made(part: Any) -> Any:
        if part is not None and not isinstance(part, Tensor):
            raise Unknown(f"a result of type {type(part).__name__}")
        return None if part is None else function(part)

    return tree_map(made, result)


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, in order. Raises what `mapped` raises."""
    found: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(result, noted)
    return found


def _mapped(part: Any, function: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, _WITHOUT) or id(part) in seen:
        return part
    if isinstance(part, tuple):
        made = [_mapped(each, function, seen) for each in part]
        return part if all(map(_is, made, part)) else _tuple_like(part, made)
    seen.add(id(part))  # it may contain itself
    if isinstance(part, list):
        _put(part, dict(enumerate(part)), part.__setitem__, function, seen)
    elif isinstance(part, Mapping):
        _put(part, dict(part), partial(_set_item, part), function, seen)
    elif (attributes := _attributes(part)) is not None:
        _put(part, attributes, lambda *entry: setattr(part, *entry), function, seen)
    else:
        raise Unknown(f"a result of type {type(part).__name__}")
    return part


def _is(one: Any, other: Any) -> bool:
    return one is other


def _tuple_like(part: Any, made: list[Any]) -> Any:
    """A tuple of the same type: those with names take each value by itself."""
    return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)


def _put(
    owner: Any, parts: dict[Any, Any], put: Callable[..., Any], function: Callable[[Tensor], Tensor], seen: set[int]
) -> None:
    for name, value in parts.items():
        made = _mapped(value, function, seen)
        if made is not value:
            try:
                put(name, made)
            except (AttributeError, TypeError) as error:
                raise Unknown(f"a result of type {type(owner).__name__} that cannot be changed") from error


def _set_item(owner: Any, name: Any, made: Any) -> None:
    owner[name] = made


def _attributes(part: Any) -> dict[str, Any] | None:
    """Those of an object that has some, in its own dictionary or in slots; None of one that has none of its own."""
    names = [name for kind in type(part).__mro__ for name in _slots(kind) if hasattr(part, name)]
    own = getattr(part, "__dict__", None)
    if own is None and not names:
        return None
    return {**{name: getattr(part, name) for name in names}, **(own or {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))
