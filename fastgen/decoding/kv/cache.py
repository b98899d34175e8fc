"""What is stored of K and V of one layer: a prefix once per input, and a suffix per row in memory allocated ahead."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class KVCache:
    """K and V of one attention layer. Subclasses say how positions are added, and where their number is.

    Attributes:
        prefix: K and V, [batch, heads, N, dim] each; values may have another dim. None while there is none.
        suffix: K and V, [rows, heads, capacity, dim] each; None while there is none, as for cross-attention.
    """

    prefix: Pair | None = None
    suffix: Pair | None = None

    def _allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def _replaced(self, old: Tensor, new: Tensor) -> Tensor:
        """What is held where `old` was, and has the memory of `new`."""
        return new

    def _allocated(self, pair: Pair, capacity: int) -> Pair:
        keys, values = (self._allocate((*old.shape[:2], capacity, old.shape[3]), old) for old in pair)
        return keys, values

    def _exchanged(self, pair: Pair, longer: Pair, source: slice, target: slice) -> Pair:
        """The longer pair in the place of the other one, whose positions `source` it has at `target`."""
        for old, new in zip(pair, longer, strict=True):
            new[:, :, target] = old[:, :, source]
        keys, values = (self._replaced(old, new) for old, new in zip(pair, longer, strict=True))
        return keys, values


def are_latents(keys: Tensor, values: Tensor) -> bool:
    """Whether they may be latents and what is rotated, of multi-head latent attention: of one head, and two sizes.

    On a GPU they stay apart: the kernel has whole heads in shared memory, and latents are long.
    """
    return keys.is_cpu and keys.shape[1] == 1 and keys.shape[3] != values.shape[3]


def joined(keys: Tensor, values: Tensor) -> Pair:
    """The same as one tensor, in the place of K; that of V is empty."""
    return torch.cat([keys, values], dim=-1), values[..., :0]
