"""Blocks of GGUF (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c).

A row of a weight is a row of blocks. A block of 32 has a scale in float16: Q4_0, Q5_0 and Q8_0 represent scale * (q -
zero); Q4_1 and Q5_1, which also have a min, represent scale * q + min. The K-quants, Q2_K to Q6_K, have super-blocks of
256 in groups of 16 or 32. The scales and mins of their groups are small integers times a float16 of the super-block.
On a CPU they stay separate, a byte each: multiplied, they would need up to 18 bits.

In memory, values have the bits of their type, but at least 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear.grouped import SIGNED_ZERO_POINT, SuperBlockScales
from fastgen.quantization.checkpoint import ADVICE, Format, expect
from fastgen.quantization.quantized_tensor import QuantizedTensor


class _Parts(NamedTuple):
    """The contents of blocks, [blocks, ...]: see `QuantizedTensor`."""

    qweight: Tensor
    scales: Tensor
    mins: Tensor | None = None
    super_blocks: SuperBlockScales | None = None


def _k_quant(qweight: Tensor, super_blocks: SuperBlockScales) -> _Parts:
    return _Parts(qweight, *super_blocks.values(), super_blocks)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 at this byte of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _split(packed: Tensor, bits: int, width: int) -> Tensor:
    """Returns values of `bits` bits: of every `width` bytes, the lowest bits of all, then the next, and so on."""
    each = packed.reshape(len(packed), -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (each >> shifts & 2**bits - 1).flatten(1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Returns the fifth bits of 32 values, from the lowest of the first four bytes on, shifted to bit 4."""
    octets = blocks[:, :4].unsqueeze(2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (octets >> shifts & 1).flatten(1) << 4


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and mins of 8 groups, 6 bits each, from 12 bytes."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=1)
    return scales, torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=1)


def _q4_or_5(blocks: Tensor, has_min: bool, has_fifth_bit: bool) -> _Parts:
    scale, least = _half(blocks, 0), _half(blocks, 2) if has_min else None
    rest = blocks[:, 4 if has_min else 2 :]
    if has_fifth_bit:
        return _Parts(_split(rest[:, 4:], 4, 16) | _fifth_bits(rest), scale, least)
    return _Parts(_split(rest, 4, 16), scale, least)


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, _half(blocks, 0))  # a signed byte plus 128


def _q2_k(blocks: Tensor) -> _Parts:
    factors, qweight = blocks[:, :16], _split(blocks[:, 16:80], 2, 32)
    return _k_quant(qweight, SuperBlockScales(factors & 15, factors >> 4, _half(blocks, 80), -_half(blocks, 82)))


def _q3_k(blocks: Tensor) -> _Parts:
    low, high = _split(blocks[:, 32:96], 2, 32), _split(blocks[:, :32], 1, 32)
    scales = _split(blocks[:, 96:104], 4, 8) | _split(blocks[:, 104:108], 2, 4) << 4  # plus 32
    # Without the high bit, 4 is subtracted: values from -4 to 3, plus the 4-bit zero point.
    qweight = low + 4 + (high << 2)
    return _k_quant(qweight, SuperBlockScales(scales + (SIGNED_ZERO_POINT - 32), None, _half(blocks, 108), None))


def _q4_k(blocks: Tensor) -> _Parts:
    factors = SuperBlockScales(*_sixes(blocks[:, 4:16]), _half(blocks, 0), -_half(blocks, 2))
    return _k_quant(_split(blocks[:, 16:], 4, 32), factors)


def _q5_k(blocks: Tensor) -> _Parts:
    factors = SuperBlockScales(*_sixes(blocks[:, 4:16]), _half(blocks, 0), -_half(blocks, 2))
    return _k_quant(_split(blocks[:, 48:], 4, 32) | _split(blocks[:, 16:48], 1, 32) << 4, factors)


def _q6_k(blocks: Tensor) -> _Parts:
    qweight = _split(blocks[:, :128], 4, 64) | _split(blocks[:, 128:192], 2, 32) << 4  # plus 32
    signed = blocks[:, 192:208] ^ 128  # a signed byte plus 128
    return _k_quant(qweight, SuperBlockScales(signed, None, _half(blocks, 208), None))


class BlockType(NamedTuple):
    """How a GGUF type stores weights.

    Attributes:
        bits: bits of a value, in memory.
        block_size: values of a block.
        block_bytes: bytes of a block.
        group_size: values that share a scale.
    """

    name: str
    bits: int
    block_size: int
    block_bytes: int
    group_size: int
    parts: Callable[[Tensor], _Parts]

    def row_bytes(self, k: int) -> int:
        """Returns the bytes of K values. Raises ValueError if they are not whole blocks."""
        if k % self.block_size:
            raise ValueError(f"{k} in_features are no whole blocks of {self.block_size}: {ADVICE}")
        return k // self.block_size * self.block_bytes


# By their numbers in GGUF files (ggml.h).
BLOCK_TYPES = {
    2: BlockType("Q4_0", 4, 32, 18, 32, partial(_q4_or_5, has_min=False, has_fifth_bit=False)),
    3: BlockType("Q4_1", 4, 32, 20, 32, partial(_q4_or_5, has_min=True, has_fifth_bit=False)),
    6: BlockType("Q5_0", 5, 32, 22, 32, partial(_q4_or_5, has_min=False, has_fifth_bit=True)),
    7: BlockType("Q5_1", 5, 32, 24, 32, partial(_q4_or_5, has_min=True, has_fifth_bit=True)),
    8: BlockType("Q8_0", 8, 32, 34, 32, _q8_0),
    10: BlockType("Q2_K", 4, 256, 84, 16, _q2_k),
    11: BlockType("Q3_K", 4, 256, 110, 16, _q3_k),
    12: BlockType("Q4_K", 4, 256, 144, 32, _q4_k),
    13: BlockType("Q5_K", 5, 256, 176, 32, _q5_k),
    14: BlockType("Q6_K", 6, 256, 210, 16, _q6_k),
}


@dataclass(frozen=True)
class Blocks(Format):
    """Blocks of one type: the tensor `blocks`, uint8 [N, bytes of a row]."""

    writable = False
    type: BlockType

    @property
    def name(self) -> str:  # type: ignore[override]  # that of others is one for the class
        return f"gguf {self.type.name}"

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        shape = n, self.type.row_bytes(k)
        blocks = expect("blocks", tensors.get("blocks"), shape, (torch.uint8,)).reshape(-1, self.type.block_bytes)
        qweight, *factors, super_blocks = self.type.parts(blocks)
        scales, mins = (None if each is None else each.reshape(n, -1) for each in factors)
        assert scales is not None
        if super_blocks is not None:
            parts: list[Any] = [None if each is None else each.reshape(n, -1) for each in super_blocks]
            super_blocks = SuperBlockScales(*parts)
        bits, group_size = self.type.bits, self.type.group_size
        return QuantizedTensor(qweight.reshape(n, k), scales, None, mins, bits, group_size, None, super_blocks)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        raise ValueError("GGUF blocks are not written")
