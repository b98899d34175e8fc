"""Weights of few bits as layers keep them, and their products: the one place where these are chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.quantization import words
from fastgen.quantization.grouped import GroupedWeight, check, values

# So many numbers of a weight are in floating point at a time, in the plain product.
_CHUNK = 2**24


class PackedWeight(NamedTuple):
    """A `GroupedWeight` with two numbers of 4 bits in a byte, the first in the lower half."""

    numbers: Tensor  # uint8 [outputs, inputs * bits / 8], rounded up
    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None
    order: Tensor | None
    bits: int
    inputs: int

    @property
    def outputs(self) -> int:
        return self.numbers.shape[0]


# The parts of a packed weight that are tensors: layers keep them as buffers.
PARTS = ("numbers", "scales", "zeros", "minimums", "order")


def pack(weight: GroupedWeight) -> PackedWeight:
    """The weight as it is kept. Raises ValueError as `grouped.check` does."""
    check(weight)
    numbers, inputs = weight.numbers, weight.numbers.shape[1]
    if weight.bits == 4:
        numbers = words.joined(F.pad(numbers, (0, inputs % 2)))
    return PackedWeight(
        numbers.contiguous(), weight.scales, weight.zeros, weight.minimums, weight.order, weight.bits, inputs
    )


def unpack(packed: PackedWeight) -> GroupedWeight:
    """The inverse of `pack`."""
    return _grouped(packed, slice(None), packed.order)


def rows(packed: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight in floating point, [len(which), inputs], in the layer's order of inputs."""
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`: x [..., inputs], any floating dtype; the bias [outputs]."""
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    lines = max(1, _CHUNK // max(1, packed.inputs))
    parts = [
        F.linear(x, values(_grouped(packed, slice(start, start + lines), None), x.dtype), _part(bias, start, lines))
        for start in range(0, max(1, packed.outputs), lines)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _part(bias: Tensor | None, start: int, lines: int) -> Tensor | None:
    return None if bias is None else bias[start : start + lines]


def _grouped(packed: PackedWeight, lines: slice | Tensor, order: Tensor | None) -> GroupedWeight:
    """Some lines of the weight, with an order of their columns or in that of the numbers."""
    numbers = packed.numbers[lines]
    if packed.bits == 4:
        numbers = words.halves(numbers)[:, : packed.inputs]
    zeros, minimums = (part if part is None else part[lines] for part in (packed.zeros, packed.minimums))
    group_size = packed.inputs // packed.scales.shape[1]
    return GroupedWeight(numbers, packed.scales[lines], zeros, minimums, packed.bits, group_size, order)
