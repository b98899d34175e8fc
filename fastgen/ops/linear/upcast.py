"""GEMM with upcast weights: float16 and bfloat16 for many rows, multiplied in float32, on the CPU.

Where a processor does not multiply half precision, torch's product takes several times as long as in float32. Here a
few rows of the weight at a time become float32, in memory that stays in the cache, and all rows of x are multiplied
with them (`fastgen.ops.linear.gemm`). There is no copy of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.linear import fit, gemm, multiplied

_TYPES = (torch.float16, torch.bfloat16)
# Of the weight that is in float32 at a time: bytes, and rows at least.
_BLOCK_BYTES, _LEAST_N = 2**20, 64
# Rows of x that are in float32 at a time.
_BLOCK_ROWS = 1024


def upcast_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, multiplied in float32 and rounded once; not differentiable.

    x is [..., K], the weight [N, K], the bias [N], all of one type: float16 or bfloat16. Beside the result it needs
    memory for 1 MiB of the weight or 64 of its rows, and for 1024 rows of x and of their results with these, all in
    float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    return multiplied(upcast_gemm_out, x, weight, bias)


def upcast_gemm_out(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Writes the result to y, [M, N], for x as [M, K].

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together.
    """
    is_half = x.dtype in _TYPES and x.dim() == 2 and fit(x, weight, bias) and weight.stride(1) == 1
    if not is_half or y.shape != (x.shape[0], weight.shape[0]):
        raise RuntimeError("upcast_gemm: x must be [M, K], the weight [N, K], the bias [N], of float16 or bfloat16")
    count = max(_BLOCK_BYTES // (4 * weight.shape[1]), _LEAST_N)
    upcast = weight.new_empty(min(count, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    for rows, result in zip(x.split(_BLOCK_ROWS), y.split(_BLOCK_ROWS), strict=True):
        exact = rows.float()
        for begin in range(0, weight.shape[0], count):
            part = slice(begin, begin + count)
            block = upcast[: weight[part].shape[0]].copy_(weight[part])
            result[:, part] = gemm.gemm(exact, block, None if bias is None else bias[part].float())


def backend() -> str:
    """Which implementation serves this operator."""
    return f"the weight in float32, a piece at a time: {gemm.backend()}"
