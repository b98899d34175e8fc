"""Weights of few bits as layers keep them, and their products: the one place where these are chosen.

A weight is kept in the layout of the kernels (`fastgen.ops.grouped_linear`). Groups that they do not take are cut into
smaller ones with the same scale; a weight for which there are none is kept as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import patching, settings
from fastgen.ops import grouped_linear
from fastgen.quantization.grouped import GroupedWeight, check, values

# So many numbers of a weight are in floating point at a time, in the plain product.
_CHUNK = 2**24
# Inputs of a group in the kernels: the largest that divides the checkpoint's groups.
_SIZES = (128, 64, 32, 16, 8)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeight(NamedTuple):
    """A `GroupedWeight` in the layout of the kernels; where they do not serve it, its own parts."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None
    order: Tensor | None
    sizes: Sizes


class Sizes(NamedTuple):
    """What of a packed weight is no tensor."""

    outputs: int
    inputs: int
    bits: int
    group_size: int  # of the checkpoint
    kernel_group_size: int  # 0: the weight is not in the kernels' layout


# The parts of a packed weight that are tensors: layers keep them as buffers.
PARTS = ("numbers", "scales", "zeros", "minimums", "order")


def pack(weight: GroupedWeight) -> PackedWeight:
    """The weight as it is kept. Raises ValueError as `grouped.check` does."""
    check(weight)
    numbers, scales, zeros, minimums, bits, group_size, order = weight
    outputs, inputs = numbers.shape
    size = _kernel_group_size(inputs, group_size) if numbers.numel() else 0
    sizes = Sizes(outputs, inputs, bits, group_size, size)
    if not size:
        return PackedWeight(numbers.contiguous(), scales, zeros, minimums, order, sizes)
    parts = [None if part is None else _repeated(part, inputs, size) for part in (scales, zeros, minimums)]
    assert parts[0] is not None
    packed = grouped_linear.pack(numbers, parts[0], *parts[1:], bits=bits, group_size=size, order=order)
    return PackedWeight(*packed[:5], sizes)


def _kernel_group_size(inputs: int, group_size: int) -> int:
    """One group for all inputs may be cut anywhere: the last one may have fewer."""
    if group_size == inputs:
        return next((size for size in _SIZES if size <= inputs), _SIZES[-1])
    return next((size for size in _SIZES if group_size % size == 0), 0)


def _repeated(part: Tensor, inputs: int, size: int) -> Tensor:
    """[outputs, groups] for groups of a smaller size."""
    groups = -(-inputs // size)
    return part.repeat_interleave(-(-groups // part.shape[1]), dim=1)[:, :groups]


def unpack(packed: PackedWeight) -> GroupedWeight:
    """The inverse of `pack`. Scales may have another type, in which they are the same."""
    return _grouped(packed, slice(None), packed.order)


def rows(packed: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight in floating point, [len(which), inputs], in the layer's order of inputs.

    Raises:
        IndexError: there is no such row.
    """
    if packed.sizes.kernel_group_size and which.device.type == "cpu" and grouped_linear.is_available():
        return grouped_linear.rows(_for_kernels(packed), which, dtype)
    if not ((which >= 0) & (which < packed.sizes.outputs)).all():
        raise IndexError(f"a row that a weight with {packed.sizes.outputs} of them does not have")
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`: x [..., inputs], any floating dtype; the bias [outputs].

    With the kernels, which round x to 8 bits, where `Settings.few_bits_inputs` allows it; or with the weight in
    floating point, a part of it at a time.
    """
    if _kernels_serve(x, packed):
        return grouped_linear.grouped_linear(x, _for_kernels(packed), bias)
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    lines = max(1, _CHUNK // max(1, packed.sizes.inputs))
    parts = [
        F.linear(x, values(_grouped(packed, slice(start, start + lines), None), x.dtype), _part(bias, start, lines))
        for start in range(0, max(1, packed.sizes.outputs), lines)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _kernels_serve(x: Tensor, packed: PackedWeight) -> bool:
    return (
        packed.sizes.kernel_group_size > 0
        and settings.current().few_bits_inputs == "int8"
        and patching.is_active()
        and grouped_linear.unavailable() is None
        and x.device.type == packed.numbers.device.type == "cpu"
        and x.dtype in _TYPES
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled("cpu")
    )


def _for_kernels(packed: PackedWeight) -> grouped_linear.PackedWeight:
    outputs, inputs, bits, _, size = packed.sizes
    return grouped_linear.PackedWeight(*packed[:5], outputs, inputs, bits, size)


def _part(bias: Tensor | None, start: int, lines: int) -> Tensor | None:
    return None if bias is None else bias[start : start + lines]


def _grouped(packed: PackedWeight, lines: slice | Tensor, order: Tensor | None) -> GroupedWeight:
    """Some lines of the weight, with an order of their columns or in that of the numbers."""
    _, inputs, bits, group_size, size = packed.sizes
    if size:
        numbers, parts = grouped_linear.unpacked(_for_kernels(packed), lines)
        each = group_size // size if group_size < inputs else parts[0].shape[1] if parts[0] is not None else 1
        parts = [part if part is None else part[:, ::each] for part in parts]
    else:
        numbers = packed.numbers[lines]
        parts = [part if part is None else part[lines] for part in (packed.scales, packed.zeros, packed.minimums)]
    scales, zeros, minimums = parts
    assert scales is not None
    return GroupedWeight(numbers, scales, zeros, minimums, bits, group_size, order)
