"""GEMM in float32 on a packed weight of 16 bits, for the rows of a decode step on the CPU.

Reading a weight of 16 bits takes half of the time, and its numbers are widened in the registers. A panel holds the
outputs that are multiplied at the same time, side by side in a vector. So nothing has to be added up over the places of
a vector, and no place of it is left empty, whatever the number of rows (see csrc/cpu/gemm/panels.cpp). The result has
the bits of `fastgen.ops.linear.gemm` with the widened weight. There are kernels alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows, fit, with_shape_of

# More rows gain nothing by it: then the product is no longer bound by reading the weight.
MAX_ROWS = 16


def pack(weight: Tensor) -> Tensor:
    """A weight, [outputs, inputs], bfloat16 or float16, in panels: an opaque tensor that is valid in this process.

    Raises:
        RuntimeError: the weight has another shape or dtype, or its inputs are not next to each other.
    """
    return torch.ops.fastgen.pack_panels.default(weight.detach())


def panels_gemm(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """`torch.nn.functional.linear(x, weight.float(), bias)` with the weight in panels; not differentiable.

    x is [..., inputs] and the bias [outputs], float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], outputs)
    torch.ops.fastgen.panels_gemm_batch_out.default([y], rows, [packed], [bias])
    return with_shape_of(x, y)


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a weight in 16 bits may take the place of this one: x is [rows, inputs], all of float32.

    The weight is [outputs, inputs], its numbers next to each other; the bias [outputs] or None. Up to how many rows it
    gains anything, the table says (`choose.reads_panels`).
    """
    return (
        x.dtype is torch.float32
        and x.dim() == 2
        and fit(x, weight, bias)
        and x.numel() > 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and is_available()
    )


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process."""
    return _library.has_kernel("fastgen::panels_gemm_batch_out")


backend = functools.partial(_library.backend, "fastgen::panels_gemm_batch_out")
_library.define("pack_panels(Tensor weight) -> Tensor")
_library.define("panels_gemm_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] packed, Tensor?[] bias) -> ()")
