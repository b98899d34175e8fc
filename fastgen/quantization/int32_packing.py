"""Values of 4 or 8 bits packed into int32, the first value in the lowest bits."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":  # the bytes of a word are read in memory's order
    raise ImportError("low-bit weights are read on little-endian processors only")


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The values in words, [rows, words] in int32: uint8, [rows, words * 32 / bits]."""
    # As one row: a tensor of one row may have any stride, and then has no view as another type.
    octets = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), 4 * words.shape[1])
    return octets if bits == 8 else _nibbles(octets)


def packed(values: Tensor, bits: int) -> Tensor:
    """The words, [rows, words] in int32, of values, [rows, columns] in uint8; zeros fill the last word."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    octets = values if bits == 8 else values[:, ::2] | (values[:, 1::2] << 4)
    return octets.reshape(-1).contiguous().view(torch.int32).view(len(octets), octets.shape[1] // 4)


def _nibbles(octets: Tensor) -> Tensor:
    """[rows, bytes] -> [rows, 2 * bytes], the lower nibble of a byte first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
