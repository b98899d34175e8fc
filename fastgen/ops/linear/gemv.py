"""GEMV for the few rows of a decode step, on the unpacked weight, in float32, bfloat16 and float16, on the CPU.

An output is the dot product of a row with a row of the weight, which is read once. Sums are in float32, in one order
whatever M is (csrc/cpu/gemm/gemv.cpp). With AMX, 8 to 16 rows of bfloat16 are multiplied in its tiles, where
subnormal values and sums are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import multiplied

# More rows read each row of the weight from the cache too often.
MAX_ROWS = {torch.float32: 24, torch.bfloat16: 16, torch.float16: 16}


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, with sums in float32; not differentiable.

    x is [..., K], the weight [N, K], the bias [N], all of one type: float32, bfloat16 or float16. The weight is
    contiguous along K, or, in float32, along N.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together.
    """
    return multiplied(torch.ops.fastgen.gemv_out.default, x, weight, bias)


is_available, backend = _library.asking("fastgen::gemv_out")
_library.define("gemv_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
# Several of them with the same x.
_library.define("gemv_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
