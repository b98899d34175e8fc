"""A program that tells what was recorded, and what each replay has computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fastgen.decoding.captured.program import Program


class Replayed(Program):
    """A program whose capture returns what the function returned, as of the last replay."""

    def capture(self, function: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def kept(tensor: Tensor) -> Tensor:
            with _disable_current_modes():  # memory that is there before, as far as the recording knows
                buffer = torch.zeros(tensor.shape, dtype=tensor.dtype)
            return buffer.copy_(tensor)

        super().capture(lambda: found.append(tree_map_only(Tensor, kept, function())))
        return found[0]

    @property
    def functions(self) -> list[Any]:
        return [call.func for call in self.calls(planned=False)]
