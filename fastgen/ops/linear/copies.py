"""Packs float weights: exactly in 16 bits or, on request, rounded, which changes the results of linear ops.

Most checkpoints are stored in bfloat16 or float16. If one is loaded in float32, these types represent its weights
exactly (`exact_cast`). `int8` and `int4` are rounded to nearest in groups, `int8` after rotating them on a CPU. `bf16`
rounds weights, and activations later, to 8 significant bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.linear import on_gpu
from fastgen.ops.linear.weights import Format, PackedWeight, by_panels, scales_of

TYPES = (torch.bfloat16, torch.float16)
# Precisions that are rounded in groups.
BITS = {"int8": 8, "int4": 4}
# The sample of a weight: at least this many rows, and this many elements of each.
_ROWS, _COLUMNS = 4, 64


def likely_types(weight: Tensor) -> list[torch.dtype]:
    """Returns those of `TYPES` that represent a few hundred elements of a weight, [N, K], float32, exactly.

    For a weight trained in float32, that is none of them.
    """
    some = weight[:: max(weight.shape[0] // _ROWS, 1), :_COLUMNS].contiguous()
    return [dtype for dtype in TYPES if _bits(some.to(dtype).float()).equal(_bits(some))]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def exact_cast(weight: Tensor) -> Tensor | None:
    """Casts a weight, [N, K], float32, to one of `TYPES`; returns None if that would change a bit of any element.

    Raises:
        RuntimeError: the weight is not contiguous.
    """
    for dtype in likely_types(weight):
        out = torch.empty_like(weight, dtype=dtype)
        if torch.ops.fastgen.exact_cast_out.default(out, weight):
            return out
    return None


def exact(weight: Tensor) -> PackedWeight | None:
    """Packs a weight, [N, K], float32, in 16 bits; returns None if they do not represent it exactly."""
    cast = exact_cast(weight)
    return None if cast is None else panels(cast)


def panels(weight: Tensor) -> PackedWeight:
    """Packs a weight, [N, K], bfloat16 or float16, in panels, to be multiplied as float32.

    Raises:
        RuntimeError: the weight has another shape or dtype, or is not contiguous along K.
    """
    return _opaque(torch.ops.fastgen.pack_panels.default(weight.detach()), weight, Format.EXACT)


def _opaque(packed: Tensor, weight: Tensor, format: Format) -> PackedWeight:
    n, k = weight.shape
    return PackedWeight(packed, None, None, None, None, n, k, format=format)


def pack(weight: Tensor, precision: str, group_size: int = 64) -> PackedWeight:
    """Packs a weight, [N, K], of one of the `choose.types`, any strides, in one of `choose.PRECISIONS`.

    Args:
        group_size: in_features that share a scale; not for `bf16`.

    Raises:
        RuntimeError: the weight has another shape or dtype, or this processor lacks the instructions.
    """
    if on_gpu.is_for(weight.device):
        return on_gpu.rounded(weight, BITS[precision], group_size)
    if precision in BITS:
        # In 4 bits, rounding costs much more than rotating gains.
        return rounded(weight, BITS[precision], group_size, rotated=precision == "int8")
    return _opaque(torch.ops.fastgen.pack_bf16.default(weight.detach()), weight, Format.BF16)


def rounded(weight: Tensor, bits: int, group_size: int, rotated: bool = False) -> PackedWeight:
    """Rounds a floating weight [N, K] to nearest in 4 or 8 bits (`weights.scales_of`), and packs it in panels.

    Groups that are `rotated` have 32, 64 or 128 elements.

    Raises:
        RuntimeError: the shape or the sizes do not fit.
    """
    weight = weight.detach()
    least, most = torch.ops.fastgen.group_extremes.default(weight, group_size, rotated)
    scales = scales_of(least, most, bits)
    qweight = torch.ops.fastgen.round_to_panels.default(weight, scales.float(), bits, group_size, rotated)
    packed, (n, k) = by_panels(scales), weight.shape
    return PackedWeight(qweight, packed, None, None, None, n, k, bits, group_size, rotated)
