"""Weights in float32 whose numbers are all numbers of 16 bits, in these 16 bits, on the CPU.

Most checkpoints are stored in bfloat16 or float16. Whoever loads one in float32 has such weights: of bfloat16, half of
the bits are zeros. Products with few rows are bound by reading the weight, and those with panels of 16 bits
(`fastgen.ops.linear.panels`) have the same result, to the last bit. There are kernels alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops import _library

TYPES = (torch.bfloat16, torch.float16)
# A look at a weight: so many rows at least, and so many numbers of each.
_ROWS, _NUMBERS = 4, 64


def types_of_some(weight: Tensor) -> list[torch.dtype]:
    """Those of `TYPES` that a few hundred numbers of a weight, [outputs, inputs], float32, are of.

    Of a weight that has been trained in float32 it is none.
    """
    numbers = weight[:: max(weight.shape[0] // _ROWS, 1), :_NUMBERS].contiguous()
    return [dtype for dtype in TYPES if _bits(numbers.to(dtype).float()).equal(_bits(numbers))]


def narrowed(weight: Tensor) -> Tensor | None:
    """A weight, [outputs, inputs], float32, in one of `TYPES`; None if that would change a bit of any of its numbers.

    Raises:
        RuntimeError: the numbers of the weight do not lie next to each other.
    """
    for dtype in types_of_some(weight):
        out = torch.empty_like(weight, dtype=dtype)
        if torch.ops.fastgen.exact_cast_out.default(out, weight):
            return out
    return None


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@functools.cache
def is_available() -> bool:
    """Whether there is a kernel in this process."""
    return _library.has_kernel("fastgen::exact_cast_out")


backend = functools.partial(_library.backend, "fastgen::exact_cast_out")
_library.define("exact_cast_out(Tensor(a!) out, Tensor x) -> bool")
