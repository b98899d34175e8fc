"""How many tokens rounds draft, by measured times, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.optimizer.transformers.speculation.pace import Pace

# Seconds of a draft of one token, and of checks, by positions.
TIMES = {0: 0.1, 1: 1.0, 3: 1.1, 5: 1.2, 9: 1.4}


def rounds(plain: float | None, count: int, tokens: int = 4096) -> list[int]:
    """What the first rounds of a call of so many tokens draft, in which everything is accepted."""
    step: Any = SimpleNamespace(
        key=SimpleNamespace(rows=1), times=TIMES, seconds=TIMES.get, host_times=[], acceptance=0.9
    )
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
