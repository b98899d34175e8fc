"""The tables and the chart of the benchmarks are those of the results. (The tables of docs/support.md take minutes.)"""

from __future__ import annotations

import pytest

from tests.docs.pages import script


@pytest.fixture(scope="module")
def tables():
    return script("make_benchmark_tables")


def test_tables_of_benchmarks_are_up_to_date(tables):
    stale = [path.name for path, text in tables.make().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale}: run python docs/make_benchmark_tables.py"


def test_charts_are_up_to_date(tables, monkeypatch):
    assert not tables.stale_charts(), "run python docs/make_benchmark_tables.py"
    results, records = tables.read_small_models()
    records[0].backends["fastgen"]["median"] *= 2
    monkeypatch.setattr(tables, "read_small_models", lambda: (results, records))
    assert tables.stale_charts() == [tables.CHART]
    rows = tables.read_sessions()
    rows[0]["fastgen"] = "1.0"
    monkeypatch.setattr(tables, "read_sessions", lambda: rows)
    assert tables.stale_charts() == [tables.CHART, tables.CHART_OF_SESSIONS]
