from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastgen.decoding import length_buckets


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=8), further=st.integers(0, 50))
def test_groups_are_the_cheapest(lengths: list[int], further: int) -> None:
    longest = max(lengths) + further
    made = length_buckets.by_length(lengths, longest)
    ordered = sorted(lengths, reverse=True)

    def cheapest(end: int) -> int:
        if end == 0:
            return 0
        return min(cheapest(i) + (end - i) * ordered[i] + length_buckets.BUCKET_COST for i in range(end))

    whole = len(lengths) * longest
    best = cheapest(len(ordered))
    if not made:
        assert best > 0.9 * whole or whole - sum(lengths) < 0.1 * whole
        return
    assert sorted(row for rows, _ in made for row in rows.tolist()) == list(range(len(lengths)))
    assert all(max(lengths[row] for row in rows.tolist()) == length for rows, length in made)
    assert sum(rows.shape[0] * length + length_buckets.BUCKET_COST for rows, length in made) == best
