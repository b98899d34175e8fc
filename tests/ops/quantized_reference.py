"""Linear layers on weights of 8 bits and in bfloat16, in plain torch: what the kernels must compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of a tile of weights: its outputs, and the bytes of a line, which holds four bytes of each. A panel is two tiles wide.
_TILE, _LINE = 16, 64
_PANEL = 2 * _TILE


def _lay_out(weight: Tensor) -> Tensor:
    """[outputs, inputs] in a type of one or two bytes -> panels."""
    lines = weight.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    lines = F.pad(lines, (0, -lines.shape[1] % _LINE, 0, -lines.shape[0] % _PANEL))
    # [panel, tile, output, line, place, byte] -> [panel, line, tile, place, output, byte]
    tiles = lines.view(-1, 2, _TILE, lines.shape[1] // _LINE, _LINE // 4, 4).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(-1, lines.shape[1], _PANEL)


def _laid_out(panels: Tensor, inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    """What `_lay_out` was given."""
    tiles = panels.view(panels.shape[0], -1, 2, _LINE // 4, _TILE, 4).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(-1, panels.shape[1]).view(dtype)[:outputs, :inputs]


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = torch.where(weight.isfinite().all(dim=1, keepdim=True), largest / 127, torch.nan)
    quantized = torch.round(weight * torch.where(scales > 0, 127 / largest, 0.0)).to(torch.int8)
    return _lay_out(quantized), scales.squeeze(1), quantized.sum(dim=1, dtype=torch.int32)


def int8_linear(x: Tensor, packed: Tensor, scales: Tensor, totals: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    weight = _laid_out(packed, x.shape[1], outputs, torch.int8)
    low, high = x.amin(dim=1, keepdim=True).clamp(max=0), x.amax(dim=1, keepdim=True).clamp(min=0)
    scale = torch.where(x.isfinite().all(dim=1, keepdim=True), high / 255 - low / 255, torch.nan)
    factor = torch.where(scale > 0, 1 / scale, 0.0)
    zero = torch.round(-low * factor)
    quantized = (torch.round(x * factor) + zero).clamp(0, 255)
    # Exact: no such sum comes near 2**53.
    sums = quantized.double() @ weight.double().t() - zero.double() * totals
    y = (sums * scale * scales).float()
    return y if bias is None else y + bias


def pack_bf16(weight: Tensor) -> Tensor:
    return _lay_out(weight.bfloat16())


def bf16_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    weight = _laid_out(packed, x.shape[1], outputs, torch.bfloat16)
    return F.linear(x.bfloat16().float(), weight.float(), bias)
