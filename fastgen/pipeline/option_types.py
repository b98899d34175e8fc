"""Whether options are of the types that their classes declare: "off" is no truth value, and true is no number."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from fastgen.pipeline.errors import SetupError

# Libraries keep numbers in 64 bits. A limit for texts may be any number: what is beyond is none.
_LARGEST = 2**63 - 1
_UNBOUNDED = ("max_length",)
_CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}


def check_types(options: Any) -> None:
    """Raises `SetupError` for a field of a dataclass whose value is not of its type, or a number beyond 64 bits."""
    kind: Any = type(options)
    hints = _hints(kind)
    for field in dataclasses.fields(options):
        value, kinds = getattr(options, field.name), _kinds(hints[field.name])
        name = field.name.replace("_", "-")
        if not any(_is(value, kind) for kind in kinds):
            must = " or ".join(map(_called, kinds))
            raise SetupError(f"{name} is {value!r}: it must be {must}")
        if type(value) is int and field.name not in _UNBOUNDED and not -_LARGEST <= value <= _LARGEST:
            raise SetupError(f"{name} is {value}: it must be of 64 bits")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(type(each) is str for each in value)
    if origin is not None:
        return isinstance(value, Mapping)
    if kind is float:
        return type(value) in (int, float)
    if kind is bool:
        return type(value) is bool
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _called(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if kind in _CALLED:
        return _CALLED[kind]
    return "a sequence of strings" if typing.get_origin(kind) is tuple else "a mapping"
