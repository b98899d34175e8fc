"""How many drafted tokens the free rows of a step verify."""

from __future__ import annotations

import pytest

from fastgen.optimizer.transformers.captured.slot import StepSeconds, counts

SIZES = [1, 2, 4, 8, 16]


def measured(**seconds: float) -> StepSeconds:
    made = StepSeconds()
    for rows, taken in seconds.items():
        for _ in range(3):
            made.note(int(rows[1:]), taken)
    return made


def test_likely_tokens_fill_the_rows_that_cost_little() -> None:
    free = measured(_1=1.0, _2=1.0, _4=1.0, _8=1.0, _16=9.0)
    assert counts([(0.9, 15)], 1, 16, free, SIZES) == [7]
    assert counts([(0.9, 2)], 1, 16, free, SIZES) == [2]
    assert counts([(0.9, 15)], 1, 4, free, SIZES) == [3]
    assert counts([(0.9, 15)], 1, 1, free, SIZES) == [0]


def test_nothing_is_verified_where_rows_cost_what_they_bring() -> None:
    dear = measured(_1=1.0, _2=2.0, _4=4.0, _8=8.0, _16=16.0)
    assert counts([(0.99, 15)], 1, 16, dear, SIZES) == [0]
    assert counts([], 1, 16, dear, SIZES) == []


def test_unlikely_tokens_are_not_verified() -> None:
    assert counts([(0.04, 15)], 1, 16, StepSeconds(), SIZES) == [0]
    assert counts([(0.02, 15), (0.9, 15)], 2, 4, measured(_2=1.0, _4=1.0), SIZES) == [0, 2]


def test_drafts_share_the_rows_by_how_likely_they_are() -> None:
    free = measured(_2=1.0, _4=1.0, _8=1.0, _16=1.0)
    assert counts([(0.6, 15), (0.9, 15)], 2, 8, free, SIZES) == [1, 5]


def test_what_was_measured_too_seldom_is_not_believed() -> None:
    seconds = StepSeconds()
    for rows, taken in ((1, 1.0), (2, 0.9), (2, 0.9), (2, 9.0)):
        seconds.note(rows, taken)
    assert seconds.ratio(2, 1) == pytest.approx(1.08)
    seconds.note(1, 1.0)
    assert seconds.ratio(2, 1) == 1.0  # the median counts, and a row more takes no less
