"""Linear layers on weights in bfloat16, in plain torch: what the kernels must compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of a tile of weights: its outputs, and the bytes of a line, which holds two inputs of each. A panel is two tiles wide.
_TILE, _LINE = 16, 64
_PANEL = 2 * _TILE


def _lay_out(weight: Tensor) -> Tensor:
    """[outputs, inputs], bfloat16 -> panels."""
    lines = weight.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    lines = F.pad(lines, (0, -lines.shape[1] % _LINE, 0, -lines.shape[0] % _PANEL))
    # [panel, tile, output, line, place, byte] -> [panel, line, tile, place, output, byte]
    tiles = lines.view(-1, 2, _TILE, lines.shape[1] // _LINE, _LINE // 4, 4).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(-1, lines.shape[1], _PANEL)


def _laid_out(panels: Tensor, inputs: int, outputs: int) -> Tensor:
    """What `_lay_out` was given."""
    tiles = panels.view(panels.shape[0], -1, 2, _LINE // 4, _TILE, 4).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(-1, panels.shape[1]).view(torch.bfloat16)[:outputs, :inputs]


def pack_bf16(weight: Tensor) -> Tensor:
    return _lay_out(weight.bfloat16())


def bf16_gemm(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    weight = _laid_out(packed, x.shape[1], outputs)
    return F.linear(x.bfloat16().float(), weight.float(), bias)
