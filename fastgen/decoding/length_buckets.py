"""Length buckets: inputs of similar length run as one batch, with little padding.

Inputs are sorted by length and divided into the buckets of the least total cost (`fastgen.partition`), each as long as
its longest input.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

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
