"""Runs a padded batch with little or no padding, in length buckets or packed.

**Length buckets.** Inputs are sorted by length and divided into the buckets of the least total cost
(`fastgen.partition`), each as long as its longest input. A bucket runs as one batch.

**Packed (varlen) sequences.** The sequences lie one after the other in one row. Everything that a Transformer's encoder
computes per token then runs on the tokens alone. Only attention has to know where a sequence ends (Zeng et al.,
"Boosting Distributed Training Performance of the Unpadded BERT Model", 2022; Krell et al., "Efficient Sequence Packing
without Cross-contamination", 2021, arXiv 2107.02027).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import packed_attention
from fastgen.partition import cheapest

# Cost of an additional bucket, in positions.
BUCKET_COST = 256
# Buckets are used if they save at least this part of the positions.
MIN_SAVING = 0.1


def lengths(mask: Tensor) -> Tensor:
    """Returns the length of each input, [batch], from a mask [batch, longest] of ones followed by zeros.

    An input whose padding is not all at the end gets the length of the batch.
    """
    found, longest = mask.sum(dim=1).long(), mask.shape[1]
    behind = torch.arange(longest) < found.unsqueeze(1)
    return torch.where((mask == behind).all(dim=1), found, longest)


def by_mask(mask: Tensor, in_front: bool = False, cost: int | None = None) -> list[tuple[Tensor, slice]]:
    """Returns the inputs of each bucket, and the positions that they take, from a mask [batch, longest] of 1 and 0.

    Empty if buckets do not pay. `in_front` says that padding precedes inputs. `cost` is that of an additional bucket,
    in positions.
    """
    longest = mask.shape[1]
    found = by_length(lengths(mask.flip(1) if in_front else mask).tolist(), longest, cost)
    positions = [(rows, slice(longest - length, None) if in_front else slice(length)) for rows, length in found]
    return positions if len(positions) > 1 else []


def by_length(lengths: list[int], longest: int, bucket_cost: int | None = None) -> list[tuple[Tensor, int]]:
    """Returns the inputs of each bucket, and its length, from the inputs' lengths. Empty if buckets do not pay."""
    further = BUCKET_COST if bucket_cost is None else bucket_cost
    if min(lengths) < 1 or len(lengths) * longest - sum(lengths) < MIN_SAVING * len(lengths) * longest:
        return []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # Inputs of equal length stay together: buckets may begin where the length changes.
    bounds = [i for i in range(len(order) + 1) if i in (0, len(order)) or lengths[order[i]] != lengths[order[i - 1]]]

    def cost(start: int, end: int) -> float:
        return (end - start) * lengths[order[start]] + further

    total, buckets = cheapest(bounds[1:], lambda end: itertools.takewhile(end.__gt__, bounds), cost)
    if total > (1 - MIN_SAVING) * len(lengths) * longest:
        return []
    return [(torch.tensor(sorted(order[start:end])), lengths[order[start]]) for start, end in reversed(buckets)]


class Packing:
    """The places of a batch's tokens in the packed row.

    Sequences of equal length are adjacent, so that attention can process them as a batch through a view.

    Attributes:
        mask: [batch, longest], bool: True for tokens, False for padding.
        lengths: length of each sequence.
        total: number of tokens of all sequences.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.lengths: list[int] = mask.sum(dim=1).tolist()
        self.total = sum(self.lengths)
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        rows, columns = mask[order].nonzero(as_tuple=True)
        self._indices = torch.tensor(order)[rows] * mask.shape[1] + columns
        # For each run of sequences of equal length: their number, and the length.
        runs = itertools.groupby(self.lengths[row] for row in order)
        self._runs = [(len(list(same)), length) for length, same in runs]
        self._in_row = torch.tensor([self.lengths[row] for row in order])

    def pack(self, x: Tensor) -> Tensor:
        """[batch, longest, ...] -> [1, total, ...]."""
        return x.flatten(0, 1).index_select(0, self._indices).unsqueeze(0)

    def unpack(self, packed: Tensor, fill: float) -> Tensor:
        """[1, total, ...] -> [batch, longest, ...], with `fill` in the padding."""
        result = packed.new_full((self.mask.numel(), *packed.shape[2:]), fill)
        result.index_copy_(0, self._indices, packed[0])
        return result.view(*self.mask.shape, *packed.shape[2:])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Computes attention within each sequence.

        Args:
            query, keys, values: [1, heads, total, dim], any floating dtype; a head of keys may serve several of query.

        Returns:
            [1, total, heads, dim of the values].
        """
        if packed_attention.serves(query, keys, values):
            return packed_attention.packed_attention(query[0], keys[0], values[0], self._in_row, scale).unsqueeze(0)
        has_groups = query.shape[1] != keys.shape[1]
        result = values.new_empty(1, self.total, query.shape[1], values.shape[3])
        begin = 0
        for batch, length in self._runs:
            q, k, v = (_batch_of(x, begin, batch, length) for x in (query, keys, values))
            context = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=has_groups)
            result[0, begin : begin + batch * length].view(batch, length, *result.shape[2:]).copy_(
                context.transpose(1, 2)
            )
            begin += batch * length
        return result


def attend_equal(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor | None:
    """Computes attention within each sequence of a batch of equal lengths, if FastGen's operator serves.

    Args:
        query, keys, values: [batch, heads, length, dim]; a head of keys may serve several of query.

    Returns:
        [batch, length, heads, dim of the values]; None if torch's attention has to run.
    """
    is_batch = query.dim() == keys.dim() == values.dim() == 4 and len(query) == len(keys) == len(values)
    if not is_batch or not query.numel() or not packed_attention.serves(query, keys, values):
        return None
    batch, _, length, _ = query.shape
    q, k, v = (packed_attention.as_row(x) for x in (query, keys, values))
    if q is None or k is None or v is None:
        return None
    lengths = torch.full((batch,), length, dtype=torch.int64, device="cpu")
    return packed_attention.packed_attention(q, k, v, lengths, scale).unflatten(0, (batch, length))


def _batch_of(x: Tensor, begin: int, batch: int, length: int) -> Tensor:
    """Returns a view, [1, heads, total, dim] -> [batch, heads, length, dim]."""
    part = x[0, :, begin : begin + batch * length]
    return part.unflatten(1, (batch, length)).transpose(0, 1)
