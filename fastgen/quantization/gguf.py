"""Blocks of GGUF (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c): Q4_0, Q4_1, Q8_0 and Q4_K.

A row of a weight is a row of blocks, each with its own scale. Q4_0: a scale d in float16 and 32 numbers of 4 bits,
which stand for d * (number - 8); the first 16 are the lower halves of the bytes. Q4_1: d, m and numbers for
d * number + m. Q8_0: d and 32 signed bytes. Q4_K: 8 groups of 32 numbers with scales and minimums of 6 bits, which are
multiples of two numbers in float16. These products need 17 bits; on a CPU the multiples are kept instead, a byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.grouped_linear import Multiples
from fastgen.quantization.checkpoint import ADVICE, expect
from fastgen.quantization.grouped import GroupedWeight


class _Parts(NamedTuple):
    """What blocks hold, [blocks, ...]: see `GroupedWeight`."""

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    multiples: Multiples | None = None


def _half(blocks: Tensor, start: int) -> Tensor:
    """The number in float16 at this byte of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _lower_then_upper(packed: Tensor) -> Tensor:
    """All lower halves of the bytes, then all upper ones, along the last dimension."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_lower_then_upper(blocks[:, 2:]), _half(blocks, 0), None)


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_lower_then_upper(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, _half(blocks, 0), None)  # a signed byte plus 128


def _q4_k(blocks: Tensor) -> _Parts:
    six = blocks[:, 4:16]
    low, high = six[:, :4], six[:, 4:8]
    rest = six[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=1)
    minimums = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=1)
    # 32 bytes hold two groups.
    numbers = _lower_then_upper(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    multiples = Multiples(scales, minimums, _half(blocks, 0), -_half(blocks, 2))
    found = multiples.scale_units.float() * scales, multiples.minimum_units.float() * minimums
    return _Parts(numbers, *found, multiples)


class BlockType(NamedTuple):
    """How a type of GGUF stores weights.

    Attributes:
        numbers: of a block.
        size: of a block, in bytes.
        group_size: numbers that share a scale.
    """

    name: str
    bits: int
    numbers: int
    size: int
    group_size: int
    parts: Callable[[Tensor], _Parts]

    def row_bytes(self, inputs: int) -> int:
        """Bytes of so many numbers. Raises ValueError where they are no whole blocks."""
        if inputs % self.numbers:
            raise ValueError(f"{inputs} inputs are no whole blocks of {self.numbers}: {ADVICE}")
        return inputs // self.numbers * self.size


# By the numbers that GGUF files have for them (ggml.h).
BLOCK_TYPES = {
    2: BlockType("Q4_0", 4, 32, 18, 32, _q4_0),
    3: BlockType("Q4_1", 4, 32, 20, 32, _q4_1),
    8: BlockType("Q8_0", 8, 32, 34, 32, _q8_0),
    12: BlockType("Q4_K", 4, 256, 144, 32, _q4_k),
}


@dataclass(frozen=True)
class Blocks:
    """Blocks of one type: the tensor `blocks`, uint8 [outputs, bytes of a row]."""

    type: BlockType
    writable = False

    @property
    def name(self) -> str:
        return f"gguf {self.type.name}"

    def resolved(self, tensors: Mapping[str, Tensor]) -> Blocks:
        return self

    def read(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        shape = outputs, self.type.row_bytes(inputs)
        blocks = expect("blocks", tensors.get("blocks"), shape, (torch.uint8,)).reshape(-1, self.type.size)
        numbers, scales, minimums, multiples = self.type.parts(blocks)
        return GroupedWeight(
            numbers.reshape(outputs, inputs),
            scales.reshape(outputs, -1),
            None,
            None if minimums is None else minimums.reshape(outputs, -1),
            self.type.bits,
            self.type.group_size,
            None,
            None if multiples is None else Multiples(*(each.reshape(outputs, -1) for each in multiples)),
        )

    def write(self, weight: GroupedWeight) -> dict[str, Tensor]:
        raise ValueError("GGUF blocks are not written")
