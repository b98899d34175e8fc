"""What group-quantised weights in panels stand for, by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.linear import weights
from fastgen.ops.linear.weights import PackedWeight


def dequantized(weight: PackedWeight, dtype: torch.dtype, which: Tensor | slice = slice(None)) -> Tensor:
    """The weight, [N, K], in a floating type, or some of its rows; computed in float32, rounded once."""
    found = weights.values(*weights.unpacked(weight, which), weight.bits, weight.group_size)
    if weight.rotated:
        found = rotated(found, weight.group_size)[:, : weight.k] / weight.group_size
    return (found if weight.order is None else found[:, weight.order.argsort()]).to(dtype)


def rotated(x: Tensor, group_size: int) -> Tensor:
    """x [..., whole groups], each group times the Hadamard matrix of its size, a power of two; in floating point."""
    matrix = x.new_ones(1, 1)
    while matrix.shape[0] < group_size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return (x.unflatten(-1, (-1, group_size)) @ matrix).flatten(-2)
