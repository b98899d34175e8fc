"""What scripts of docs/ make is up to date: pictures, tables, charts. (The tables of docs/support.md take minutes.)"""

from __future__ import annotations

import re
from dataclasses import fields
from xml.etree import ElementTree

import pytest

from fastgen import settings
from tests.docs.pages import script


@pytest.fixture(scope="module")
def flowchart():
    return script("make_flowchart")


@pytest.fixture(scope="module")
def tables():
    return script("make_benchmark_tables")


def test_the_flowchart_is_up_to_date(flowchart, monkeypatch):
    assert not flowchart.is_stale(), "run python docs/make_flowchart.py"
    monkeypatch.setattr(flowchart, "STEPS", flowchart.STEPS[1:])
    assert flowchart.is_stale()


def test_the_flowchart_is_well_formed_and_its_settings_exist(flowchart):
    root = ElementTree.fromstring(flowchart.draw())
    text = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    named = set(re.findall(r"(\w+)=", text)) - {"dtype"}
    assert named and named <= {field.name for field in fields(settings.Settings)}


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
