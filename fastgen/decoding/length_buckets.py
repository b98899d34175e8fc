"""Length buckets: inputs of about the same length run as one batch, with little padding.

Inputs are sorted by length and divided into the buckets that cost least (`fastgen.partition`), each as long as its own
longest input.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fastgen.partition import cheapest

# What a further bucket costs, in positions.
BUCKET_COST = 256
# Buckets are used when they save so large a part of the positions.
MIN_SAVING = 0.1


def lengths(mask: Tensor) -> Tensor:
    """The length of each input, [batch], by a mask [batch, longest] of ones and, behind them, zeros.

    That of the batch where the padding is not all behind the input.
    """
    found, longest = mask.sum(dim=1).long(), mask.shape[1]
    behind = torch.arange(longest) < found.unsqueeze(1)
    return torch.where((mask == behind).all(dim=1), found, longest)


def by_mask(mask: Tensor, in_front: bool = False, cost: int | None = None) -> list[tuple[Tensor, slice]]:
    """The inputs of each bucket, by a mask [batch, longest] of ones and zeros, and the positions that they take.

    None if buckets do not pay. `in_front` tells where the padding is, `cost` what a further bucket costs, in positions.
    """
    longest = mask.shape[1]
    found = by_length(lengths(mask.flip(1) if in_front else mask).tolist(), longest, cost)
    positions = [(rows, slice(longest - length, None) if in_front else slice(length)) for rows, length in found]
    return positions if len(positions) > 1 else []


def by_length(lengths: list[int], longest: int, bucket_cost: int | None = None) -> list[tuple[Tensor, int]]:
    """The inputs of each bucket, by their lengths, and how long it is; none if buckets do not pay."""
    further = BUCKET_COST if bucket_cost is None else bucket_cost
    if min(lengths) < 1 or len(lengths) * longest - sum(lengths) < MIN_SAVING * len(lengths) * longest:
        return []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # Inputs of one length stay together: bounds are where it changes.
    bounds = [i for i in range(len(order) + 1) if i in (0, len(order)) or lengths[order[i]] != lengths[order[i - 1]]]

    def cost(start: int, end: int) -> float:
        return (end - start) * lengths[order[start]] + further

    total, buckets = cheapest(bounds[1:], lambda end: itertools.takewhile(end.__gt__, bounds), cost)
    if total > (1 - MIN_SAVING) * len(lengths) * longest:
        return []
    return [(torch.tensor(sorted(order[start:end])), lengths[order[start]]) for start, end in reversed(buckets)]
