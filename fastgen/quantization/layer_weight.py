"""Low-bit weights of layers, and the choice of the kernel for each.

A weight is packed for its device: in panels on a CPU, in rows on a GPU. Groups that the CPU kernels do not serve are
divided into smaller ones with the same scale. A weight that no kernel serves stays unpacked.

On a CPU, activations stay floats, or are quantised to 8 bits: the same panels serve both. On a GPU they stay floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import patching, settings
from fastgen.ops.linear import choose, on_gpu, weights
from fastgen.ops.linear.weights import Layout, PackedWeight
from fastgen.quantization.checkpoint import QuantizedTensor, check, values

# Elements of a weight that are dequantised at a time, for torch's linear op.
_CHUNK = 2**24
# Group sizes of the kernels: the largest that divides the checkpoint's is used.
_SIZES = (128, 64, 32, 16, 8)
# Bits in rows; other weights get the next larger number.
_ROW_BITS = (4, 8)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# The parts of a packed weight that are tensors, in order: layers keep them as buffers.
PARTS = ("qweight", "scales", "zeros", "mins", "order")


def pack(weight: QuantizedTensor) -> PackedWeight:
    """Packs the weight for a layer. Raises ValueError as `quantized_tensor.check` does."""
    check(weight)
    qweight, scales, zeros, mins, bits, group_size, order, super_blocks = weight
    n, k = qweight.shape
    if qweight.numel() and on_gpu.is_for(qweight.device):
        return _pack_rows(weight)
    size = _kernel_group_size(k, group_size) if qweight.numel() else 0
    if not size:
        parts = qweight.contiguous(), scales, zeros, mins, order
        return PackedWeight(*parts, n, k, bits, group_size, layout=Layout.PLAIN, file_group_size=group_size)
    if super_blocks is not None and size == group_size and order is None:
        packed = weights.pack_super_blocks(qweight, super_blocks, bits=bits, group_size=size)
    else:
        factors = [None if part is None else _repeated(part, k, size) for part in (scales, zeros, mins)]
        assert factors[0] is not None
        packed = weights.pack(qweight, factors[0], *factors[1:], bits=bits, group_size=size, order=order)
    return packed._replace(file_group_size=group_size, takes_floats=weights.keeps_floats(packed))


def _pack_rows(weight: QuantizedTensor) -> PackedWeight:
    bits, size = min(each for each in _ROW_BITS if each >= weight.bits), weight.group_size
    if bits != weight.bits and weight.zeros is None and weight.mins is None:  # their zero point changes
        zero = 2 ** (weight.bits - 1)
        weight = weight._replace(zeros=torch.full_like(weight.scales, zero, dtype=torch.uint8))
    packed = weights.pack(*weight[:4], bits=bits, group_size=size, order=weight.order, layout=Layout.ROWS)
    return packed._replace(file_group_size=size, takes_floats=True)


def moved(packed: PackedWeight) -> PackedWeight:
    """Repacks the weight for the device that its tensors are on."""
    is_on_gpu = on_gpu.is_for(packed.qweight.device)
    return packed if is_on_gpu == (packed.layout is Layout.ROWS) else pack(unpack(packed))


def _kernel_group_size(k: int, group_size: int) -> int:
    """Returns the kernel's group size. A single group may be divided anywhere: the last part may be smaller."""
    if group_size == k:
        return next((size for size in _SIZES if size <= k), _SIZES[-1])
    return next((size for size in _SIZES if group_size % size == 0), 0)


def _repeated(part: Tensor, k: int, size: int) -> Tensor:
    """Repeats [N, groups] for groups of a smaller size."""
    groups = -(-k // size)
    return part.repeat_interleave(-(-groups // part.shape[1]), dim=1)[:, :groups]


def unpack(packed: PackedWeight) -> QuantizedTensor:
    """Inverts `pack`. Scales may have another type that represents them; super-blocks are multiplied out."""
    return _grouped(packed, slice(None), packed.order)


def rows(packed: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of the weight in floating point, [len(which), K], in the layer's order of in_features.

    Raises IndexError for a row that does not exist. On a GPU, which is not synchronized, the row is NaN instead.
    """
    if packed.layout is Layout.ROWS:
        return on_gpu.rows(packed, which, dtype)
    if packed.layout is Layout.PANELS and dtype in _TYPES and which.device.type == "cpu" and choose.is_available():
        return weights.rows(packed, which, dtype)
    if not ((which >= 0) & (which < packed.n)).all():
        raise IndexError(f"no such row: the weight has {packed.n}")
    found = values(_grouped(packed, which, None), dtype)
    return found if packed.order is None else found[:, torch.argsort(packed.order)]


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activations: str | None = None) -> Tensor:
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
    is_rounded = (activations or settings.current().activations) == "int8" and choose.missing("int8") is None
    if _is_served(x, packed, is_rounded):
        return choose.linear(x, packed, bias, floats=not is_rounded)
    return _plain(x, packed, bias)


class _Linear(torch.autograd.Function):
    """`linear` with gradients, without keeping a floating weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: PackedWeight) -> Tensor:
        ctx.packed, ctx.has_bias = packed, bias is not None
        return linear(x, packed, bias, "float")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (of_result,) = gradients
        packed = ctx.packed
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_x = of_result.new_zeros(*of_result.shape[:-1], packed.k)
            for start, some in _pieces(packed, of_result.dtype):
                of_x += of_result[..., start : start + len(some)] @ some
            of_x = of_x if packed.order is None else of_x.index_select(-1, torch.argsort(packed.order))
        has_gradient = ctx.has_bias and ctx.needs_input_grad[1]
        of_bias = of_result.reshape(-1, packed.n).sum(0) if has_gradient else None
        return of_x, of_bias, None


def _is_served(x: Tensor, packed: PackedWeight, is_rounded: bool) -> bool:
    """Whether a kernel multiplies x, or x quantised to 8 bits, with the weight."""
    if not patching.is_active() or x.device != packed.qweight.device or x.dtype not in _TYPES:
        return False
    if packed.layout is Layout.ROWS:
        return True
    can_take = packed.layout is Layout.PANELS and (is_rounded or packed.takes_floats)
    return can_take and x.device.type == "cpu" and choose.is_available()


def _plain(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """Torch's linear op with the dequantised weight, a part at a time."""
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    parts = []
    for start, some in _pieces(packed, x.dtype):
        parts.append(F.linear(x, some, None if bias is None else bias[start : start + len(some)]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _pieces(packed: PackedWeight, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields some rows of the weight at a time, with the index of the first, and columns in the order of `qweight`."""
    count = max(1, _CHUNK // max(1, packed.k))
    for start in range(0, max(1, packed.n), count):
        yield start, values(_grouped(packed, slice(start, start + count), None), dtype)


def _grouped(packed: PackedWeight, which: slice | Tensor, order: Tensor | None) -> QuantizedTensor:
    """Returns some rows of the weight, with the given order of their columns, or in the order of `qweight`."""
    qweight, (first, *others) = weights.unpacked(packed, which)
    assert first is not None
    size = packed.file_group_size
    # How many groups of the kernel are one of the file.
    each = size // packed.group_size if size < packed.k else max(first.shape[1], 1)
    scales, zeros, mins = (None if part is None else part[:, ::each] for part in (first, *others))
    assert scales is not None
    return QuantizedTensor(qweight, scales, zeros, mins, packed.bits, size, order)
