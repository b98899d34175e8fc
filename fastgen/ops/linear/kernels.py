"""The kernels of linear ops on the unpacked weight, on the CPU.

- **GEMV**, for the few rows of a decode step. An output is the dot product of a row with a row of the weight, which is
  read once. Sums are in float32, in one order whatever M is (csrc/cpu/gemm/gemv.cpp). With AMX, 8 to 16 rows of
  bfloat16 are multiplied in its tiles, where subnormal values and sums are zero.
- **GEMM**. A BLAS library packs the weight block by block inside every product. For few rows that costs as much as the
  product itself. In float32 this kernel packs the rows instead, or a piece of the weight at a time
  (csrc/cpu/gemm/gemm.cpp). Each result is a sum over K in one order, with fused multiply-adds if the processor has
  them: a row has the same bits whatever M, the other rows and the number of threads are. 16-bit numbers become float32
  while they are packed, and results are rounded once. On a processor that does not multiply half precision, torch takes
  several times as long.
- **bf16x3**, a float32 GEMM emulated with bfloat16 in AMX tiles. Each float32 is split into three bfloat16, which the
  tiles multiply many times as fast as the processor multiplies float32. Six of their products are added in float32
  (csrc/cpu/gemm/bf16x3.cpp). The error is that of a float32 product: the largest omitted term is 2**-24 of a product.
  That holds for values from about 2**-102 on; smaller ones lose bits, and those below 2**-126 count as zero. A row's
  result depends neither on the other rows nor on the number of threads.

Results differ from those of `torch.nn.functional.linear` by rounding. There are kernels only, and no reference
(`is_available`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows, with_shape_of

# More rows would read each row of the weight from the cache too often.
GEMV_MAX_ROWS = {torch.float32: 24, torch.bfloat16: 64, torch.float16: 64}
# The least M that a profile of `python -m fastgen tune` may name; the table has 16, which fill a tile.
BF16X3_MIN_ROWS = 8


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

        x is [..., K], the weight [N, K], the bias [N], all of one type: float32 or, for GEMV and GEMM, bfloat16 and
        float16. The weight is contiguous along K or, for GEMV and GEMM, along N; GEMM in float32 takes any strides.

        Raises:
            RuntimeError: shapes, strides or dtypes do not fit together, or the processor lacks the instructions.
        """
        rows = as_rows(x)
        y = x.new_empty(rows.shape[0], weight.shape[0])
        self.out(y, rows, weight, bias)
        return with_shape_of(x, y)


is_available = _library.availability("fastgen::gemm_out")
for _name in ("gemv", "gemm"):
    _library.define(f"{_name}_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
    # Several linear ops on the same x.
    _library.define(f"{_name}_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
_library.define("bf16x3_gemm_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")

_ops = torch.ops.fastgen
GEMV = Kernel("gemv", _ops.gemv_out.default, _ops.gemv_batch_out.default)
GEMM = Kernel("gemm", _ops.gemm_out.default, _ops.gemm_batch_out.default)
BF16X3 = Kernel("bf16x3", _ops.bf16x3_gemm_out.default)
