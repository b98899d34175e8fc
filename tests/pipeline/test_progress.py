"""How far a run is, on a terminal and in a log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

import pytest

from fastgen.pipeline import stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (10, ["4 of 10 samples (40%), 1 min 10 s so far, about 3 min 30 s left, 7 tokens/s"]),
        (None, ["4 samples, 1 min 10 s so far, 7 tokens/s"]),
    ],
)
def test_a_log_has_a_line_a_minute(
    total: int | None, expected: list[str], clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = stages.Progress("samples", total, already=2)
    for seconds, count in ((30.0, 1), (70.0, 1), (100.0, 1), (129.0, 1)):
        clock[0] = seconds
        shown.add(count, "7 tokens/s")
    shown.close()
    assert capsys.readouterr().err.splitlines() == expected
    clock[0] = 4000.0
    shown.add(0)
    assert "1 h 6 min so far" in capsys.readouterr().err


def test_quiet_is_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = stages.Progress("samples", 10, quiet=True)
    clock[0] = 1000.0
    shown.add(5)
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_no_standard_error_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    shown = stages.Progress("samples", 10)
    shown.add(5)
    shown.close()


@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo terminals")
@pytest.mark.parametrize(("total", "quiet"), [(10, False), (None, False), (10, True)])
def test_a_terminal_has_a_bar(
    total: int | None, quiet: bool, clock: list[float], monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import pty

    terminal, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with open(end, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        shown = stages.Progress("samples", total, already=2, quiet=quiet)
        for _ in range(4):
            clock[0] += 1.0
            shown.add(2, "7 tokens/s")
            print("mine")
        shown.close()
    said = b""
    with open(terminal, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # all of it was read
        while piece := screen.read(65536):
            said += piece
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert capsys.readouterr().out == 4 * "mine\n"
    assert ("10/10 samples" if total else "10/? samples") in text and "7 tokens/s" in text if not quiet else not text
