"""A weight as it was when something was made of it: whether that still stands for it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class ParameterSnapshot:
    """A parameter as it was when a call first multiplied with it.

    Attributes:
        is_plain: its layer was its weight and bias then, and nothing else.
        number: of no other one in this process.
        packed: the copy that was made of it; None as long as there is none.
    """

    __slots__ = ("_data", "_parameter", "_version", "is_plain", "number", "packed")
    _numbers = itertools.count()

    def __init__(self, parameter: Tensor, is_plain: bool) -> None:
        # The memory is held, so that no other tensor can come to lie there.
        self._parameter, self._data, self._version = parameter, parameter.detach(), parameter._version
        self.is_plain = is_plain
        self.number = next(self._numbers)
        self.packed: Any = None

    def is_of(self, parameter: Tensor) -> bool:
        """Whether it is this parameter, unchanged."""
        return (
            self._parameter is parameter
            and self._version == parameter._version
            and _place(self._data) == _place(parameter)
        )


def is_plain(module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """Whether a layer is its weight and bias and nothing else, of this type on this kind of device."""
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            # An attribute of that name is the work of a hook or a parametrisation.
            if name == "weight" or getattr(module, name, None) is not None:
                return False
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
            return False
        if parameter.dtype is not dtype or parameter.device.type != device or parameter.layout != torch.strided:
            return False
        if parameter.dim() != (2 if name == "weight" else 1) or (name == "bias" and not parameter.is_contiguous()):
            return False
    return not parametrize.is_parametrized(module)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # Not `data_ptr`, which is refused while a step is captured: it might be for a kernel that nobody sees.
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
