"""Products in half precision on a CPU without instructions for it, other than those of linear layers.

There torch multiplies number by number, and takes ten times as long as in float32 or longer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.ops.linear import choose

_HALF = (torch.float16, torch.bfloat16)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this type number by number on this CPU, and FastGen has kernels that do not."""
    return dtype in _HALF and choose.is_available() and not choose.is_left_to_torch(dtype)


def upcast(product: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns `product(*tensors)`: in half precision that is slow computed in float32, and rounded once."""
    dtype = tensors[0].dtype
    if not is_slow(dtype) or any(each.dtype is not dtype or each.device.type != "cpu" for each in tensors):
        return product(*tensors)
    return product(*(each.float() for each in tensors)).to(dtype)
