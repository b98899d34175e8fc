"""Linear layers for the few rows of a decoding step, as dot products with the lines of a weight as it is, on the CPU.

The weight is neither packed nor laid out: it is read once, in float32, bfloat16 or float16, and sums are in
float32 (see csrc/cpu/dot_linear.cpp). Which product is faster is measured, once per machine and shape (`costs`).

With x, bias and result in float32 the weight may be in bfloat16 or float16. The result has the bits of that with the
widened weight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, _timings
from fastgen.ops.linear import MAX_BYTES, as_rows, count_of_cold, shortest_times

# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "dot linear 7"
# Of more rows nothing is measured: the lines of a weight are read from the cache once for every few of them.
MAX_ROWS = 16
# Up to here each number of rows is measured for itself: small batches, and the checks of speculative decoding.
_EXACT_ROWS = 9
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
        and 0 < x.numel() <= MAX_ROWS * x.shape[-1]
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


def costs(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    measure: bool = True,
    transposed: bool = False,
    narrow: torch.dtype | None = None,
) -> Costs | None:
    """What a layer of this shape costs on this machine for an input of some rows, with the number of threads in force.

    Measured once, which takes as long as some tens of such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured.

    Args:
        transposed: the weight is stored as [inputs, outputs], as GPT-2's.
        narrow: the type that dot products have the weight in, and torch has not, if not `dtype`.
    """
    bucket = rows if rows <= _EXACT_ROWS else -(-rows // 4) * 4
    types = _TYPES[dtype] if narrow is None else f"{_TYPES[dtype]} of {_TYPES[narrow]}"
    key = f"{types} {bucket}x{inputs}x{outputs}{'t' if transposed else ''}"
    measuring = (lambda: _measure(bucket, inputs, outputs, dtype, transposed, narrow)) if measure else None
    known = _timings.get(_KERNEL, key, len(Costs._fields), measuring)
    return None if known is None else Costs(*known)


@torch.no_grad()
def _measure(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, transposed: bool, narrow: torch.dtype | None = None
) -> Costs:
    of_dots = dtype if narrow is None else narrow
    some = min(outputs, max(MAX_BYTES // (inputs * dtype.itemsize), 1))
    count = count_of_cold(inputs * of_dots.itemsize * some, 64)
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=dtype, device="cpu")
    x, y = full((rows, inputs), 0.5), full((rows, some), 0.0)
    stored = [full((inputs, some) if transposed else (some, inputs), 0.25) for _ in range(count)]
    weights = [weight.t() if transposed else weight for weight in stored]
    # What torch's product has just read would be in the cache.
    copies = [weight.to(of_dots, copy=True) for weight in weights]
    plain, dots = shortest_times(
        [
            (lambda weight: F.linear(x, weight), weights),
            (lambda weight: torch.ops.fastgen.dot_linear_out.default(y, x, weight, None), copies),
        ]
    )
    return Costs(plain * outputs / some, dots * outputs / some)


backend = functools.partial(_library.backend, "fastgen::dot_linear_out")
_library.define("dot_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
# Several of them with the same x.
_library.define("dot_linears_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
