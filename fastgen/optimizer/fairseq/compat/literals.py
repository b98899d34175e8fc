"""Replaces `eval` in FairSeq by a function that reads values and runs no code.

FairSeq stores lists and numbers of a configuration as text ("[(512, 3)] * 14 + [(1024, 3)] * 4") and calls `eval` on
them while it builds a model. A checkpoint contains its configuration, so whoever writes a checkpoint could run code on
the machine of everyone who uses it. Every module of FairSeq that calls `eval` gets `evaluate` as a global of that name.
"""

from __future__ import annotations

import ast
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import wrapt

from fastgen.optimizer.fairseq.compat.finders import FinderPatch

# The modules of FairSeq 0.12 that call `eval`.
MODULES = (
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
    "fairseq.utils",
    "fairseq_cli.eval_lm",
    "fairseq_cli.validate",
)

# Longer texts are refused: before Python 3.11 the parser may exhaust the stack on them.
_MAX_LENGTH = 100_000 if sys.version_info >= (3, 11) else 10_000
_MAX_ITEMS = 100_000  # of a list, nested ones included
_MAX_INTEGER = 2**63
_SHOWN = 120  # the most characters of a refused value in the message

_NUMBERS = (int, float, complex)
_CONTAINERS: dict[type, type] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class RefusedValue(ValueError):
    """A configuration's text is not a literal value; the message quotes it."""


def evaluate(text: Any) -> Any:
    """Returns the value of a literal: numbers, strings, True, False, None, and lists, tuples, sets, dictionaries.

    Computes `+`, `-` and `*` for numbers, `+` for two lists or two tuples, and `*` for one of them and a number.

    Raises:
        RefusedValue: anything else, or a value that would be very large.
        TypeError: `text` is not a string, as in `eval`.
    """
    if not isinstance(text, str):
        raise TypeError(f"eval() arg 1 must be a string, not {type(text).__name__}")
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError("too long")
        return _value(ast.parse(text.lstrip(" \t"), mode="eval").body)[0]
    except (SyntaxError, ValueError, TypeError, OverflowError, MemoryError, RecursionError):
        shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        raise RefusedValue(
            f"a value of the configuration is {shown}; FairSeq would run that as Python code, so only a value written "
            "out is accepted: numbers, strings, lists, tuples and dictionaries, with +, - and *"
        ) from None


def evaluator(missing: None) -> Callable[[Any], Any]:
    """Returns the global `eval` for a module of FairSeq."""
    return evaluate


@dataclass(eq=False)
class Examples(FinderPatch):
    """Gives FairSeq's examples, which --user-dir imports, `evaluate` before they run.

    That includes modules that an example imports later. The user's own code is unchanged.
    """

    module: str = "fairseq"
    target: str = "examples"

    def apply(self) -> None:
        if self.insert():
            for module in list(sys.modules.values()):
                if _is_example(getattr(module, "__file__", None)):
                    vars(module).setdefault("eval", evaluate)
        self.state = "applied"

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds the examples, and nothing else, on Python's own path."""
        if not any(_leads_to_examples(entry) for entry in (sys.path if path is None else path)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not spec.has_location or not _is_example(spec.origin):
            return None
        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # a proxy of one
        return spec


class _Loader(wrapt.ObjectProxy):
    """The module's own loader, which gives the module `evaluate` as `eval`."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["eval"] = evaluate
        self.__wrapped__.exec_module(module)


def _is_example(file: str | None) -> bool:
    return file is not None and any(_is_inside(os.path.abspath(file), folder) for folder in _examples())


def _leads_to_examples(entry: Any) -> bool:
    """Returns whether modules on this path entry may be examples. Called for every import."""
    if not isinstance(entry, str):  # Python also skips such entries
        return False
    here = os.path.abspath(entry)
    return any(_is_inside(here, folder) or _is_inside(here, os.path.dirname(folder)) for folder in _examples())


def _examples() -> list[str]:
    """Returns the folders of FairSeq's examples: beside its modules, and in a checkout beside their folder."""
    file = getattr(sys.modules.get("fairseq"), "__file__", None)
    return [] if file is None else _examples_of(os.path.dirname(file))


@functools.cache
def _examples_of(package: str) -> list[str]:
    above = os.path.join(package, "..")
    is_checkout = os.path.exists(os.path.join(above, "setup.py"))
    return [os.path.realpath(os.path.join(each, "examples")) for each in (package, *([above] if is_checkout else []))]


@functools.cache
def _is_inside(path: str, folder: str) -> bool:
    real = os.path.realpath(path)
    return real == folder or real.startswith(os.path.join(folder, ""))


def _value(node: ast.expr) -> tuple[Any, int]:
    """Returns the value of a node, and its number of items."""
    match node:
        case ast.Constant(value=int(value)) if abs(value) < _MAX_INTEGER:
            return value, 1
        case ast.Constant(value=float() | complex() | str() | bytes() | None as value):
            return value, 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            number, items = _value(operand)
            _require(type(number) in _NUMBERS)
            return (number if isinstance(sign, ast.UAdd) else -number), items
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            values, items = _values(elements)
            return _CONTAINERS[type(node)](values), items
        case ast.Dict(keys=keys, values=elements) if None not in keys:
            names, count = _values(key for key in keys if key is not None)
            values, items = _values(elements)
            return dict(zip(names, values, strict=True)), count + items
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combined(type(op), *_value(left), *_value(right))
    raise ValueError("not a value")


def _values(nodes: Iterable[ast.expr]) -> tuple[list[Any], int]:
    found = [_value(node) for node in nodes]
    return [value for value, _ in found], 1 + sum(items for _, items in found)


def _combined(op: type, left: Any, left_items: int, right: Any, right_items: int) -> tuple[Any, int]:
    """Returns the result of an operator, and its number of items, which is checked before lists are made."""
    kinds = type(left), type(right)
    if all(kind in _NUMBERS for kind in kinds):
        number = _OPERATORS[op](left, right)
        _require(type(number) is not int or abs(number) < _MAX_INTEGER)
        return number, 1
    if op is ast.Add:
        items = left_items + right_items
        _require(kinds[0] is kinds[1] and kinds[0] in (list, tuple))
    else:
        if kinds[0] is int:
            left, left_items, right = right, right_items, left
        _require(op is ast.Mult and type(left) in (list, tuple) and type(right) is int)
        items = left_items * max(right, 1)
    _require(items <= _MAX_ITEMS)
    return _OPERATORS[op](left, right), items


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("not a value, or a very large one")
