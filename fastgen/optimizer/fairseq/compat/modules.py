"""Globals of single modules of FairSeq: names that are gone, and names that must mean something else there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import wrapt

from fastgen.patching import Patch

_MISSING = object()


@dataclass(eq=False)
class ModuleGlobal(Patch):
    """A global of one module, replaced by what the function `wrapper` makes of it; None where there is none."""

    def apply(self) -> None:
        if self._installed is not None:
            return
        owner = sys.modules[self.module]
        original = vars(owner).get(self.target, _MISSING)
        reason = self.condition(original)
        if reason is not None:
            self.state = f"not applied: {reason}"
            return
        module, _, function = self.wrapper.partition(":")
        made = getattr(importlib.import_module(module), function)(None if original is _MISSING else original)
        self._owner, self._original, self._installed = owner, original, made
        setattr(owner, self.target, made)
        self.state = "applied"

    def remove(self) -> None:
        self.state = "not enabled"
        if self._installed is not None and vars(self._owner).get(self.target) is self._installed:
            if self._original is _MISSING:
                delattr(self._owner, self.target)
            else:
                setattr(self._owner, self.target, self._original)
        self._owner, self._original, self._installed = None, _MISSING, None


class _Numpy(wrapt.ObjectProxy):
    """NumPy, with the names that it had when FairSeq was written, of functions and of their arguments."""

    int = int
    float = float
    compat = SimpleNamespace(long=int)

    def percentile(self, a: Any, q: Any, *, interpolation: str = "linear") -> Any:
        return self.__wrapped__.percentile(a, q, method=interpolation)


def old_numpy(module: Any) -> Any:
    """`module`, which is NumPy, for a module that uses names that NumPy has removed."""
    return _Numpy(module)


def numpy_lacks(name: str) -> Callable[[Any], str | None]:
    """The condition that NumPy does not have `name` any more."""

    def check(original: Any) -> str | None:
        if getattr(original, "__name__", None) != "numpy":
            return "the module does not import numpy as np"
        return f"numpy has {name}" if hasattr(original, name) else None

    return check


def missing_from_fairseq(name: str) -> Callable[[Any], str | None]:
    """The condition that FairSeq's extension `name` has not been built."""

    def check(original: Any) -> str | None:
        return f"fairseq.{name} is built" if importlib.util.find_spec(f"fairseq.{name}") is not None else None

    return check
