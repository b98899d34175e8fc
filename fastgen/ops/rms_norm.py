"""RMS norm as one operation (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 4).

On a GPU it is a Triton kernel, on the CPU the one of `elementwise`
(csrc/cpu/elementwise/loops.h), elsewhere plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library, gpu

# Types that the CPU kernel supports.
_CPU_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(like: Tensor) -> bool:
    """Whether there is a kernel for the type and the device of this tensor."""
    if like.device.type == "cpu":
        return like.dtype in _CPU_TYPES and _library.has_kernel("fastgen::rms_norm_out")
    return gpu.available(like) and like.dtype in gpu.KERNEL_TYPES


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, rounds_scaled: bool = False
) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * (weight + offset)` over the last dimension. The mean is float32 for all types.

    Args:
        x, weight: [..., width] and [width], of any floating types; the result is like x.
        offset: added to the weight: 1 for models (Gemma) that store the weight's difference from one.
        rounds_scaled: also round the row to the type of `x` before multiplying by the weight (T5, Llama).

    Raises:
        ValueError: the weight has another width.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: a weight of {tuple(weight.shape)} for a width of {x.shape[-1]}")
    if not available(x) or (x.device.type == "cpu" and weight.dtype is not x.dtype):
        return reference(x, weight, eps, offset, rounds_scaled)
    if x.device.type == "cpu":
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops.fastgen.rms_norm_out(out, x.contiguous(), weight.contiguous(), eps, offset, rounds_scaled)
        return out
    from fastgen.ops.gpu import launches as on_gpu

    return on_gpu.launch_rms_norm(x, weight, eps, offset, rounds_scaled)


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounds_scaled: bool = False) -> Tensor:
    """The operator in plain torch, for any device and type."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if rounds_scaled:
        value = value.to(x.dtype).to(value.dtype)
    return (value * (weight.to(value.dtype) + offset)).to(x.dtype)


_library.define(
    "rms_norm_out(Tensor(a!) out, Tensor x, Tensor weight, float eps, float offset, bool rounds_scaled) -> ()"
)
OPERATOR = torch.ops.fastgen.rms_norm_out.default
