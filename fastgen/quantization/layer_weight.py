"""Low-bit weights as layers keep them, and the choice of the kernel for each.

A weight is packed for its device: in panels on a CPU (`fastgen.ops.linear.grouped`), in rows on a GPU
(`fastgen.ops.gpu.grouped_linear`). Groups that the CPU kernels do not serve are divided into smaller ones with the same
scale. A weight that no kernel serves stays unpacked.

On a CPU, activations stay floats, or are quantised to 8 bits: the same panels serve both. On a GPU they stay floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import patching, settings
from fastgen.ops.gpu import grouped_linear as on_gpu
from fastgen.ops.linear import grouped
from fastgen.quantization.checkpoint import QuantizedTensor, check, values

# Elements of a weight that are dequantised at a time, for torch's linear op.
_CHUNK = 2**24
# Group sizes of the kernels: the largest that divides the checkpoint's is used.
_SIZES = (128, 64, 32, 16, 8)
# Bits in rows; other weights get the next larger number.
_ROW_BITS = (4, 8)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerWeight(NamedTuple):
    """A `QuantizedTensor`, packed for the kernels of its device, or unpacked if none serves it."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    order: Tensor | None
    sizes: Sizes


class Sizes(NamedTuple):
    """The parts of a `LayerWeight` that are not tensors."""

    n: int
    k: int
    bits: int
    group_size: int  # of the checkpoint
    kernel_group_size: int  # 0: unpacked
    layout: str  # "panels", "rows", or "plain": unpacked
    takes_floats: bool  # a kernel multiplies it with float activations


# The parts that are tensors: layers keep them as buffers.
PARTS = ("qweight", "scales", "zeros", "mins", "order")


def pack(weight: QuantizedTensor) -> LayerWeight:
    """Packs the weight for a layer. Raises ValueError as `quantized_tensor.check` does."""
    check(weight)
    qweight, scales, zeros, mins, bits, group_size, order, super_blocks = weight
    n, k = qweight.shape
    if qweight.numel() and on_gpu.is_for(qweight.device):
        return _pack_rows(weight)
    size = _kernel_group_size(k, group_size) if qweight.numel() else 0
    if not size:
        sizes = Sizes(n, k, bits, group_size, 0, "plain", False)
        return LayerWeight(qweight.contiguous(), scales, zeros, mins, order, sizes)
    if super_blocks is not None and size == group_size and order is None:
        panels = grouped.pack_super_blocks(qweight, super_blocks, bits=bits, group_size=size)
    else:
        factors = [None if part is None else _repeated(part, k, size) for part in (scales, zeros, mins)]
        assert factors[0] is not None
        panels = grouped.pack(qweight, factors[0], *factors[1:], bits=bits, group_size=size, order=order)
    takes_floats = grouped.keeps_floats(panels)
    return LayerWeight(*panels[:5], Sizes(n, k, bits, group_size, size, "panels", takes_floats))


def _pack_rows(weight: QuantizedTensor) -> LayerWeight:
    bits = min(each for each in _ROW_BITS if each >= weight.bits)
    if bits != weight.bits and weight.zeros is None and weight.mins is None:  # their zero point changes
        zero = 2 ** (weight.bits - 1)
        weight = weight._replace(zeros=torch.full_like(weight.scales, zero, dtype=torch.uint8))
    packed = on_gpu.pack(*weight[:4], bits=bits, group_size=weight.group_size, order=weight.order)
    n, k = weight.qweight.shape
    return LayerWeight(*packed[:5], Sizes(n, k, bits, weight.group_size, weight.group_size, "rows", True))


def moved(packed: LayerWeight) -> LayerWeight:
    """Repacks the weight for the device that its tensors are on."""
    is_on_gpu = on_gpu.is_for(packed.qweight.device)
    return packed if is_on_gpu == (packed.sizes.layout == "rows") else pack(unpack(packed))


def _kernel_group_size(k: int, group_size: int) -> int:
    """Returns the kernel's group size. A single group may be divided anywhere: the last part may be smaller."""
    if group_size == k:
        return next((size for size in _SIZES if size <= k), _SIZES[-1])
    return next((size for size in _SIZES if group_size % size == 0), 0)


