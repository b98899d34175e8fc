"""Numbers of 4 or 8 bits packed into words of 32 bits, the first number in the lowest bits."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":  # the bytes of a word are read in memory's order
    raise ImportError("weights of few bits are read on little-endian processors only")


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers in words, [rows, words] in int32: uint8, [rows, words * 32 / bits]."""
    # As one row: a tensor of one row may have any stride, and then has no view as another type.
    numbers = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), 4 * words.shape[1])
    return numbers if bits == 8 else halves(numbers)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """The words, [rows, words] in int32, of numbers, [rows, numbers] in uint8; zeros fill the last word."""
    per_word = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word))
    octets = numbers if bits == 8 else joined(numbers)
    return octets.reshape(-1).contiguous().view(torch.int32).view(len(octets), octets.shape[1] // 4)


def halves(numbers: Tensor) -> Tensor:
    """The two halves of each byte, lower one first: [rows, bytes] becomes [rows, 2 * bytes]."""
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def joined(numbers: Tensor) -> Tensor:
    """The inverse of `halves`, for an even number of columns."""
    return numbers[..., ::2] | (numbers[..., 1::2] << 4)
