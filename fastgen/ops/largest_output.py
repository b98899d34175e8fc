"""The largest output of a linear layer for each row, mostly without computing the others, on the CPU.

Greedy search asks the output layer for nothing else. The layer is large: of small models, a fifth to a half of all
weights. So all outputs are estimated first, with a copy of the weight in 8 bits, which is a quarter of the bytes. An
estimate is off by a bound at most. Only outputs that could be the largest are computed from the weight itself, as
`gemv` computes them. The result is that of the argmax over all outputs of `gemv`, as long as no estimate
overflows (results up to 1e37).

The bound follows from the Cauchy-Schwarz inequality. For a row x and a line w of the weight, of which the copies are x'
and w',

    |w x - w' x'|  =  |(w - w') x + w' (x - x')|  <=  |w - w'| |x| + |w'| |x - x'|

where |.| are lengths. What rounding sums in float32 can do to both sides is added. (A search for the largest inner
product with bounds from rounded vectors: see Guo et al., "Quantization based Fast Inner Product Search", AISTATS 2016,
which has no guarantee, and Teflioudi and Gemulla, "Exact and Approximate Maximum Inner Product Search with LEMP", 2016,
section 4, for bounds that have one.)
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import grouped
from fastgen.ops.linear.grouped import PackedWeight
from fastgen.ops.top_two import MASKED

# Outputs that the kernel looks at together (csrc/cpu/largest_output.cpp).
_BLOCK = 256
_GROUP_SIZE = 64
# Of lines of which all scales are smaller, it is not known what their numbers are rounded to. No size is less than
# the second number.
_LEAST_SCALE, _LEAST = 1e-30, 1e-37
# Rounding to nearest in float32: the largest error of a result, as a part of it.
_UNIT = 2.0**-24
# So much of a result, at the most, it may differ by because it and its estimate are rounded when the bias is added.
_ROUNDING = 4 * _UNIT

# Numbers whose copies in float64 take no memory to speak of.
_AT_ONCE = 2**18


class Copy(NamedTuple):
    """A weight in 8 bits, with what its estimates may be off by."""

    numbers: PackedWeight
    # [2, outputs and then blocks of them], float32: lengths of lines, and of what is between them and the weight's; of
    # a block the largest.
    sizes: Tensor


def copy_of(weight: Tensor) -> Copy | None:
    """A copy of a weight, [outputs, inputs], float32; None if not all of its numbers are finite."""
    numbers = grouped.rounded(weight, 8, _GROUP_SIZE, rotated=True)
    # Of panels, groups and outputs. Rotated lines are longer by the root of the group size: so it is no factor here.
    scales = numbers.scales.double()
    roots = scales.square().sum(dim=1).sqrt().flatten()[: weight.shape[0]]
    lengths = _lengths_of(weight.detach())
    # Each number of a line is off by half of its group's scale at the most; slightly more where the scale is rounded.
    # What is smaller than float32 can divide by may have become any number of 8 bits.
    are_tiny = scales.amax(dim=1).flatten()[: weight.shape[0]] < _LEAST_SCALE
    errors = torch.where(are_tiny, lengths + 128 * roots, 0.5 * 1.001 * roots)
    lengths = (lengths + errors) * (1 + 1e-4)
    # Of sums: those of `gemv`, those of the estimates, and rotating. Twice as much as could be.
    errors += lengths * (2 * _UNIT * (weight.shape[1] + 64))
    sizes = torch.stack([_with_blocks(lengths), _with_blocks(errors)]).float().clamp(min=_LEAST)
    return Copy(numbers, sizes) if bool(sizes.isfinite().all()) else None


def rough_copy_of(weight: Tensor) -> Copy | None:
    """A copy in 4 bits, whose largest output is only likely the weight's: for who guesses, and is checked by others.

    What rounding does to a product is a sum of errors of either sign. It is likely within three standard deviations,
    which are the bound above divided by the root of the number of inputs.
    """
    numbers = grouped.rounded(weight, 4, _GROUP_SIZE)
    roots = numbers.scales.double().square().sum(dim=1).sqrt().flatten()[: weight.shape[0]]
    # Numbers of a group are off by a scale / sqrt(12) on the average.
    errors = roots * math.sqrt(_GROUP_SIZE / 12)
    lengths = _lengths_of(weight.detach())
    likely = 3 / math.sqrt(weight.shape[1])
    sizes = (torch.stack([_with_blocks(lengths), _with_blocks(errors)]) * likely).float().clamp(min=_LEAST)
    return Copy(numbers, sizes) if bool(sizes.isfinite().all()) else None


def _lengths_of(weight: Tensor) -> Tensor:
    """Of the lines of a weight, [outputs], float64. Little by little: all its numbers in float64 are twice its size."""
    some = max(_AT_ONCE // weight.shape[1], 1)
    return torch.cat([torch.linalg.vector_norm(lines, dim=1, dtype=torch.float64) for lines in weight.split(some)])


def _with_blocks(sizes: Tensor) -> Tensor:
    """The sizes, and behind them the largest of each block."""
    blocks = F.pad(sizes, (0, -len(sizes) % _BLOCK)).view(-1, _BLOCK)
    return torch.cat([sizes, blocks.amax(dim=1)])


def estimate_out(estimates: Tensor, x: Tensor, bias: Tensor | None, copy: Copy) -> None:
    """Writes estimates of all outputs, [rows, outputs], float32; the other arguments are as in `largest_output_out`."""
    packed = copy.numbers
    sizes = packed.bits, packed.group_size, packed.rotated, False
    torch.ops.fastgen.grouped_linear_out.default(estimates, x, *packed[:5], bias, *sizes)


def largest_output_out(
    out: Tensor,
    estimates: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    copy: Copy,
    is_near: Tensor | None = None,
    masked: float = MASKED,
    share: float = 0.0,
) -> int:
    """Writes the number of the largest output for each row to `out`. Of equal ones it is the first; a NaN is largest.

    Args:
        out: [rows], int64.
        estimates: [rows, outputs], float32, from `estimate_out`. An output whose estimate has become -inf since does
            not count. One that all others of a row have lost to in this way may have become anything.
        x: [rows, inputs], float32, the inputs next to each other.
        weight: [outputs, inputs], float32, the inputs next to each other.
        bias: [outputs], float32, or None.
        copy: `copy_of(weight)`, of the weight as it is now.
        is_near: [rows], bool, for what `top_two` says of a second output, with that `share` of the magnitude of a row
            (of what is not `masked`), which is taken from the estimates.

    Returns:
        How many outputs were computed from the weight, of all rows together.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together.
    """
    return torch.ops.fastgen.largest_output_out.default(
        out, is_near, estimates, x, weight, bias, copy.sizes, copy.numbers.group_size, _ROUNDING, masked, share
    )


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a kernel for these: rows [rows, inputs], [outputs, inputs] and [outputs], all in float32."""
    return (
        all(each.dtype is torch.float32 and each.device.type == "cpu" for each in (x, weight))
        and x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and min(*x.shape, *weight.shape) > 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is torch.float32 and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and is_available()
    )


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process, and estimates are faster than results."""
    return _library.has_kernel("fastgen::largest_output_out") and grouped.unavailable() is None


backend = functools.partial(_library.backend, "fastgen::largest_output_out")
# Marks that stand in a recording for the product and its argmax: nobody calls them.
_library.define("output_estimates(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("largest_output(Tensor outputs, Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "largest_output_out(Tensor(a!) out, Tensor(b!)? is_near, Tensor estimates, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor sizes, int group_size, float rounding, float masked, float share) -> int"
)
_library.define(
    "top_two_outputs(Tensor(a!) tokens, Tensor(b!) is_near, Tensor outputs, float masked, float share, Tensor x, "
    "Tensor weight, Tensor? bias) -> ()"
)
ESTIMATE = torch.ops.fastgen.output_estimates.default
LARGEST = torch.ops.fastgen.largest_output.default
TOP_TWO = torch.ops.fastgen.top_two_outputs.default
