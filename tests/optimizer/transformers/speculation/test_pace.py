"""How many tokens rounds draft, by measured times, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.optimizer.transformers.speculation.pace import Pace
from fastgen.optimizer.transformers.speculation.step import SpeculativeStep

# Seconds of a draft of one token, and of checks, by positions.
TIMES = {0: 0.1, 1: 1.0, 3: 1.1, 5: 1.2, 9: 1.4}


class Step:
    """What is measured of a step of so many rows; its parts take `factor` times as long as `TIMES` says."""

    def __init__(self, rows: int = 1, factor: float = 1.0, parts: tuple[int, ...] = (0, 1, 3, 5, 9)) -> None:
        self.key = SimpleNamespace(rows=rows)
        self.times = {part: factor * TIMES[part] for part in parts}
        self.seconds = self.times.get
        self.host_times: list[float] = []
        self.acceptance = 0.9

    seconds_of_round = SpeculativeStep.seconds_of_round


def rounds(plain: float | None, count: int, tokens: int = 4096) -> list[int]:
    """What the first rounds of a call of so many tokens draft, in which everything is accepted."""
    step: Any = Step()
    pace, found = Pace(step, 1, tokens, has_model=True, plain=plain), []
    for _ in range(count):
        found.append(pace.choose(step, [0], tokens))
        pace.observe(step, [0], found[-1], [found[-1]], [found[-1]])
    return found


@pytest.mark.parametrize("plain", [None, 1.0])
def test_plain_steps_are_measured_now_and_then(plain: float | None) -> None:
    """Where no plain call has said what they take: otherwise nothing comes of it."""
    found = rounds(plain, 200)
    assert all(found[:60])
    assert (0 in found) == (plain is None)


def test_what_plain_calls_take_decides() -> None:
    assert all(rounds(1.0, 20, 64)) and not any(rounds(0.1, 20, 64))
