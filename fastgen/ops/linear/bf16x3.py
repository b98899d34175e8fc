"""GEMM in float32 for many rows, emulated with bfloat16 (bf16x3) in the AMX tiles of a processor.

Each float32 is split into three bfloat16, which these tiles multiply many times as fast as the processor
multiplies float32. Six products of these are added in float32 (see csrc/cpu/gemm/bf16x3.cpp). The error is that of
a product in float32: the largest of what is left out is 2**-24 of a product. That holds for values from about 2**-102
on; smaller ones lose bits, and those below 2**-126 count as zero.

The weight is neither packed nor copied. A row's result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import multiplied

# The least that a profile of `python -m fastgen tune` may name; the table has 16, which fill a tile.
MIN_ROWS = 8


def is_available() -> bool:
    """Whether there is a kernel in this process, for this processor."""
    return _library.has_kernel("fastgen::bf16x3_gemm_out") and _runs(torch.backends.cpu.get_cpu_capability())


@functools.cache
def _runs(capability: str) -> bool:
    """The kernel itself knows which instructions the process may use."""
    x = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    try:
        torch.ops.fastgen.bf16x3_gemm_out.default(torch.empty_like(x), x, x, None)
    except RuntimeError:
        return False
    return True


def bf16x3_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` in float32; not differentiable.

    x is [..., K], the weight [N, K], contiguous along K, the bias [N].

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together, or the processor has no AMX tiles.
    """
    return multiplied(torch.ops.fastgen.bf16x3_gemm_out.default, x, weight, bias)


def backend() -> str:
    """Which implementation serves this operator."""
    if not is_available():
        return f"none: {_library.load('CPU') or 'this processor has no AMX'}"
    return _library.backend("fastgen::bf16x3_gemm_out")


_library.define("bf16x3_gemm_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
