"""The tensors of a result, in tuples, lists and dicts, of which what Transformers returns is one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# What holds no tensor of a result; a module's are its own.
_WITHOUT = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Generator, nn.Module,
)  # fmt: skip


class Declined(Exception):
    """This call needs its padding; the message says why."""


def mapped(result: Any, function: Callable[[Tensor], Tensor], without: tuple[type, ...] = _WITHOUT) -> Any:
    """A result like this one with `function` of each tensor in the tensor's place.

    Parts of the types in `without` hold no tensor, and stay. Raises Declined for a part that may hold some.
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
