"""RMS norm of rows of any width. The mean of the squares is float32 in all types."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import triton as package

# Numbers of a row that a program holds in registers: 32 for each of the 512 threads that it has then.
_LARGEST_BLOCK = 16384


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, rounds_scaled: bool = False
) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * (weight + offset)` over the last dimension.

    Args:
        x, weight: [..., width] and [width], of any floating types; the result is like x.
        offset: what is added to the weight: 1 for models (Gemma) that store its difference from one.
        rounds_scaled: the row is rounded to the type of `x` before it is multiplied by the weight, too (T5, Llama).

    Raises:
        ValueError: the weight has another width.
    """
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"rms_norm: a weight of {tuple(weight.shape)} for a width of {width}")
    if x.dtype not in package.KERNEL_TYPES or not package.available(x, weight):
        return reference(x, weight, eps, offset=offset, rounds_scaled=rounds_scaled)
    from fastgen.ops.triton import _kernels as kernels

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.reshape(x.numel() // max(width, 1), width)
    if width > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(package.power_of_two(width), _LARGEST_BLOCK)
    package.launch(
        kernels.rms_norm,
        (rows.shape[0],),
        (rows, weight.contiguous(), out, rows.stride(0), width, float(eps), float(offset)),
        BLOCK=block,
        BLOCKS=-(-width // block),
        ROUND_SCALED=rounds_scaled and x.dtype != torch.float32,
        # A step has few rows, so a row is the work of many threads: 16 numbers each, and 512 threads at most.
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def reference(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_scaled: bool = False) -> Tensor:
    """The operator in plain torch, for any device and type."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if rounds_scaled:
        value = value.to(x.dtype).to(value.dtype)
    return (value * (weight.to(value.dtype) + offset)).to(x.dtype)
