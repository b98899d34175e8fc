"""Products in half precision on a CPU without instructions for it, other than those of linear layers.

With AVX2, torch multiplies number by number, and takes several times as long as in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa

HALF = (torch.float16, torch.bfloat16)
# Elements of operands and results that are in float32 at a time: 64 MiB.
_AT_ONCE = 2**24


def is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this type number by number on this CPU. AVX2 was measured; others are left to torch."""
    return dtype in HALF and choose.is_available() and choose.instruction_set() is Isa.AVX2


def upcast(product: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns `product(*tensors)`: in half precision that is slow computed in float32, and rounded once.

    Operands with the same leading dimensions of a `torch.matmul` are upcast a few matrices at a time.
    """
    dtype = tensors[0].dtype
    if not is_slow(dtype) or any(each.dtype is not dtype or each.device.type != "cpu" for each in tensors):
        return product(*tensors)
    if product is torch.matmul and tensors[0].dim() > 2 and tensors[0].shape[:-2] == tensors[1].shape[:-2]:
        return _in_parts(*tensors)
    return product(*(each.float() for each in tensors)).to(dtype)


def _in_parts(a: Tensor, b: Tensor) -> Tensor:
    """Returns the products of matrices [..., M, K] and [..., K, N]."""
    m, k, n = *a.shape[-2:], b.shape[-1]
    some = max(_AT_ONCE // max(m * k + k * n + m * n, 1), 1)
    count = a.shape[:-2].numel()
    if count <= some:
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    parts = zip(a.flatten(0, -3).split(some), b.flatten(0, -3).split(some), strict=True)
    return torch.cat([torch.bmm(x.float(), y.float()).to(a.dtype) for x, y in parts]).view(*a.shape[:-2], m, n)
