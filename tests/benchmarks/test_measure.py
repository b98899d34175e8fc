from __future__ import annotations

import pytest

from benchmarks.measure import alternate, format_seconds, summary


def test_summary_keeps_every_run():
    assert summary([3.0, 1.0, 2.0, 10.0]) == {"seconds": [3.0, 1.0, 2.0, 10.0], "median": 2.5, "min": 1.0, "max": 10.0}


def test_backends_alternate():
    order = []

    def run_of(name):
        def run():
            order.append(name)
            return float(len(order)), name

        return run

    lines = []
    results = alternate({"a": run_of("a"), "b": run_of("b")}, 3, lines.append)
    assert order == ["a", "b"] * 3
    assert results == {"a": [(1.0, "a"), (3.0, "a"), (5.0, "a")], "b": [(2.0, "b"), (4.0, "b"), (6.0, "b")]}
    assert len(lines) == 6 and lines[0] == "run 1 of 3, a: 1.00 s"


@pytest.mark.parametrize("fails_in", [1, 2])
def test_a_backend_that_fails_is_left_out(fails_in):
    runs, told = [], []

    def broken():
        runs.append("b")
        if len(runs) == fails_in:
            raise ValueError("it broke")
        return 1.0, "b"

    backends = {"a": lambda: (1.0, "a"), "b": broken, "c": lambda: (2.0, "c")}
    results = alternate(backends, 3, failed=lambda name, error: told.append((name, str(error))))
    assert results == {"a": [(1.0, "a")] * 3, "c": [(2.0, "c")] * 3}
    assert told == [("b", "it broke")] and len(runs) == fails_in
    with pytest.raises(ValueError, match="it broke"):
        runs.clear()
        alternate(backends, 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (2.345, "2.35 s"), (0.99996, "1.00 s"), (0.0123, "12.3 ms"), (0.0000123, "12.3 µs")],
)
def test_seconds_in_the_unit_that_suits(seconds, text):
    assert format_seconds(seconds) == text
