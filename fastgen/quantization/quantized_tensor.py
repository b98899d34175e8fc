"""A group-quantised weight: every checkpoint format is read into this form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear import grouped
from fastgen.ops.linear.grouped import SuperBlockScales

# For formats that pack values into int32; GGUF blocks have other numbers, too.
BITS = (4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class QuantizedTensor(NamedTuple):
    """A weight, [N, K], whose quantised values q represent scale * (q - zero) or scale * q + min.

    Each n and group along K has a scale, and a zero point or a min: columns g * group_size up to (g + 1) * group_size
    of `qweight` are group g.
    """

    qweight: Tensor  # uint8 [N, K]: 0 to 2**bits - 1, a value per byte, columns in the order of `order`
    scales: Tensor  # [N, groups], float16, bfloat16 or float32
    zeros: Tensor | None  # zero points, uint8 [N, groups]; without them 2**(bits - 1) ...
    mins: Tensor | None  # ... unless these are given: [N, groups], the dtypes of scales
    bits: int  # 4, 5, 6 or 8
    group_size: int
    order: Tensor | None  # int64 [K]: column i of `qweight` is the layer's in_feature order[i]; None: in order
    super_blocks: SuperBlockScales | None = None  # the factors of scales and mins, in K-quants


def dequantized(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in floating point, [N, K] in the layer's own order of in_features.

    It is computed in float32 and rounded to `dtype` once. Raises ValueError as `check` does.
    """
    check(weight)
    found = values(weight, dtype)
    return found if weight.order is None else found[:, torch.argsort(weight.order)]


def values(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in floating point, with columns in the order of `qweight`. Checks nothing."""
    factors = [weight.scales, weight.zeros, weight.mins]
    return grouped.values(weight.qweight, factors, weight.bits, weight.group_size).to(dtype)


def check(weight: QuantizedTensor) -> None:
    """Checks that the parts fit together. Reads the order once, and `qweight` not at all.

    Raises:
        ValueError: a part has another shape or dtype than in `QuantizedTensor`, or the order is not a permutation.
    """
    qweight, scales, zeros, mins, bits, group_size, order, _ = weight
    if bits not in grouped.BITS:
        raise ValueError(f"weights have {bits} bits: 4, 5, 6 and 8 are served")
    if qweight.dim() != 2 or qweight.dtype != torch.uint8:
        raise ValueError(f"qweight is {_described(qweight)}: it must be uint8 [N, K]")
    n, k = qweight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"{k} in_features are not whole groups of {group_size}")
    groups = k // group_size
    if zeros is not None and mins is not None:
        raise ValueError("a weight has zeros or mins, not both")
    for name, part, dtypes in (
        ("scales", scales, FLOATS),
        ("zeros", zeros, (torch.uint8,)),
        ("mins", mins, FLOATS),
    ):
        if part is not None and (part.shape != (n, groups) or part.dtype not in dtypes):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} are {_described(part)}: they must be {wanted} {[n, groups]}")
    if order is not None:
        _check_order(order, k)


def _check_order(order: Tensor, k: int) -> None:
    if order.shape != (k,) or order.dtype != torch.int64:
        raise ValueError(f"the order is {_described(order)}: it must be int64 {[k]}")
    if not torch.equal(order.sort().values, torch.arange(k, device=order.device)):
        raise ValueError(f"the order does not name each of the {k} in_features once")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
