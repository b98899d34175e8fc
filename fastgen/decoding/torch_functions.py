"""The functions of torch that FastGen's operators and tensors stand for, and whether it may stand for them now."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from fastgen.decoding.library_code import are_the_same, is_own

# Functions of torch.nn.functional that a step may run: losses are replaced by libraries for training.
_OF_STEPS = sorted(name for name in vars(F) if not name.startswith("_") and not re.search("loss|entropy", name))


class _Torch:
    """The functions of torch that FastGen has operators and rules for. Those of a user's are not held."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._seen: list[Any] = []

    def watch(self, functions: Iterable[Any]) -> None:
        """Looks at what has the names of these in torch and its tensors, too."""
        self._names |= {getattr(each, "__name__", "") for each in functions} - {"", "__get__"}
        self._seen = []

    def replaced(self) -> str | None:
        """The name of one that is not torch's own any more."""
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
    """Why FastGen must not stand for functions of torch here and now; None where it may.

    A mode of the user's sees each operation. A default device is torch's own mode.
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
