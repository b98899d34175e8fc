"""Partitions a sequence into the groups of the least total cost, by dynamic programming over the ends of groups.

For inputs sorted by length, this is Algorithm 2 of Fang et al., "TurboTransformers: An Efficient GPU Serving System For
Transformer Models", PPoPP 2021, section 5: inputs of similar length run together, because that needs little padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter


def cheapest(
    ends: Iterable[int], starts: Callable[[int], Iterable[int]], cost: Callable[[int, int], float]
) -> tuple[float, list[tuple[int, int]]]:
    """Returns the least total cost, and its groups: pairs (start, end), in order, where end is exclusive.

    Args:
        ends: where a group may end, in rising order; the last is the end of the sequence.
        starts: where a group with a given end may start: 0 or one of `ends`. Of equally good starts, the first is
            taken.
        cost: the cost of a group from start to end.
    """
    best: dict[int, tuple[float, int]] = {0: (0, 0)}
    end = 0
    for end in ends:
        found = ((best[start][0] + cost(start, end), start) for start in starts(end))
        best[end] = min(found, key=itemgetter(0))
    total, groups = best[end][0], []
    while end:
        start = best[end][1]
        groups.append((start, end))
        end = start
    return total, groups[::-1]
