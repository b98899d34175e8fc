"""The tables of the benchmarks are those of the results. (Those of docs/support.md take minutes to make.)"""

from __future__ import annotations

import importlib.util

from tests.docs.pages import ROOT


def test_tables_of_benchmarks_are_up_to_date():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "make_benchmark_tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    stale = [path.name for path, text in tables.make().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale}: run python docs/make_benchmark_tables.py"
