"""All ways to put things into groups, against which the cheapest ones that FastGen finds are held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def cuts(items: list[T]) -> Iterator[list[list[T]]]:
    """All ways to cut a list into consecutive groups."""
    for ends in itertools.product((False, True), repeat=max(len(items) - 1, 0)):
        bounds = [0, *(place for place, ends_here in enumerate(ends, 1) if ends_here), len(items)]
        yield [items[start:end] for start, end in itertools.pairwise(bounds)] if items else []


def partitions(items: list[T]) -> Iterator[list[list[T]]]:
    """All ways to put things into groups, whatever their order."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for number, group in enumerate(groups):
            yield [*groups[:number], [first, *group], *groups[number + 1 :]]
