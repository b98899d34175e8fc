"""Counts of accelerated calls and fallbacks."""

import pytest

from fastgen import counters, settings


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.setattr(settings, "_current", settings.Settings())
    counters.reset()
    yield
    counters.reset()


def test_counts_by_entry_point_and_reason():
    counters.count_accelerated("a")
    counters.count_accelerated("a")
    counters.count_fallback("a", "why")
    counters.count_fallback("b", "why not")
    assert counters.snapshot() == {
        "a": {"accelerated": 2, "fallback": {"why": 1}},
        "b": {"accelerated": 0, "fallback": {"why not": 1}},
    }
    counters.reset()
    assert counters.snapshot() == {}


def test_not_used_is_no_fallback():
    settings.change(strict=True)
    counters.count_not_used("a", "why")
    assert counters.snapshot() == {"a": {"accelerated": 0, "fallback": {}, "not used": {"why": 1}}}
    counters.reset()
    assert counters.snapshot() == {}


def test_strict_raises_and_counts():
    settings.change(strict=True)
    with pytest.raises(counters.FallbackError, match="entry would fall back .*: reason"):
        counters.count_fallback("entry", "reason")
    assert counters.snapshot()["entry"]["fallback"] == {"reason": 1}


@pytest.mark.parametrize(
    ("accelerated", "others", "expected"),
    [
        (1, {}, "accelerated by FastGen: 1 call"),
        (125, {}, "accelerated by FastGen: all 125 calls"),
        (0, {"why": 3}, "not accelerated: why"),
        (0, {"why": 1, "why not": 2}, "not accelerated: why not (2 calls); why (1 call)"),
        (5, {"why": 1}, "accelerated by FastGen: 5 of 6 calls; the others: why (1 call)"),
    ],
)
def test_the_outcome_of_calls_on_one_line(accelerated, others, expected):
    for _ in range(accelerated):
        counters.count_accelerated("a")
    for reason, calls in others.items():
        for _ in range(calls):
            counters.count_fallback("a", reason)
    counters.count_accelerated("b")
    assert str(counters.Outcome.of(counters.snapshot(), "a")) == expected


def test_the_outcome_has_all_parts_of_an_entry_point_and_captured_steps():
    counters.count_accelerated(counters.ENCODER)
    counters.count_accelerated(f"{counters.ENCODER}, recorded")
    counters.count_not_used(counters.ENCODER, "why")
    assert counters.Outcome.of(counters.snapshot(), counters.ENCODER) == counters.Outcome(2, 0, {"why": 1})
    for _ in range(2):
        counters.count_accelerated(counters.GENERATE)
    counters.count_accelerated(counters.CAPTURED_STEP)
    counters.count_not_used(counters.CAPTURED_STEP, "too few steps")
    found = str(counters.Outcome.of(counters.snapshot(), counters.GENERATE))
    assert found == "accelerated by FastGen: all 2 calls, 1 with captured steps"


def test_what_another_process_has_counted_is_added() -> None:
    counters.reset()
    counters.count_accelerated("a")
    counters.count_fallback("a", "why")
    counters.add("a", drafted=3)
    counters.merge(counters.snapshot())
    assert counters.snapshot() == {"a": {"accelerated": 2, "fallback": {"why": 2}, "drafted": 6}}
