"""Maps the tensors of a result in tuples, lists and dicts, including Transformers' own output classes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# Types that hold no tensor of a result; a module's tensors are its own.
_WITHOUT = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Generator, nn.Module,
)  # fmt: skip


class Declined(Exception):
    """This call needs its padding; the message says why."""


def mapped(result: Any, function: Callable[[Tensor], Tensor], without: tuple[type, ...] = _WITHOUT) -> Any:
    """Returns a copy of a result with `function` applied to each tensor.

    Parts of the types in `without` hold no tensor, and stay. Raises Declined for a part that may hold tensors.
    """
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, without):
        return result
    if isinstance(result, tuple | list):
        parts = [mapped(part, function, without) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if isinstance(result, dict) and all(isinstance(name, str) for name in result):
        return type(result)(**{name: mapped(part, function, without) for name, part in result.items()})
    raise Declined(f"a result of type {type(result).__name__}")
