"""Linear layers in float16 and bfloat16 for many rows, multiplied in float32, on the CPU.

Where a processor does not multiply half precision, torch's product takes several times as long as in float32. Here a
few lines of the weight at a time become float32, in memory that stays in the cache, and torch's product in float32
multiplies all rows with them. There is no copy of the weight. Which is faster is measured, once per machine and shape
(`costs`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _timings, dot_linear
from fastgen.ops.linear import as_rows, count_of_cold, shortest_times

# Timings are those of this code: to be renamed when it changes.
_KERNEL = "widened linear 2"
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# Of the lines that are in float32 at a time; fewer of them than these are not worth a call of torch's product.
_BLOCK_BYTES, _MIN_LINES = 2**20, 64
# Rows that are in float32 at a time.
_BLOCK_ROWS = 1024
# What is measured: about so many rows, with so many multiplications at most.
_BUCKETS, _MAX_WORK = (32, 256), 2**24


class Costs(NamedTuple):
    """Seconds that a product takes."""

    plain: float  # torch's own
    widened: float


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are for it: more rows [..., inputs] than `dot_linear` takes, [outputs, inputs] and [outputs].

    All are of one type, float16 or bfloat16. Where a user lets torch round the operands in float32, it serves none.
    """
    others = (weight,) if bias is None else (weight, bias)
    return (
        all(tensor.dtype is x.dtype and tensor.device.type == "cpu" for tensor in (x, *others))
        and x.dtype in _TYPES
        and torch.get_float32_matmul_precision() == "highest"
        and weight.dim() == 2
        and weight.stride(1) == 1
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() > dot_linear.MAX_ROWS[x.dtype] * x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, multiplied in float32 and rounded once; not differentiable.

    x is [..., inputs], the weight [outputs, inputs], the bias [outputs], all of one type: float16 or bfloat16. Beside
    the result it needs memory for 1 MiB of the weight or 64 lines, and for 1024 rows of x and of their results with
    these lines, all in float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], weight.shape[0])
    widened_linear_out(y, rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def widened_linear_out(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Writes the result to y, [rows, outputs], for x as [rows, inputs]."""
    lines = max(_BLOCK_BYTES // (4 * weight.shape[1]), _MIN_LINES)
    widened = weight.new_empty(min(lines, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    for rows, result in zip(x.split(_BLOCK_ROWS), y.split(_BLOCK_ROWS), strict=True):
        exact = rows.float()
        for begin in range(0, weight.shape[0], lines):
            part = slice(begin, begin + lines)
            block = widened[: weight[part].shape[0]].copy_(weight[part]).t()
            result[:, part] = exact.mm(block) if bias is None else torch.addmm(bias[part].float(), exact, block)


def costs(rows: int, inputs: int, outputs: int, dtype: torch.dtype, measure: bool = True) -> Costs | None:
    """What a layer of this shape costs on this machine for about so many rows, with the number of threads in force.

    Measured once, which takes as long as some such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured. The times are those of a bucket of rows:
    how they compare is what counts.
    """
    bucket = _BUCKETS[0] if rows * rows < _BUCKETS[0] * _BUCKETS[1] else _BUCKETS[1]
    key = f"{_TYPES[dtype]} {bucket}x{inputs}x{outputs}"
    measuring = (lambda: _measure(bucket, inputs, outputs, dtype)) if measure else None
    known = _timings.get(_KERNEL, key, len(Costs._fields), measuring)
    return None if known is None else Costs(*known)


@torch.no_grad()
def _measure(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Costs:
    some = min(outputs, max(_MAX_WORK // (rows * inputs), _MIN_LINES))
    # With few rows the weight comes from memory, as in a model.
    count = count_of_cold(2 * inputs * some, 8) if rows == _BUCKETS[0] else 1
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=dtype, device="cpu")
    x = full((rows, inputs), 0.5)
    weights = [full((some, inputs), 0.25) for _ in range(count)]
    copies = [weight.clone() for weight in weights]  # what torch's product has just read would be in the cache
    plain, widened = shortest_times(
        [
            (lambda weight: F.linear(x, weight), weights),
            (lambda weight: widened_linear(x, weight, None), copies),
        ]
    )
    return Costs(plain * outputs / some, widened * outputs / some)


def backend() -> str:
    """Which implementation serves this operator."""
    known = [Costs(*cost) for cost in _timings.all(_KERNEL).values() if len(cost) == len(Costs._fields)]
    faster = sum(cost.widened < cost.plain for cost in known)
    return f"torch in float32, where measured to be faster: for {faster} of {len(known)} shapes"
