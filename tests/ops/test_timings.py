"""Measurements that other processes disturb are repeated (tests of the file of timings are in test_linear.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastgen.ops import _timings


def _measure(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> tuple[list[int], _timings.Timing]:
    """How often it is measured, and what is found, if threads wait for so many seconds in each measurement."""
    clock, total, measured = 0.0, 0.0, []

    def measure() -> tuple[float, float]:
        nonlocal clock, total
        measured.append(len(measured))
        clock += 1.0
        total += waited[len(measured) - 1]
        return 10.0 - len(measured), 5.0 + len(measured)

    monkeypatch.setattr(_timings.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(_timings, "_waited", lambda: total)
    return measured, _timings._measured(measure)


def test_a_quiet_measurement_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, found = _measure(monkeypatch, [0.05, 1.0])
    assert len(measured) == 1 and found == (9.0, 6.0)


def test_it_is_measured_again_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, found = _measure(monkeypatch, [1.0, 0.06, 0.0, 1.0])
    assert len(measured) == 3 and found == (7.0, 6.0)  # the shortest of each


def test_on_a_busy_machine_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, found = _measure(monkeypatch, [2.0] * 100)
    assert len(measured) == _timings._ATTEMPTS and found == (10.0 - _timings._ATTEMPTS, 6.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count this")
def test_waiting_for_a_processor_is_counted() -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, end = _timings._waited(), time.perf_counter() + 60
        while _timings._waited() == before and time.perf_counter() < end:
            pass
        assert _timings._waited() > before
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, mine)
