"""The argmax of a linear layer, mostly from approximate logits, on the CPU.

Greedy search needs only the argmax of the LM head. In small models, this layer has a fifth to a half of all weights. So
all logits are first approximated from an 8-bit copy of the weight, a quarter of the bytes. The error of an approximate
logit is bounded. Only logits that could be the largest are then computed from the weight itself, as `gemv` computes
them. The result equals the argmax over all outputs of `gemv`, as long as no approximate logit overflows (results up to
1e37).

The bound follows from the Cauchy-Schwarz inequality. For a row x and a weight row w, of which the copies are x' and w',

    |w x - w' x'|  =  |(w - w') x + w' (x - x')|  <=  |w - w'| |x| + |w'| |x - x'|

where |.| are norms. The rounding errors of float32 sums on both sides are added. (For a search for the largest inner
product with bounds from rounded vectors, see Guo et al., "Quantization based Fast Inner Product Search", AISTATS 2016,
which has no guarantee, and Teflioudi and Gemulla, "Exact and Approximate Maximum Inner Product Search with LEMP", 2016,
section 4, for guaranteed bounds.)
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import choose, copies, fit_in_float32
from fastgen.ops.linear.weights import PackedWeight
from fastgen.ops.search_step import MASKED

# Logits that the kernel compares at a time (csrc/cpu/largest_output.cpp).
_BLOCK = 256
_GROUP_SIZE = 64
# If all scales of a weight row are below the first value, its errors are unknown. No norm is less than the second.
_LEAST_SCALE, _LEAST = 1e-30, 1e-37
# Largest relative error of rounding to nearest in float32.
_UNIT = 2.0**-24
# Adding the bias rounds a logit and its approximation, which adds at most this relative difference.
_ROUNDING = 4 * _UNIT

# Elements whose float64 copies take negligible memory.
_AT_ONCE = 2**18


class ApproximateHead(NamedTuple):
    """A low-bit copy of a weight, [N, K], and what bounds the error of its logits."""

    weight: PackedWeight
    # [2, N + blocks of N], float32: the norms of the copy's rows, and of their differences from the weight's; then the
    # largest of each block.
    norms: Tensor


def bounded_copy(weight: Tensor) -> ApproximateHead | None:
    """Returns an 8-bit copy of a weight, [N, K], float32; None if not all of its elements are finite."""
    copy = copies.rounded(weight, 8, _GROUP_SIZE, rotated=True)
    # [panels, groups, N of a panel]. Rotating multiplies norms by the root of the group size, so no factor is needed
    # here.
    scales = copy.scales.double()
    roots = scales.square().sum(dim=1).sqrt().flatten()[: weight.shape[0]]
    norms = _norms_of(weight.detach())
    # An element is off by at most half of its group's scale, slightly more if the scale is rounded. An element too
    # small for float32 to divide by may have become any 8-bit value.
    are_tiny = scales.amax(dim=1).flatten()[: weight.shape[0]] < _LEAST_SCALE
    errors = torch.where(are_tiny, norms + 128 * roots, 0.5 * 1.001 * roots)
    norms = (norms + errors) * (1 + 1e-4)
    # Rounding of sums: in `gemv`, in the approximate logits, and in rotating. Twice the possible error.
    errors += norms * (2 * _UNIT * (weight.shape[1] + 64))
    return _with_norms(copy, norms, errors)


def likely_copy(weight: Tensor) -> ApproximateHead | None:
    """Returns a 4-bit copy whose argmax is likely that of the weight: for drafts, which the model verifies.

    Rounding errors have either sign. Their sum is likely within three standard deviations, which are the bound above
    divided by the root of K.
    """
    copy = copies.rounded(weight, 4, _GROUP_SIZE)
    roots = copy.scales.double().square().sum(dim=1).sqrt().flatten()[: weight.shape[0]]
    # Elements of a group are off by scale / sqrt(12) on average.
    errors = roots * math.sqrt(_GROUP_SIZE / 12)
    likely = 3 / math.sqrt(weight.shape[1])
    return _with_norms(copy, _norms_of(weight.detach()) * likely, errors * likely)


def _with_norms(copy: PackedWeight, norms: Tensor, errors: Tensor) -> ApproximateHead | None:
    found = torch.stack([_with_blocks(norms), _with_blocks(errors)]).float().clamp(min=_LEAST)
    return ApproximateHead(copy, found) if bool(found.isfinite().all()) else None


def _norms_of(weight: Tensor) -> Tensor:
    """Returns the norms of a weight's rows, [N], float64, some rows at a time: a float64 copy is twice the size."""
    some = max(_AT_ONCE // weight.shape[1], 1)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in weight.split(some)])


def _with_blocks(norms: Tensor) -> Tensor:
    """Returns the norms, followed by the largest of each block."""
    blocks = F.pad(norms, (0, -len(norms) % _BLOCK)).view(-1, _BLOCK)
    return torch.cat([norms, blocks.amax(dim=1)])


def logits_out(logits: Tensor, x: Tensor, bias: Tensor | None, copy: ApproximateHead) -> None:
    """Writes approximate logits, [M, N], float32; the other arguments are as in `argmax_out`."""
    packed = copy.weight
    sizes = packed.bits, packed.group_size, packed.rotated, False
    torch.ops.fastgen.grouped_linear_out.default(logits, x, *packed[:5], bias, *sizes)


def argmax_out(
    out: Tensor,
    logits: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    copy: ApproximateHead,
    is_near: Tensor | None = None,
    masked: float = MASKED,
    share: float = 0.0,
) -> int:
    """Writes the argmax of the exact logits of each row to `out`. Of equal logits the first wins; NaN is the largest.

    Args:
        out: [M], int64.
        logits: [M, N], float32, from `logits_out`. A logit that has since been set to -inf is banned. If all but one of
            a row are banned, that one may have any value.
        x: [M, K], float32, contiguous along K.
        weight: [N, K], float32, contiguous along K.
        bias: [N], float32, or None.
        copy: `bounded_copy(weight)`, of the weight as it is now.
        is_near: [M], bool, for the second output of `top_two`, with that `share` of a row's magnitude (of the logits
            that are not `masked`), computed from the approximate logits.

    Returns:
        How many logits were computed from the weight, in all rows.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together.
    """
    return torch.ops.fastgen.largest_output_out.default(
        out, is_near, logits, x, weight, bias, copy.norms, copy.weight.group_size, _ROUNDING, masked, share
    )


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a kernel for x [M, K], a weight [N, K] and a bias [N], all in float32."""
    return fit_in_float32(x, weight, bias) and is_available()


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process, and approximate logits are faster than exact ones."""
    return _library.has_kernel("fastgen::largest_output_out") and choose.missing("int8") is None


# Stand-ins in a recorded graph for the LM head and its argmax (`fastgen.decoding.lm_head`). Nobody calls them.
_library.define("approximate_logits(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("argmax_of_logits(Tensor logits, Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "largest_output_out(Tensor(a!) out, Tensor(b!)? is_near, Tensor logits, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor norms, int group_size, float rounding, float masked, float share) -> int"
)
_library.define(
    "top_two_of_logits(Tensor(a!) tokens, Tensor(b!) is_near, Tensor logits, float masked, float share, Tensor x, "
    "Tensor weight, Tensor? bias) -> ()"
)
APPROXIMATE_LOGITS = torch.ops.fastgen.approximate_logits.default
ARGMAX = torch.ops.fastgen.argmax_of_logits.default
TOP_TWO = torch.ops.fastgen.top_two_of_logits.default
