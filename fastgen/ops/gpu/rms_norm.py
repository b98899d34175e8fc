"""Launches the kernel of `fastgen.ops.rms_norm` on a GPU, for rows of any width."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import gpu

# Elements of a row that a program holds in registers: 32 for each of its 512 threads.
_LARGEST_BLOCK = 16384


def launch(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, rounds_scaled: bool = False) -> Tensor:
    """Launches the kernel; the arguments are those of `rms_norm`."""
    from fastgen.ops.gpu import _kernels as kernels

    width = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.reshape(x.numel() // max(width, 1), width)
    if width > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(gpu.power_of_two(width), _LARGEST_BLOCK)
    gpu.launch(
        kernels.rms_norm,
        (rows.shape[0],),
        (rows, weight.contiguous(), out, rows.stride(0), width, float(eps), float(offset)),
        BLOCK=block,
        BLOCKS=-(-width // block),
        ROUND_SCALED=rounds_scaled and x.dtype != torch.float32,
        # A step has few rows, so many threads share a row: 16 elements each, and at most 512 threads.
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
