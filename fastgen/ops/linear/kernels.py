"""The kernels of linear ops on the CPU, a row for each, and how each is called.

**Float weights**

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

Results differ from those of `torch.nn.functional.linear` by rounding.

**Packed weights**

- **Panels** of 16 bits that represent a float32 weight exactly. Linear ops with few rows are bound by reading the
  weight: 16 bits take half of the time, and are upcast in registers. A panel interleaves as many n as a vector has
  lanes. So no sum crosses the lanes of a vector, and no lane is idle, whatever M is (csrc/cpu/gemm/panels.cpp). The
  result has the bits of GEMM with the float32 weight.
- **Groups** of 4 to 8 bits, with float activations. The weight is dequantised in registers, exactly
  (csrc/cpu/gemm/panels.cpp). The result has the bits of GEMM with the dequantised weight.
- **Groups with activations of 8 bits.** The activations of a row and group become multiples of 1/127 of the largest of
  them. Products within a group are exact, in integers; groups are added in float32 (see Dettmers and Zettlemoyer, "The
  case for 4-bit precision", 2023, section 2). So a result differs from the product with the float32 weight only by
  rounding the activations: by at most `sum over groups of (largest activation of the group) / 254 * sum of |weight|`.
  If groups are rotated, this holds for the rotated operands. A row has the same result whatever the other rows and the
  number of threads are.
- **bf16**: x and the weight are rounded to 8 significant bits, and products are summed in float32, in AMX tiles or with
  AVX-512 BF16 (csrc/cpu/gemm/bf16.cpp).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear import as_rows, on_gpu, with_shape_of
from fastgen.ops.linear.weights import Format, Layout, PackedWeight

# More rows would read each row of the weight from the cache too often.
GEMV_MAX_ROWS = {torch.float32: 24, torch.bfloat16: 64, torch.float16: 64}
# The least M that a profile of `python -m fastgen tune` may name; the table has 16, which fill a tile.
BF16X3_MIN_ROWS = 8
# More rows do not gain: the product is then no longer bound by reading the weight.
PANELS_MAX_ROWS = 16


class Kernel(NamedTuple):
    """A kernel of a linear op: its operators, each None if there is none.

    `parts` are the tensors of a weight, and `shared` and `sizes` what follows them in the schema.

    Attributes:
        name: as in the table of `choose`.
        out: (result, x, *parts, *shared, bias, *sizes), with x as [M, K]: for captured steps.
        several: (results, x, *parts, *shared, biases, *sizes), each part a list: several linear ops on the same x.
        product: (x, *parts, *shared, bias, n, *sizes): returns the result, [M, N].
    """

    name: str
    out: Any
    several: Any = None
    product: Any = None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear(x, weight, bias)` with a float weight; sums are in float32; not differentiable.

        x is [..., K], the weight [N, K], the bias [N], all of one type: float32 or, for GEMV and GEMM, bfloat16 and
        float16. The weight is contiguous along K or, for GEMV and GEMM, along N; GEMM in float32 takes any strides.

        Raises:
            RuntimeError: shapes, strides or dtypes do not fit together, or the processor lacks the instructions.
        """
        rows = as_rows(x)
        y = x.new_empty(rows.shape[0], weight.shape[0])
        self.out(y, rows, weight, bias)
        return with_shape_of(x, y)


_ops = torch.ops.fastgen
GEMV = Kernel("gemv", _ops.gemv_out.default, _ops.gemv_batch_out.default)
GEMM = Kernel("gemm", _ops.gemm_out.default, _ops.gemm_batch_out.default)
BF16X3 = Kernel("bf16x3", _ops.bf16x3_gemm_out.default)
PANEL_GEMM = Kernel("panels", None, _ops.panels_gemm_batch_out.default)
GROUPED = Kernel(
    "grouped",
    _ops.grouped_linear_out.default,
    _ops.grouped_linear_batch_out.default,
    _ops.grouped_linear.default,
)
BF16 = Kernel("bf16", None, None, _ops.bf16_gemm.default)


def multiply_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None, floats: bool) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` with a packed weight, summed in float32; not differentiable.

    x is [..., K] in float32 or, with a weight in groups, in bfloat16 or float16, as is the result. The bias is [N], of
    the type of x or, with a weight in groups, of any of them.

    Args:
        floats: keep x in floating point, for a weight in groups of which `keeps_floats` is true. Otherwise x is
            quantised to 8 bits, and infinities or NaN in a group of x give NaN. On a GPU, x stays in floating point.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    rows = as_rows(x)
    if rows.shape[1] != weight.k:
        raise RuntimeError(f"linear: x is [..., {rows.shape[1]}], the weight [{weight.n}, {weight.k}]")
    if weight.layout is Layout.ROWS:
        y = on_gpu.multiply(rows, weight, bias)
    elif weight.format is Format.GROUPS:
        sizes = weight.bits, weight.group_size, weight.rotated, floats
        y = GROUPED.product(rows, *weight[:5], bias, weight.n, *sizes)
    elif weight.format is Format.BF16:
        y = BF16.product(rows, weight.qweight, bias, weight.n)
    else:
        y = x.new_empty(rows.shape[0], weight.n)
        PANEL_GEMM.several([y], rows, [weight.qweight], [bias])
    return with_shape_of(x, y)
