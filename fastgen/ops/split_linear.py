"""Linear layers in float32 for many rows, on the AMX tiles of a processor.

Each number is split into three parts in bfloat16, which these registers multiply many times as fast as the processor
multiplies float32. Six products of parts are added up in float32 (see csrc/cpu/split_linear.cpp). The error is that of
a product in float32: the largest of what is left out is 2**-24 of a product. That holds for numbers from about 2**-102
on; smaller ones lose bits, and those below 2**-126 count as zero.

The weight is neither packed nor copied. A row's result depends neither on the other rows nor on the number of threads.
Which product is faster is measured, once per machine and shape (`costs`).
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
_KERNEL = "split linear 4"
# Fewer rows fill no register.
MIN_ROWS = 8
_MAX_ROWS = 1024
_MANY_ROWS = 256


class Costs(NamedTuple):
    """Seconds that a product takes."""

    plain: float  # torch's own
    split: float


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a kernel for these: rows [..., inputs], [outputs, inputs] and [outputs] of float32."""
    others = (weight,) if bias is None else (weight, bias)
    return (
        all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in (x, *others))
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() >= MIN_ROWS * x.shape[-1] > 0
        and weight.stride(1) == 1
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        # Where the user allows products of fewer bits, torch has faster ones.
        and torch.get_float32_matmul_precision() == "highest"
        and is_available()
    )


def is_available() -> bool:
    """Whether there is a kernel in this process, for this processor."""
    return _library.has_kernel("fastgen::split_linear_out") and _runs(torch.backends.cpu.get_cpu_capability())


@functools.cache
def _runs(capability: str) -> bool:
    """The kernel itself knows which instructions the process may use."""
    x = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    try:
        torch.ops.fastgen.split_linear_out.default(torch.empty_like(x), x, x, None)
    except RuntimeError:
        return False
    return True


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` in float32; not differentiable.

    x is [..., inputs], the weight [outputs, inputs] with the inputs next to each other, the bias [outputs].

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together, or the processor has no AMX tiles.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], weight.shape[0])
    torch.ops.fastgen.split_linear_out.default(y, rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def costs(rows: int, inputs: int, outputs: int, measure: bool = True) -> Costs | None:
    """What a layer of this shape costs on this machine for an input of some rows, with the number of threads in force.

    Measured once, which takes as long as some tens of such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured.
    """
    bucket = min(1 << (rows - 1).bit_length(), _MAX_ROWS)
    measuring = (lambda: _measure(bucket, inputs, outputs)) if measure else None
    known = _timings.get(_KERNEL, f"{bucket}x{inputs}x{outputs}", len(Costs._fields), measuring)
    scale = max(rows / bucket, 1.0)
    return None if known is None else Costs(*(seconds * scale for seconds in known))


@torch.no_grad()
def _measure(rows: int, inputs: int, outputs: int) -> Costs:
    some = min(outputs, max(MAX_BYTES // (4 * inputs), 1))
    count = count_of_cold(4 * inputs * some, 16) if rows < _MANY_ROWS else 1
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=torch.float32, device="cpu")
    x, bias = full((rows, inputs), 0.5), full((some,), 0.5)
    weights = [full((some, inputs), 0.25) for _ in range(count)]
    copies = [weight.clone() for weight in weights]  # what torch's product has just read would be in the cache
    plain, split = shortest_times(
        [
            (lambda weight: F.linear(x, weight, bias), weights),
            (lambda weight: split_linear(x, weight, bias), copies),
        ]
    )
    return Costs(plain * outputs / some, split * outputs / some)


def backend() -> str:
    """Which implementation serves this operator."""
    if not is_available():
        return f"none: {_library.load('CPU') or 'this processor has no AMX'}"
    return _library.backend("fastgen::split_linear_out")


_library.define("split_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
