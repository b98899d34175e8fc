from __future__ import annotations

import json

import pytest

from benchmarks import chart
from benchmarks import results as results_module
from benchmarks.measure import summary
from benchmarks.record import Record
from benchmarks.results import Results, write_whole

ABOUT = {
    "machine": {"cpu": "A CPU", "cores": 2, "memory_gib": 24.0, "system": "Linux", "instructions": "AVX2"},
    "versions": {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0", "fastgen": "0.1"},
    "settings": {"device": "cpu", "threads": 2, "quick": False},
}


def record(name: str, seconds: float = 1.0, group: str = "generation", **fields) -> Record:
    made = Record(name=name, title=f"Title of {name}", group=group, date="2026-01-02T03:04:05+00:00", **fields)
    made.backends = {"transformers": summary([2 * seconds]), "fastgen": summary([seconds])}
    made.compare()
    return made


def test_everything_is_written_after_each_workload(tmp_path):
    found = Results(tmp_path / "deep" / "folder", ABOUT, ["first", "second"])
    found.add(record("first"))
    data = json.loads(found.path.read_text())
    assert [each["name"] for each in data["workloads"]] == ["first"]
    assert data["machine"] == ABOUT["machine"] and data["versions"] == ABOUT["versions"] and data["schema"] == 1
    assert {path.name for path in found.folder.iterdir()} == {"results.json", "results.md"}


def test_merges_with_results_of_the_same_machine_and_versions(tmp_path):
    order = ["a", "b", "c"]
    first = Results(tmp_path, ABOUT, order)
    first.add(record("c", 3.0))
    first.add(record("a", 1.0))
    second = Results(tmp_path, ABOUT, order)
    second.add(record("a", 7.0))
    second.add(record("b", 2.0))
    medians = {
        each["name"]: each["backends"]["fastgen"]["median"] for each in json.loads(second.path.read_text())["workloads"]
    }
    assert medians == {"a": 7.0, "b": 2.0, "c": 3.0} and list(medians) == order


@pytest.mark.parametrize("part", ["machine", "versions", "settings"])
def test_does_not_merge_with_others(tmp_path, part):
    Results(tmp_path, ABOUT, []).add(record("a"))
    changed = {**ABOUT, part: {**ABOUT[part], "something": "else"}}
    found = Results(tmp_path, changed, [])
    assert found.records == {}
    previous = json.loads((tmp_path / "results.previous.json").read_text())
    assert [each["name"] for each in previous["workloads"]] == ["a"]


def test_a_little_more_memory_is_no_other_machine(tmp_path):
    with_memory = [{**ABOUT, "machine": {**ABOUT["machine"], "memory_gib": size}} for size in (23.6, 23.5, 15.5)]
    Results(tmp_path, with_memory[0], []).add(record("a"))
    assert list(Results(tmp_path, with_memory[1], []).records) == ["a"]
    assert Results(tmp_path, with_memory[2], []).records == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}'])
def test_a_broken_file_is_moved_aside(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    Results(tmp_path, ABOUT, []).add(record("a"))
    assert (tmp_path / "results.previous.json").read_text() == content
    assert json.loads((tmp_path / "results.json").read_text())["workloads"][0]["name"] == "a"


def test_table(tmp_path):
    found = Results(tmp_path, ABOUT, [])
    good = record("good", identical=True, accelerated=True, commit="abc")
    good.note_peaks({"transformers": 2**24, "fastgen": 2**23}, "of the process")
    found.add(good)
    found.add(record("operator", group="operator", identical=False, notes=["row 3 differs"]))
    found.add(Record(name="broken", title="Broken", group="generation", errors=["Traceback\nValueError: no"]))
    found.add(record("busy", other_load=1.5))
    text = (tmp_path / "results.md").read_text()
    assert "A CPU, 2 cores" in text and "transformers 5.23.0" in text and "commit abc" in text
    assert "| 2.00 s [2.00 s - 2.00 s] | 1.00 s [1.00 s - 1.00 s] | **2.00** [2.00 - 2.00] | yes | yes |" in text
    assert "16 → 8 MiB (0.50)" in text
    assert "Broken: ValueError: no (failed)" in text and "row 3 differs" in text
    assert "Title of busy (!)" in text and "1.5 cores busy" in text


def test_table_has_every_backend(tmp_path):
    made = record("a", identical=True, accelerated=True, skipped={"fairseq": "it is not installed"})
    made.backends["ctranslate2"] = {**summary([1.5]), "version": "4.8.5"}
    made.backends["ctranslate2-int8"] = {**summary([0.75]), "warm_up_seconds": 60.0}
    made.backends["fastgen"]["warm_up_seconds"] = 0.5
    made.backends["fastgen-int8"] = summary([0.5])
    made.backends["alone"] = summary([9.0])
    made.same = {"ctranslate2": 0.75, "ctranslate2-int8": 0.5, "fastgen-int8": 0.25}
    made.compare([("transformers", "fastgen"), ("ctranslate2", "fastgen"), ("ctranslate2-int8", "fastgen-int8")])
    found = Results(tmp_path, ABOUT, [])
    found.add(made)
    text = (tmp_path / "results.md").read_text()
    # The row of the library appears once.
    assert text.count("| Title of a | transformers |") == 1
    assert (
        "| ctranslate2 4.8.5 | 1.50 s [1.50 s - 1.50 s] | 1.00 s [1.00 s - 1.00 s] | **1.50** [1.50 - 1.50] | 75 %"
        in text
    )
    assert "500 ms [500 ms - 500 ms] (fastgen-int8) | **1.50** [1.50 - 1.50] | 50 %, 25 % |" in text
    assert "| Title of a | alone | 9.00 s [9.00 s - 9.00 s] |  |" in text
    assert "| Title of a | fairseq | not measured |" in text and "fairseq is not measured: it is not installed" in text
    assert text.count("to get ready") == 1 and "ctranslate2-int8 took 60.00 s to get ready" in text


def test_a_chart_of_tokens_per_second_says_what_it_shows(tmp_path):
    sizes = {"batch": 3, "new_tokens": 4, "options": {"num_return_sequences": 2}}
    records = [record(name, seconds, parameters=sizes) for name, seconds in (("a", 1.0), ("b", 0.25), ("c", 2.0))]
    records[1].backends["openvino"] = summary([8.0])
    path = tmp_path / "rates.png"
    path.write_bytes(chart.bars_png("A title", chart.rates(records)))
    shown = chart.shown(path)
    assert shown == {
        "Title of a": {"transformers": 12.0, "fastgen": 24.0},
        "Title of b": {"transformers": 48.0, "openvino": 3.0, "fastgen": 96.0},
        "Title of c": {"transformers": 6.0, "fastgen": 12.0},
    }
    assert list(shown["Title of b"]) == ["transformers", "openvino", "fastgen"]  # as in the tables


def test_a_result_without_the_ratio_of_the_two_main_backends(tmp_path):
    """As earlier versions wrote it."""
    found = Results(tmp_path, ABOUT, [])
    found.add(record("a"))
    data = json.loads(found.path.read_text())
    for each in data["workloads"]:
        del each["ratios"], each["skipped"], each["same"]
        each["targets"] = []
    found.path.write_text(json.dumps(data))
    Results(tmp_path, ABOUT, []).add(record("b"))
    text = (tmp_path / "results.md").read_text()
    assert all(f"| Title of {name} | transformers | 2.00 s [2.00 s - 2.00 s] |" in text for name in ("a", "b"))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(results_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
