"""What the tests of runs in slots have in common: continuous batches, in place of static ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.engine import continuous


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Interrupts a run in a call of the engine, after so many."""
    count, original = 0, continuous.call

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(continuous, "call", interrupted)


def assert_same(new: Path, static: Path) -> None:
    """Files hold the same, but for the last digits of scores."""
    if new.suffix == ".txt":
        assert new.read_bytes() == static.read_bytes()
        return
    rows, expected = ([json.loads(line) for line in path.read_text().splitlines()] for path in (new, static))
    scores = [[row.pop("scores") for row in each] for each in (rows, expected)]
    assert rows == expected and scores[0] == [pytest.approx(each, abs=1e-4) for each in scores[1]]