def _repeated(part: Tensor, k: int, size: int) -> Tensor:
    """Repeats [N, groups] for groups of a smaller size."""
    groups = -(-k // size)
    return part.repeat_interleave(-(-groups // part.shape[1]), dim=1)[:, :groups]


def unpack(packed: LayerWeight) -> QuantizedTensor:
    """Inverts `pack`. Scales may have another type that represents them; super-blocks are multiplied out."""
    return _grouped(packed, slice(None), packed.order)


def rows(packed: LayerWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of the weight in floating point, [len(which), K], in the layer's order of in_features.

    Raises IndexError for a row that does not exist. On a GPU, which is not synchronized, the row is NaN instead.
    """
    if packed.sizes.layout == "rows":
        return on_gpu.rows(_for_kernel(packed), which, dtype)
    is_served = dtype in _TYPES and which.device.type == "cpu" and grouped.is_available()
    if packed.sizes.layout == "panels" and is_served:
        return grouped.rows(_for_kernel(packed), which, dtype)
    if not ((which >= 0) & (which < packed.sizes.n)).all():
        raise IndexError(f"no such row: the weight has {packed.sizes.n}")
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def linear(x: Tensor, packed: LayerWeight, bias: Tensor | None, activations: str | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`: x [..., K], any floating dtype; the bias [N].

    Gradients of x and the bias are computed from the weight, dequantised piece by piece; no floating copy is kept for
    them. If gradients are needed, activations stay floats. Otherwise "int8" quantises them on a CPU, and None follows
    `Settings.activations`.
    """
    if x.dtype in _TYPES and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return _plain(x, packed, bias)  # a transform of `torch.func` has rules for torch's operators alone
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Linear.apply(x, bias, packed)
    product = _kernel(x, packed, activations or settings.current().activations)
    return _plain(x, packed, bias) if product is None else product(x, bias)


class _Linear(torch.autograd.Function):
    """`linear` with gradients, without keeping a floating weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: LayerWeight) -> Tensor:
        ctx.packed, ctx.has_bias = packed, bias is not None
        return linear(x, packed, bias, "float")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (of_result,) = gradients
        packed = ctx.packed
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_x = of_result.new_zeros(*of_result.shape[:-1], packed.sizes.k)
            for start, some in _pieces(packed, of_result.dtype):
                of_x += of_result[..., start : start + len(some)] @ some
            of_x = of_x if packed.order is None else of_x.index_select(-1, torch.argsort(packed.order))
        has_gradient = ctx.has_bias and ctx.needs_input_grad[1]
        of_bias = of_result.reshape(-1, packed.sizes.n).sum(0) if has_gradient else None
        return of_x, of_bias, None


def _kernel(x: Tensor, packed: LayerWeight, activations: str) -> Any:
    """Returns a function that multiplies x with the weight and adds a bias; None if no kernel serves them."""
    if not patching.is_active() or x.device != packed.qweight.device or x.dtype not in _TYPES:
        return None
    if packed.sizes.layout == "rows":
        return lambda x, bias: on_gpu.grouped_linear(x, _for_kernel(packed), bias)
    is_rounded = activations == "int8" and grouped.unavailable() is None
    is_served = packed.sizes.layout == "panels" and (is_rounded or packed.sizes.takes_floats)
    if not is_served or x.device.type != "cpu" or not grouped.is_available():
        return None
    return lambda x, bias: grouped.grouped_linear(x, _for_kernel(packed), bias, floats=not is_rounded)


def _plain(x: Tensor, packed: LayerWeight, bias: Tensor | None) -> Tensor:
    """Torch's linear op with the dequantised weight, a part at a time."""
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    parts = []
    for start, some in _pieces(packed, x.dtype):
        parts.append(F.linear(x, some, None if bias is None else bias[start : start + len(some)]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _pieces(packed: LayerWeight, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields some rows of the weight at a time, with the index of the first, and columns in the order of `qweight`."""
    count = max(1, _CHUNK // max(1, packed.sizes.k))
    for start in range(0, max(1, packed.sizes.n), count):
        yield start, values(_grouped(packed, slice(start, start + count), None), dtype)


def _for_kernel(packed: LayerWeight) -> grouped.PackedWeight:
    n, k, bits, _, size, layout, _ = packed.sizes
    return grouped.PackedWeight(*packed[:5], n, k, bits, size, in_rows=layout == "rows")


def _grouped(packed: LayerWeight, which: slice | Tensor, order: Tensor | None) -> QuantizedTensor:
    """Returns some rows of the weight, with the given order of their columns, or in the order of `qweight`."""
    _, k, bits, group_size, size, layout, _ = packed.sizes
    if layout == "rows":
        qweight, parts = on_gpu.unpacked(_for_kernel(packed), which)
    elif layout == "panels":
        qweight, parts = grouped.unpacked(_for_kernel(packed), which)
        each = group_size // size if group_size < k else parts[0].shape[1] if parts[0] is not None else 1
        parts = [part if part is None else part[:, ::each] for part in parts]
    else:
        qweight = packed.qweight[which]
        parts = [part if part is None else part[which] for part in (packed.scales, packed.zeros, packed.mins)]
    scales, zeros, mins = parts
    assert scales is not None
    return QuantizedTensor(qweight, scales, zeros, mins, bits, group_size, order)
