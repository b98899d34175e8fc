"""Torch functions that FastGen's operators and tensors replace, and whether they may be replaced now."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from fastgen.decoding.library_code import are_the_same, is_own

# Functions of torch.nn.functional that a step may run. Losses are left out: libraries for training replace them.
_OF_STEPS = sorted(name for name in vars(F) if not name.startswith("_") and not re.search("loss|entropy", name))


class _Torch:
    """The torch functions that FastGen has operators and rules for. It holds no user's functions."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._seen: list[Any] = []

    def watch(self, functions: Iterable[Any]) -> None:
        """Also watches what has the names of these functions in torch and its tensors."""
        self._names |= {getattr(each, "__name__", "") for each in functions} - {"", "__get__"}
        self._seen = []

    def replaced(self) -> str | None:
        """Returns the name of a function that is not torch's own any more, or None."""
        now = self._now()
        if are_the_same(now, self._seen):
            return None
        for owner, names in ((F, _OF_STEPS), (torch, self._names), (Tensor, self._names), (nn.Linear, ("forward",))):
            for name in names:
                value = vars(owner).get(name)
                if callable(value) and not is_own(value):
                    return f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}"
        self._seen = now
        return None

    def _now(self) -> list[Any]:
        of_torch = [value for owner in (torch, Tensor) for value in map(vars(owner).get, self._names)]
        return [*map(vars(F).get, _OF_STEPS), *of_torch, nn.Linear.forward]


_torch = _Torch()
watch = _torch.watch


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
    replaced = _torch.replaced()
    return None if replaced is None else f"a function of torch has been replaced ({replaced})"
