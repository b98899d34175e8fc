"""Inputs of about the same length, to run together: padding behind them, or in front of them, costs little then.

A batch is as long as its longest input, and a pass computes the padding of the others like everything else. Here the
inputs are sorted by length and cut into groups, each as long as its own longest input. Which groups is worked out by
dynamic programming over the sorted lengths (Fang et al., "TurboTransformers: An Efficient GPU Serving System For
Transformer Models", PPoPP 2021, section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a further pass costs, in positions.
PASS = 256
# Groups are used when they save so large a part of the positions.
MIN_SAVING = 0.1


def by_length(lengths: list[int], longest: int) -> list[tuple[Tensor, int]]:
    """Which inputs run together, and how long they are at the most; none if groups do not pay.

    Args:
        lengths: of each input, without its padding.
        longest: positions of the batch.
    """
    if min(lengths) < 1 or len(lengths) * longest - sum(lengths) < MIN_SAVING * len(lengths) * longest:
        return []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # costs[n]: of the n longest inputs; starts[n]: where the last of their groups starts.
    costs, starts = [0.0], [0]
    for end in range(1, len(order) + 1):
        cost, start = min((costs[i] + (end - i) * lengths[order[i]] + PASS, i) for i in range(end))
        costs.append(cost)
        starts.append(start)
    if costs[-1] > (1 - MIN_SAVING) * len(lengths) * longest:
        return []
    found, end = [], len(order)
    while end:
        start = starts[end]
        found.append((torch.tensor(sorted(order[start:end])), lengths[order[start]]))
        end = start
    return found
