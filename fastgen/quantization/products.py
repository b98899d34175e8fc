"""Weights of few bits as layers keep them, and their products: the one place where these are chosen.

A weight is kept in the layout of the kernels of its device: in panels on a CPU (`fastgen.ops.grouped_linear`), in lines
on a GPU (`fastgen.ops.triton.grouped_linear`), which rounds no inputs. Groups that the CPU's do not take are cut into
smaller ones with the same scale; a weight for which there are none is kept as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import patching, settings
from fastgen.ops import grouped_linear
from fastgen.ops.triton import grouped_linear as lines
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
    kernel_group_size: int  # 0: the weight is not in a layout of kernels
    layout: str  # "panels", "lines", or "plain": as it was given


# The parts of a packed weight that are tensors: layers keep them as buffers.
PARTS = ("numbers", "scales", "zeros", "minimums", "order")


def pack(weight: GroupedWeight) -> PackedWeight:
    """The weight as it is kept. Raises ValueError as `grouped.check` does."""
    check(weight)
    numbers, scales, zeros, minimums, bits, group_size, order, multiples = weight
    outputs, inputs = numbers.shape
    if numbers.numel() and lines.is_for(numbers.device):
        packed = lines.pack(*weight[:4], bits=bits, group_size=group_size, order=order)
        return PackedWeight(*packed[:5], Sizes(outputs, inputs, bits, group_size, group_size, "lines"))
    size = _kernel_group_size(inputs, group_size) if numbers.numel() else 0
    sizes = Sizes(outputs, inputs, bits, group_size, size, "panels" if size else "plain")
    if not size:
        return PackedWeight(numbers.contiguous(), scales, zeros, minimums, order, sizes)
    if multiples is not None and size == group_size and order is None:
        kept = grouped_linear.pack_multiples(numbers, multiples, bits=bits, group_size=size)
        return PackedWeight(*kept[:5], sizes)
    parts = [None if part is None else _repeated(part, inputs, size) for part in (scales, zeros, minimums)]
    assert parts[0] is not None
    panels = grouped_linear.pack(numbers, parts[0], *parts[1:], bits=bits, group_size=size, order=order)
    return PackedWeight(*panels[:5], sizes)


def moved(packed: PackedWeight) -> PackedWeight:
    """The weight in the layout of the device that its tensors are on."""
    is_for_lines = lines.is_for(packed.numbers.device)
    return packed if is_for_lines == (packed.sizes.layout == "lines") else pack(unpack(packed))


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
    """The inverse of `pack`. Scales may have another type, in which they are the same; multiples are multiplied."""
    return _grouped(packed, slice(None), packed.order)


def rows(packed: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight in floating point, [len(which), inputs], in the layer's order of inputs.

    Raises:
        IndexError: there is no such row. On a GPU, which is not waited for, it is NaN instead.
    """
    if packed.sizes.layout == "lines":
        return lines.rows(_in_lines(packed), which, dtype)
    if packed.sizes.layout == "panels" and which.device.type == "cpu" and grouped_linear.is_available():
        return grouped_linear.rows(_in_panels(packed), which, dtype)
    if not ((which >= 0) & (which < packed.sizes.outputs)).all():
        raise IndexError(f"a row that a weight with {packed.sizes.outputs} of them does not have")
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`: x [..., inputs], any floating dtype; the bias [outputs].

    With the kernels, which round x to 8 bits on the CPU, where `Settings.few_bits_inputs` allows it; or with the weight
    in floating point, a part of it at a time.
    """
    if _kernels_serve(x, packed, bias):
        if packed.sizes.layout == "lines":
            return lines.grouped_linear(x, _in_lines(packed), bias)
        return grouped_linear.grouped_linear(x, _in_panels(packed), bias)
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    count = max(1, _CHUNK // max(1, packed.sizes.inputs))
    parts = [
        F.linear(x, values(_grouped(packed, slice(start, start + count), None), x.dtype), _part(bias, start, count))
        for start in range(0, max(1, packed.sizes.outputs), count)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _kernels_serve(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> bool:
    needs_gradient = x.requires_grad or (bias is not None and bias.requires_grad)
    return (
        (packed.sizes.layout == "lines" or _panels_serve(x, packed))
        and patching.is_active()
        and x.device == packed.numbers.device
        and x.dtype in _TYPES
        and not (torch.is_grad_enabled() and needs_gradient)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _panels_serve(x: Tensor, packed: PackedWeight) -> bool:
    return (
        packed.sizes.layout == "panels"
        and settings.current().few_bits_inputs == "int8"
        and grouped_linear.unavailable() is None
        and x.device.type == "cpu"
    )


def _in_panels(packed: PackedWeight) -> grouped_linear.PackedWeight:
    outputs, inputs, bits, _, size, _ = packed.sizes
    return grouped_linear.PackedWeight(*packed[:5], outputs, inputs, bits, size)


def _in_lines(packed: PackedWeight) -> lines.LinedWeight:
    return lines.LinedWeight(*packed[:5], *packed.sizes[:4])


def _part(bias: Tensor | None, start: int, count: int) -> Tensor | None:
    return None if bias is None else bias[start : start + count]


def _grouped(packed: PackedWeight, which: slice | Tensor, order: Tensor | None) -> GroupedWeight:
    """Some lines of the weight, with an order of their columns or in that of the numbers."""
    _, inputs, bits, group_size, size, layout = packed.sizes
    if layout == "lines":
        numbers, parts = lines.unpacked(_in_lines(packed), which)
    elif layout == "panels":
        numbers, parts = grouped_linear.unpacked(_in_panels(packed), which)
        each = group_size // size if group_size < inputs else parts[0].shape[1] if parts[0] is not None else 1
        parts = [part if part is None else part[:, ::each] for part in parts]
    else:
        numbers = packed.numbers[which]
        parts = [part if part is None else part[which] for part in (packed.scales, packed.zeros, packed.minimums)]
    scales, zeros, minimums = parts
    assert scales is not None
    return GroupedWeight(numbers, scales, zeros, minimums, bits, group_size, order)
