"""What drafts need is made little by little: when, by times that are given, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.optimizer.transformers.captured.pays import SHARE, Budget
from fastgen.optimizer.transformers.speculation import drafts

PLAIN, RECORDING, COPYING = 0.02, 0.5, 1.2


class Made:
    """What calls have made of a step and a draft, on a clock of its own."""

    lengths = (0, 2, 4, 8)

    def __init__(self) -> None:
        self.now = 0.0
        self.parts: list[int] = []
        self.begun = 0
        self.left = COPYING

    @property
    def costs(self) -> Made:
        return self

    def seconds(self, part: int) -> float | None:
        return 0.01 if part in self.parts else None

    def measure(self, part: int, run: Any) -> None:
        run()
        self.now += RECORDING
        self.parts.append(part)

    def verify(self, model: Any, drafted: int) -> None:
        self.last = drafted + 1

    def propose(self, step: Any, model: Any, count: int) -> None:
        assert self.left <= 0, "its weights are not there"
        self.last = 0

    def make(self, seconds: float) -> bool:
        took = min(seconds, self.left)
        self.now, self.left = self.now + took, self.left - took
        return self.left <= 0

    def begin(self) -> None:
        self.begun += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    found = Made()
    monkeypatch.setattr(drafts, "time", SimpleNamespace(perf_counter=lambda: found.now))
    yield found


def calls(made: Any, count: int, steps: int = 64) -> list[bool]:
    """Whether each of some calls of so many steps may draft."""
    budget, found = Budget(), []
    for number in range(1, count + 1):
        budget.steps += steps
        before, parts = made.now, len(made.parts)
        found.append(drafts.make_next(budget, made, None, made, PLAIN, made.begin))
        assert made.now - before <= RECORDING + 1e-9 and len(made.parts) - parts <= 1
        # What the first thing takes is not known beforehand.
        assert made.now <= max(SHARE * number * steps * PLAIN, RECORDING) + 1e-9
    return found


def test_one_thing_in_a_call_and_a_tenth_of_the_time(made: Made) -> None:
    found = calls(made, 100)
    assert made.parts == [5, 0, 1, 9, 3]
    assert made.begun == 5 and made.left == pytest.approx(0)
    # It all takes 3.7 seconds, and what a call needs to draft 2.7: 21 and a bit times 64 steps.
    assert found.index(True) in (21, 22) and all(found[22:])
    assert made.now == pytest.approx(5 * RECORDING + COPYING)


def test_a_long_call_makes_one_thing_too(made: Made) -> None:
    assert calls(made, 8, steps=10_000).index(True) == 5  # two recordings, three times copying, one recording


def test_parts_that_are_there_are_not_made_again(made: Made) -> None:
    made.parts, made.left = [5, 0, 1], 0.0
    assert calls(made, 1) == [True]
    assert made.now == 0.0
