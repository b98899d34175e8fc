"""Layer norm and RMS norm of rows of any width, with the residual added before.

What is normalised is `x + residual`, rounded to the type of `x`, as it is where the two are done one after the other:
the sum is the residual of the next layer. Sums and distances are float32 in all types.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import triton as package

# Numbers of a row that a program holds in registers: 32 for each of the 512 threads that it has then.
_LARGEST_BLOCK = 16384


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    summed: Tensor | None = None,
) -> Tensor:
    """`layer_norm(x + residual)` over the last dimension.

    Args:
        x: [..., width], any width; rows contiguous.
        weight, bias: [width], of any floating type.
        residual: like `x`.
        out: like `x`: where to put the result; `x` itself is allowed.
        summed: like `x`: gets `x + residual`; `x` and `residual` are allowed.

    Returns:
        Like `x`.

    Raises:
        ValueError: shapes do not fit.
    """
    return _norm(x, weight, bias, eps, residual, out, summed, rms=False, offset=0.0, rounds_scaled=False)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    rounds_scaled: bool = False,
    out: Tensor | None = None,
    summed: Tensor | None = None,
) -> Tensor:
    """`rms_norm(x + residual) * (weight + offset)` over the last dimension; arguments as of `layer_norm`.

    Args:
        offset: what is added to the weight: 1 for models (Gemma) that store its difference from one.
        rounds_scaled: whether the row is rounded to the type of `x` before it is multiplied by the weight, as in T5 and
            Llama, and not only after.
    """
    return _norm(x, weight, None, eps, residual, out, summed, rms=True, offset=offset, rounds_scaled=rounds_scaled)


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    rms: bool,
    offset: float = 0.0,
    rounds_scaled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both operators in plain torch, for any device and type; returns the result and `x + residual`."""
    summed = x if residual is None else x + residual
    value = summed.to(torch.promote_types(x.dtype, torch.float32))
    if not rms:
        value = value - value.mean(-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if rounds_scaled:
        value = value.to(x.dtype).to(value.dtype)
    if weight is not None:
        value = value * (weight.to(value.dtype) + offset)
    if bias is not None:
        value = value + bias.to(value.dtype)
    return value.to(x.dtype), summed


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    summed: Tensor | None,
    *,
    rms: bool,
    offset: float,
    rounds_scaled: bool,
) -> Tensor:
    width = x.shape[-1]
    for other in (residual, out, summed):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(f"norm: {tuple(other.shape)} {other.dtype} beside {tuple(x.shape)} {x.dtype}")
    for vector in (weight, bias):
        if vector is not None and vector.shape != (width,):
            raise ValueError(f"norm: a weight or bias of {tuple(vector.shape)} for a width of {width}")
    given = (x, weight, bias, residual, out, summed)
    rows_of = [None if tensor is None else _rows(tensor) for tensor in (x, residual, out, summed)]
    scattered = any(
        rows is None and tensor is not None for rows, tensor in zip(rows_of, (x, residual, out, summed), strict=True)
    )
    scattered |= any(vector is not None and width > 1 and vector.stride(0) != 1 for vector in (weight, bias))
    if scattered or x.dtype not in package.KERNEL_TYPES or not package.available(*given):
        result, total = reference(x, weight, bias, eps, residual, rms=rms, offset=offset, rounds_scaled=rounds_scaled)
        if summed is not None:
            summed.copy_(total)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows_of[2] = _rows(out)
    from fastgen.ops.triton import _norm as kernels

    block = min(package.power_of_two(width), _LARGEST_BLOCK)
    x_rows, residual_rows, out_rows, summed_rows = rows_of
    package.launch(
        kernels.norm,
        (x.numel() // max(width, 1),),
        (
            x, residual, weight, bias, out, summed, _stride(x_rows), _stride(residual_rows), _stride(out_rows),
            _stride(summed_rows), width, float(eps), float(offset),
        ),
        BLOCK=block,
        BLOCKS=-(-width // block),
        RMS=rms,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        STORE_SUM=summed is not None,
        ROUND_FIRST=x.dtype != torch.float32,
        ROUND_SCALED=rounds_scaled and x.dtype != torch.float32,
        # A step has few rows, so a row is the work of many threads: 16 numbers each, and 512 threads at most.
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor | None:
    """[..., width] as [rows, width] without a copy, or None."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(-1, x.shape[-1])
    except RuntimeError:
        return None


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)
