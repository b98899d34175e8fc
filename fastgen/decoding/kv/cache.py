"""K and V of one layer: a prefix once per input, and a suffix per row in preallocated memory."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class KVCache:
    """K and V of one attention layer. Subclasses define how positions are added, and where lengths are kept.

    Attributes:
        prefix: K and V, [batch, heads, N, dim] each; values may have another dim. None before it is stored.
        suffix: K and V, [rows, heads, capacity, dim] each; None if there is none, as in cross-attention.
    """

    prefix: Pair | None = None
    suffix: Pair | None = None

    def _allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def _replaced(self, old: Tensor, new: Tensor) -> Tensor:
        """Returns the tensor to hold instead of `old`, with the memory of `new`."""
        return new

    def _allocated(self, pair: Pair, capacity: int) -> Pair:
        keys, values = (self._allocate((*old.shape[:2], capacity, old.shape[3]), old) for old in pair)
        return keys, values

    def _exchanged(self, pair: Pair, longer: Pair, source: slice, target: slice) -> Pair:
        """Replaces a pair by a longer one, which gets the positions `source` at `target`. Returns the pair to hold."""
        for old, new in zip(pair, longer, strict=True):
            new[:, :, target] = old[:, :, source]
        keys, values = (self._replaced(old, new) for old, new in zip(pair, longer, strict=True))
        return keys, values


def are_latents(keys: Tensor, values: Tensor) -> bool:
    """Whether K and V may be the latents and the rotated part of multi-head latent attention: one head, unequal sizes.

    On a GPU they are not joined: the kernel keeps whole heads in shared memory, and latents are long.
    """
    return keys.is_cpu and keys.shape[1] == 1 and keys.shape[3] != values.shape[3]


def joined(keys: Tensor, values: Tensor) -> Pair:
    """Returns K and V joined in one tensor, in place of K; V becomes empty."""
    return torch.cat([keys, values], dim=-1), values[..., :0]
