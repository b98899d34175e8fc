"""Linear layers for the few rows of a decoding step, as dot products with the lines of a weight as it is, on the CPU.

The weight is neither packed nor laid out: it is read once, in float32, bfloat16 or float16, and sums are in
float32 (see csrc/cpu/dot_linear.cpp). With AMX, 8 to 16 rows of bfloat16 are multiplied in its registers, where numbers
and sums that are too small to be normal are zero.

Which product is faster is measured, once per machine and shape: in float32 with all other products
(`fastgen.ops.linear.costs`), with numbers of 16 bits here (`costs`).

With x, bias and result in float32 the weight may be in bfloat16 or float16. The result has the bits of that with the
widened weight. Where that need not be, a weight in panels is faster (`fastgen.ops.narrow_linear`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, _timings
from fastgen.ops.linear import MAX_BYTES, MAX_DOT_ROWS, as_rows, count_of_cold, rows_measured, shortest_times

# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "dot linear 12"
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Rows of 16 bits are widened if there are more (fastgen/ops/widened_linear.py).
MAX_ROWS = {torch.float32: MAX_DOT_ROWS, torch.bfloat16: 16, torch.float16: 16}


class Costs(NamedTuple):
    """Seconds that a product takes."""

    plain: float  # torch's own
    dots: float


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a kernel for these: few rows [..., inputs], [outputs, inputs] and [outputs], all of one type."""
    others = (weight,) if bias is None else (weight, bias)
    return (
        all(tensor.dtype is x.dtype and tensor.device.type == "cpu" for tensor in (x, *others))
        and x.dtype in _TYPES
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and 0 < x.numel() <= MAX_ROWS[x.dtype] * x.shape[-1]
        and (weight.stride(1) == 1 or (weight.stride(0) == 1 and x.dtype is torch.float32))
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and is_available()
    )


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process."""
    return _library.has_kernel("fastgen::dot_linear_out")


def dot_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, with sums in float32; not differentiable.

    x is [..., inputs], the weight [outputs, inputs], the bias [outputs], all of one type: float32, bfloat16 or
    float16; or the weight in one of the latter, and the others in float32. The inputs of the weight are next to each
    other, or, in float32, its outputs.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], weight.shape[0])
    torch.ops.fastgen.dot_linear_out.default(y, rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def costs(rows: int, inputs: int, outputs: int, dtype: torch.dtype, measure: bool = True) -> Costs | None:
    """What a layer of this shape costs on this machine for an input of some rows, with the number of threads in force.

    Measured once, which takes as long as some tens of such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured.

    Args:
        dtype: of all numbers.
    """
    bucket = rows_measured(rows)
    measuring = (lambda: _measure(bucket, inputs, outputs, dtype)) if measure else None
    known = _timings.get(_KERNEL, f"{_TYPES[dtype]} {bucket}x{inputs}x{outputs}", len(Costs._fields), measuring)
    return None if known is None else Costs(*known)


@torch.no_grad()
def _measure(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Costs:
    some = min(outputs, max(MAX_BYTES // (inputs * dtype.itemsize), 1))
    count = count_of_cold(inputs * dtype.itemsize * some, 64)
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=dtype, device="cpu")
    x, y = full((rows, inputs), 0.5), full((rows, some), 0.0)
    weights = [full((some, inputs), 0.25) for _ in range(count)]
    # With copies: what another product has just read would be in the cache.
    copies = [weight.clone() for weight in weights]
    dots, plain = shortest_times(
        [
            (lambda weight: torch.ops.fastgen.dot_linear_out.default(y, x, weight, None), copies),
            (lambda weight: F.linear(x, weight), weights),
        ]
    )
    return Costs(plain * outputs / some, dots * outputs / some)


backend = functools.partial(_library.backend, "fastgen::dot_linear_out")
