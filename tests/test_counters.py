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
