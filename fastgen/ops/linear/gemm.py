"""GEMM in float32 on the unpacked weight, on the CPU.

A BLAS library packs the weight block by block inside every product. For few rows that costs as much as the product
itself. This kernel packs the rows instead, or a piece of the weight at a time (csrc/cpu/gemm/gemm.cpp). Each result is
a sum over K in one order, with fused multiply-adds where the processor has them: a row has the same bits
whatever M, the other rows and the number of threads are. Results differ from those of `torch.nn.functional.linear` by
rounding. There are kernels alone (`is_available`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import multiplied


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`; not differentiable.

    x is [..., K], the weight [N, K] with any strides, and the bias [N], all float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    return multiplied(torch.ops.fastgen.gemm_out.default, x, weight, bias)


is_available, backend = _library.asking("fastgen::gemm_out")
_library.define("gemm_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
# Several of them with the same x.
_library.define("gemm_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
