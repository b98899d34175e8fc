from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastgen import partition
from tests.partitions import cuts


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9), most=st.integers(1, 5), further=st.integers(0, 90))
def test_no_cut_costs_less(lengths: list[int], most: int, further: int) -> None:
    def cost(start: int, end: int) -> float:
        return (end - start) ** 0.5 * max(lengths[start:end]) + further

    total, groups = partition.cheapest(range(1, len(lengths) + 1), lambda end: range(max(0, end - most), end), cost)
    every = [[(cut[0], cut[-1] + 1) for cut in found] for found in cuts(list(range(len(lengths))))]
    allowed = [found for found in every if all(end - start <= most for start, end in found)]
    costs = [sum(cost(*group) for group in found) for found in allowed]
    assert abs(total - min(costs)) < 1e-6
    assert abs(sum(cost(*group) for group in groups) - total) < 1e-6
    assert groups in allowed


def test_the_first_of_equal_starts_counts() -> None:
    ends = range(1, 4)
    assert partition.cheapest(ends, range, lambda start, end: 1)[1] == [(0, 3)]
    assert partition.cheapest(ends, lambda end: range(end - 1, -1, -1), lambda start, end: end - start)[1] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


def test_nothing_is_cut_into_nothing() -> None:
    assert partition.cheapest([], range, lambda start, end: 1) == (0, [])
