"""The states of what is captured: as it is, captured, replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.graph import CapturedPart, Piece
from tests.recorded_graph import RecordedGraph

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "new", lambda device, growing=None: RecordedGraph())


class Counts:
    def __init__(self) -> None:
        self.number, self.calls = torch.zeros((), dtype=torch.int64), 0
        self.seen: list[tuple[int, str]] = []

    def pieces(self) -> list[Piece]:
        return [(self._add, self._look), (self._add, None)]

    def _add(self) -> None:
        self.calls += 1
        self.number.add_(1)

    def _look(self, given: str) -> None:
        self.seen.append((int(self.number), given))


def test_a_part_is_run_captured_and_replayed() -> None:
    counts, part = Counts(), CapturedPart(CPU)
    part.run(counts.pieces(), "run")
    assert not part.is_captured and counts.calls == 2
    part.capture(counts.pieces(), "captured")
    assert part.is_captured and counts.calls == 4
    part.replay("replayed")
    assert counts.calls == 4 and int(counts.number) == 6  # a capture executes nothing; what was captured is run then
    assert counts.seen == [(1, "run"), (3, "captured"), (5, "replayed")]
    part.drop()
    assert not part.is_captured


def test_it_is_warm_after_some_runs() -> None:
    counts, part = Counts(), CapturedPart(CPU, warm_ups=2)
    for _ in range(2):
        assert not part.is_warm
        part.run(counts.pieces(), "")
    assert part.is_warm


@pytest.mark.parametrize("moment", ["capture", "replay"])
def test_what_fails_is_not_captured(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    counts, part = Counts(), CapturedPart(CPU)
    with monkeypatch.context() as patched:
        patched.setattr(RecordedGraph, moment, fail)
        with pytest.raises(RuntimeError, match="planted"):
            part.capture(counts.pieces(), "")
    assert not part.is_captured
    part.capture(counts.pieces(), "")
    assert part.is_captured


def test_what_there_was_no_memory_for_is_asked_for_again_by_and_by() -> None:
    part = CapturedPart(CPU)
    part.declined.add(3)
    asked = []
    for step in range(120):
        assert part.is_declined(3) and not part.is_declined(5)
        if not part.is_declined(4):
            asked.append(step)
            part.decline_for_now(4)
    assert asked == [0, 33, 98]
