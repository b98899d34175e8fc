"""Low-bit weights as layers keep them, and their products: the one place where these are chosen.

A weight is kept in the layout of the kernels of its device: in panels on a CPU (`fastgen.ops.linear.grouped`), in lines
on a GPU (`fastgen.ops.gpu.grouped_linear`). Groups that the CPU's kernels do not take are cut into smaller ones with
the same scale; a weight for which there are none is kept as it is.

On a CPU, activations stay floats, or are rounded to 8 bits: the same panels serve both. On a GPU they stay floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import patching, settings
from fastgen.ops.gpu import grouped_linear as lines
from fastgen.ops.linear import grouped
from fastgen.quantization.grouped import GroupedWeight, check, values

# So many numbers of a weight are in floating point at a time, in the plain product.
_CHUNK = 2**24
# Inputs of a group in the kernels: the largest that divides the checkpoint's groups.
_SIZES = (128, 64, 32, 16, 8)
# Bits of a number in lines; others become the larger ones.
_LINE_BITS = (4, 8)
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
    takes_floats: bool  # kernels multiply it with float activations


# The parts of a packed weight that are tensors: layers keep them as buffers.
PARTS = ("numbers", "scales", "zeros", "minimums", "order")


def pack(weight: GroupedWeight) -> PackedWeight:
    """The weight as it is kept. Raises ValueError as `grouped.check` does."""
    check(weight)
    numbers, scales, zeros, minimums, bits, group_size, order, multiples = weight
    outputs, inputs = numbers.shape
    if numbers.numel() and lines.is_for(numbers.device):
        return _pack_lines(weight)
    size = _kernel_group_size(inputs, group_size) if numbers.numel() else 0
    if not size:
        sizes = Sizes(outputs, inputs, bits, group_size, 0, "plain", False)
        return PackedWeight(numbers.contiguous(), scales, zeros, minimums, order, sizes)
    if multiples is not None and size == group_size and order is None:
        panels = grouped.pack_multiples(numbers, multiples, bits=bits, group_size=size)
    else:
        factors = [None if part is None else _repeated(part, inputs, size) for part in (scales, zeros, minimums)]
        assert factors[0] is not None
        panels = grouped.pack(numbers, factors[0], *factors[1:], bits=bits, group_size=size, order=order)
    takes_floats = grouped.keeps_floats(panels)
    return PackedWeight(*panels[:5], Sizes(outputs, inputs, bits, group_size, size, "panels", takes_floats))


def _pack_lines(weight: GroupedWeight) -> PackedWeight:
    bits = min(each for each in _LINE_BITS if each >= weight.bits)
    if bits != weight.bits and weight.zeros is None and weight.minimums is None:  # the middle is another number then
        middle = 2 ** (weight.bits - 1)
        weight = weight._replace(zeros=torch.full_like(weight.scales, middle, dtype=torch.uint8))
    packed = lines.pack(*weight[:4], bits=bits, group_size=weight.group_size, order=weight.order)
    outputs, inputs = weight.numbers.shape
    return PackedWeight(*packed[:5], Sizes(outputs, inputs, bits, weight.group_size, weight.group_size, "lines", True))


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
    if packed.sizes.layout == "panels" and which.device.type == "cpu" and grouped.is_available():
        return grouped.rows(_in_panels(packed), which, dtype)
    if not ((which >= 0) & (which < packed.sizes.outputs)).all():
        raise IndexError(f"a row that a weight with {packed.sizes.outputs} of them does not have")
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None, activations: str | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`: x [..., inputs], any floating dtype; the bias [outputs].

    Gradients of x and the bias are computed with the weight unpacked piece by piece; none of it is kept for them. Where
    they are asked for, activations stay floats.

    Args:
        activations: "float", "int8" or None: as `Settings.activations` says. "int8" rounds them on a CPU.
    """
    if x.dtype in _TYPES and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(x, bias, packed)
    product = _kernel(x, packed, activations or settings.current().activations)
    return _plain(x, packed, bias) if product is None else product(x, bias)


class _Product(torch.autograd.Function):
    """The product with its gradients, which keeps no floating weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: PackedWeight) -> Tensor:
        ctx.packed, ctx.has_bias = packed, bias is not None
        return multiply(x, packed, bias, "float")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (of_result,) = gradients
        packed = ctx.packed
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_x = of_result.new_zeros(*of_result.shape[:-1], packed.sizes.inputs)
            for start, some in _pieces(packed, of_result.dtype):
                of_x += of_result[..., start : start + len(some)] @ some
            of_x = of_x if packed.order is None else of_x.index_select(-1, torch.argsort(packed.order))
        has_gradient = ctx.has_bias and ctx.needs_input_grad[1]
        of_bias = of_result.reshape(-1, packed.sizes.outputs).sum(0) if has_gradient else None
        return of_x, of_bias, None


def _kernel(x: Tensor, packed: PackedWeight, activations: str) -> Any:
    """What multiplies x with the weight and adds a bias; None where no kernel does."""
    if not patching.is_active() or x.device != packed.numbers.device or x.dtype not in _TYPES:
        return None
    if packed.sizes.layout == "lines":
        return lambda x, bias: lines.grouped_linear(x, _in_lines(packed), bias)
    is_rounded = activations == "int8" and grouped.unavailable() is None
    is_served = packed.sizes.layout == "panels" and (is_rounded or packed.sizes.takes_floats)
    if not is_served or x.device.type != "cpu" or not grouped.is_available():
        return None
    return lambda x, bias: grouped.grouped_linear(x, _in_panels(packed), bias, floats=not is_rounded)


def _plain(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """Torch's product with the weight in floating point, a part of it at a time."""
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    parts = [F.linear(x, some, _part(bias, start, len(some))) for start, some in _pieces(packed, x.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _pieces(packed: PackedWeight, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Some lines of the weight at a time, with the number of the first, their columns as those of the numbers."""
    count = max(1, _CHUNK // max(1, packed.sizes.inputs))
    for start in range(0, max(1, packed.sizes.outputs), count):
        yield start, values(_grouped(packed, slice(start, start + count), None), dtype)


def _in_panels(packed: PackedWeight) -> grouped.PackedWeight:
    outputs, inputs, bits, _, size, *_ = packed.sizes
    return grouped.PackedWeight(*packed[:5], outputs, inputs, bits, size)


def _in_lines(packed: PackedWeight) -> lines.LinedWeight:
    return lines.LinedWeight(*packed[:5], *packed.sizes[:4])


def _part(bias: Tensor | None, start: int, count: int) -> Tensor | None:
    return None if bias is None else bias[start : start + count]


def _grouped(packed: PackedWeight, which: slice | Tensor, order: Tensor | None) -> GroupedWeight:
    """Some lines of the weight, with an order of their columns or in that of the numbers."""
    _, inputs, bits, group_size, size, layout, _ = packed.sizes
    if layout == "lines":
        numbers, parts = lines.unpacked(_in_lines(packed), which)
    elif layout == "panels":
        numbers, parts = grouped.unpacked(_in_panels(packed), which)
        each = group_size // size if group_size < inputs else parts[0].shape[1] if parts[0] is not None else 1
        parts = [part if part is None else part[:, ::each] for part in parts]
    else:
        numbers = packed.numbers[which]
        parts = [part if part is None else part[which] for part in (packed.scales, packed.zeros, packed.minimums)]
    scales, zeros, minimums = parts
    assert scales is not None
    return GroupedWeight(numbers, scales, zeros, minimums, bits, group_size, order)
