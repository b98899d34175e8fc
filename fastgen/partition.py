"""A row of things cut into the groups that cost least together, by dynamic programming over where a group ends.

With inputs sorted by length this is Algorithm 2 of Fang et al., "TurboTransformers: An Efficient GPU Serving System For
Transformer Models", PPoPP 2021, section 5: inputs of about the same length run together, as padding costs little then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter


def cheapest(
    ends: Iterable[int], starts: Callable[[int], Iterable[int]], cost: Callable[[int, int], float]
) -> tuple[float, list[tuple[int, int]]]:
    """The cuts of least cost, and what they cost together. Groups are (start, end), in order; end is not part of one.

    Args:
        ends: where a group may end, in rising order; the last of them is where the row ends.
        starts: of a group that ends there, where it may start: at 0 or one of `ends`. Of equal ones the first counts.
        cost: of a group from start to end.
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
