"""The kernels of linear ops on the unpacked weight, on the CPU.

- **GEMV**, for the few rows of a decode step. An output is the dot product of a row with a row of the weight, which is
  read once. Sums are in float32, in one order whatever M is (csrc/cpu/gemm/gemv.cpp). With AMX, 8 to 16 rows of
  bfloat16 are multiplied in its tiles, where subnormal values and sums are zero.
- **GEMM** in float32. A BLAS library packs the weight block by block inside every product. For few rows that costs as
  much as the product itself. This kernel packs the rows instead, or a piece of the weight at a time
  (csrc/cpu/gemm/gemm.cpp). Each result is a sum over K in one order, with fused multiply-adds if the processor has
  them: a row has the same bits whatever M, the other rows and the number of threads are.
- **bf16x3**, a float32 GEMM emulated with bfloat16 in AMX tiles. Each float32 is split into three bfloat16, which the
  tiles multiply many times as fast as the processor multiplies float32. Six of their products are added in float32
  (csrc/cpu/gemm/bf16x3.cpp). The error is that of a float32 product: the largest omitted term is 2**-24 of a product.
  That holds for values from about 2**-102 on; smaller ones lose bits, and those below 2**-126 count as zero. A row's
  result depends neither on the other rows nor on the number of threads.
- **GEMM with upcast weights**, for many rows in half precision. On a processor that does not multiply half precision,
  torch takes several times as long as in float32. Here a few rows of the weight at a time become float32, in memory
  that stays in the cache, and the GEMM multiplies all rows of x with them.

Results differ from those of `torch.nn.functional.linear` by rounding. There are kernels only, and no reference
(`is_available`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import fit, multiplied

# More rows would read each row of the weight from the cache too often.
GEMV_MAX_ROWS = {torch.float32: 24, torch.bfloat16: 64, torch.float16: 64}
# The least M that a profile of `python -m fastgen tune` may name; the table has 16, which fill a tile.
BF16X3_MIN_ROWS = 8
# The part of the weight that is upcast at a time: bytes, and the least number of rows.
_BLOCK_BYTES, _LEAST_N = 2**20, 64
# Rows of x that are upcast at a time.
_BLOCK_ROWS = 1024


class Kernel(NamedTuple):
    """A kernel of a linear op.

    Attributes:
        name: as in the table of `choose`.
        out: (result, x, weight, bias), with x as [M, K]: for captured steps.
        several: (results, x, weights, biases): several linear ops on the same x in one call; None if there is none.
    """

    name: str
    out: Callable[..., Any]
    several: Callable[..., Any] | None = None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear(x, weight, bias)`, with sums in float32; not differentiable.

        x is [..., K], the weight [N, K], the bias [N], all of one type: float32 or, for GEMV and upcast weights,
        bfloat16 and float16. The weight is contiguous along K; in float32, GEMV also takes one that is contiguous along
        N, and GEMM any.

        Raises:
            RuntimeError: shapes, strides or dtypes do not fit together, or the processor lacks the instructions.
        """
        return multiplied(self.out, x, weight, bias)


def _upcast_gemm_out(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Needs additional memory for 1 MiB of the weight or 64 of its rows, and for 1024 rows of x and their results."""
    is_half = x.dtype in (torch.float16, torch.bfloat16) and x.dim() == 2
    if not is_half or not fit(x, weight, bias) or weight.stride(1) != 1 or y.shape != (x.shape[0], weight.shape[0]):
        raise RuntimeError("upcast_gemm: x must be [M, K], the weight [N, K], the bias [N], of float16 or bfloat16")
    count = max(_BLOCK_BYTES // (4 * weight.shape[1]), _LEAST_N)
    upcast = weight.new_empty(min(count, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    for rows, result in zip(x.split(_BLOCK_ROWS), y.split(_BLOCK_ROWS), strict=True):
        exact = rows.float()
        for begin in range(0, weight.shape[0], count):
            part = slice(begin, begin + count)
            block = upcast[: weight[part].shape[0]].copy_(weight[part])
            result[:, part] = GEMM.multiply(exact, block, None if bias is None else bias[part].float())


is_available, backend = _library.asking("fastgen::gemm_out")
for _name in ("gemv", "gemm"):
    _library.define(f"{_name}_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
    # Several linear ops on the same x.
    _library.define(f"{_name}_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
_library.define("bf16x3_gemm_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")

_ops = torch.ops.fastgen
GEMV = Kernel("gemv", _ops.gemv_out.default, _ops.gemv_batch_out.default)
GEMM = Kernel("gemm", _ops.gemm_out.default, _ops.gemm_batch_out.default)
BF16X3 = Kernel("bf16x3", _ops.bf16x3_gemm_out.default)
UPCAST = Kernel("upcast", _upcast_gemm_out)
