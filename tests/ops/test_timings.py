"""Measurements that other work disturbs are repeated (tests of the file of timings are in test_linear.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fastgen.ops import _team


def _measure(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> tuple[int, _timings.Timing | None]:
    """How often it is measured, and what is found, if a thread waits for so many seconds in each measurement."""
    clock, total, count = 0.0, 0.0, 0

    def measure() -> tuple[float, float]:
        nonlocal clock, total, count
        clock += 1.0
        total += waited[count]
        count += 1
        return 10.0 - count, 5.0 + count

    monkeypatch.setattr(_timings.time, "perf_counter", lambda: clock)
    # The other thread has waited for long before, and ends while it is measured.
    monkeypatch.setattr(_timings, "_waits", lambda: {"1": total} if count else {"1": total, "2": 100.0})
    monkeypatch.setattr(_timings, "_known", {})
    monkeypatch.setenv("FASTGEN_CACHE", "")
    found = _timings.get("operator", "key", 2, measure)
    assert _timings.get("operator", "key", 2, None) == found
    return count, found


@pytest.fixture(autouse=True)
def enough_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_team, "processors", lambda: 1000)


def test_a_quiet_measurement_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measure(monkeypatch, [0.05, 1.0]) == (1, (9.0, 6.0))


def test_it_is_measured_again_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measure(monkeypatch, [1.0, 0.06, 0.0, 1.0]) == (3, (7.0, 6.0))  # the shortest of each


def test_on_a_busy_machine_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measure(monkeypatch, [2.0] * 100) == (_timings._ATTEMPTS, (10.0 - _timings._ATTEMPTS, 6.0))


def test_threads_that_wait_for_each_other_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_team, "processors", lambda: 0)
    assert _measure(monkeypatch, [2.0] * 100) == (1, (9.0, 6.0))


def test_waiting_for_a_processor_is_counted() -> None:
    if not any(_timings._waits().values()):
        pytest.skip("the system does not count this, or there was no waiting yet")
    mine = os.sched_getaffinity(0)
    busy = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    try:
        os.sched_setaffinity(0, {min(mine)})
        with subprocess.Popen([sys.executable, "-c", busy]) as other:
            before, end = sum(_timings._waits().values()), time.perf_counter() + 50
            while sum(_timings._waits().values()) <= before and time.perf_counter() < end:
                pass
            found = sum(_timings._waits().values())
            other.kill()
        assert found > before
    finally:
        os.sched_setaffinity(0, mine)


def test_times_at_another_precision_are_others() -> None:
    """Which the user may set in two ways; after the second one, torch refuses to tell in the first."""
    program = """
import torch

highest = _timings._section("products")
torch.set_float32_matmul_precision("highest")
assert _timings._section("products") == highest
torch.set_float32_matmul_precision("medium")
assert _timings._section("products") == f"{highest} in bf16"
torch.backends.mkldnn.matmul.fp32_precision = "tf32"
torch.backends.cuda.matmul.fp32_precision = "tf32"
assert _timings._section("products") == f"{highest} in tf32"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
