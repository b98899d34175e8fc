"""Whatever is cut off a journal, what is left is whole batches; other settings are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastgen.pipeline import journal as journals
from fastgen.pipeline.batches import Window
from fastgen.pipeline.errors import Problem, SetupError
from fastgen.pipeline.inputs import Record
from fastgen.pipeline.journal import VERSION, Journal, line_of

SETTINGS = {"model": {"weights": "a"}, "generation": {"num_beams": 4, "bad_words_ids": [[1]]}, "seed": 1}
BAD = Record(1, 2, 1, problem=Problem("empty", "the text is empty")).error()


def result(position):
    return {
        "position": position, "line": position + 1, "id": position, "text": f"text {position} \ud800 雪",
        "output_tokens": [1],
    }  # fmt: skip


def begin(journal):
    """The first of two windows."""
    journal.begin({"batch_size": 2})
    journal.window(Window(0, 0, 5, 2, [BAD]))
    journal.batch(0, 0, [result(4), result(0)])
    journal.batch(0, 1, [result(3), result(2)])


def end(journal):
    """The second of two windows."""
    journal.window(Window(1, 5, 1, 1, []))
    journal.batch(1, 0, [result(5)])


def write(path):
    journal = Journal(path, SETTINGS, resume=False)
    begin(journal)
    end(journal)
    journal.close()
    return path


def test_records_come_back_in_input_order(tmp_path):
    journal = Journal(write(tmp_path / "j"), SETTINGS, resume=True)
    assert [found["position"] for found in journal.results()] == [0, 1, 2, 3, 4, 5]
    assert [found["line"] for found in journal.errors] == [2]
    assert journal.plan == {"batch_size": 2}
    assert journal.resumed.done == {0: {0, 1}, 1: {0}}
    assert journal.count == 6


def test_cut_anywhere_it_resumes_with_the_batches_that_are_whole(tmp_path):
    path = write(tmp_path / "j")
    whole = path.read_bytes()
    # Among the cuts: right before and right after every line end.
    ends = [end for end in range(len(whole) + 1) if whole[end - 1 : end] == b"\n" or whole[end : end + 1] == b"\n"]
    for size in sorted({*range(0, len(whole) + 1, 7), *ends}):
        path.write_bytes(whole[:size])
        journal = Journal(path, SETTINGS, resume=True)
        lines = whole[:size].count(b"\n")
        done = sum(len(batches) for batches in journal.resumed.done.values())
        assert done == max(0, min(lines - 2, 2)) + (lines == 6)
        assert len(journal.resumed.windows) == (lines >= 2) + (lines >= 5)
        journal.close()
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:lines])


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ('{"journal": 1}', "another version"),
        ('{"journal": 2, "settings": {}, "plan": {}}', "another version"),
        (f'{{"journal": {VERSION}, "settings": {{}}, "environment": {{}}, "plan": {{}}}}', "is damaged"),
        ('{"journal": "x"}', "is damaged"),
        (f'{{"journal": {VERSION}, "settings": {{"model"', "is damaged"),
        ('{"journal": \0\0\0\0', "is damaged"),
    ],
)
def test_a_damaged_first_line_is_refused_and_not_discarded(tmp_path, first, message):
    path = write(tmp_path / "j")
    rest = path.read_text().partition("\n")[2]
    path.write_text(f"{first}\n{rest}")
    before = path.read_bytes()
    with pytest.raises(SetupError, match=message) as refused:
        Journal(path, SETTINGS, resume=True)
    assert path.read_bytes() == before
    remedies = ("move it away", "restore it", "--overwrite")
    assert message != "is damaged" or all(remedy in str(refused.value) for remedy in remedies)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: "{}x\n",
        lambda line: '{"batch": {"window": 0, "index": 1, "results": []}}\n',
        lambda line: line.replace('"position": 3', '"position": 2'),
        lambda line: line[:-2] + "\n",
        lambda line: line.replace("\t", " "),
    ],
)
def test_work_ends_before_a_damaged_line(tmp_path, damage):
    path = write(tmp_path / "j")
    lines = path.read_text().splitlines(keepends=True)
    assert damage(lines[3]) != lines[3]
    path.write_text("".join([*lines[:3], damage(lines[3]), *lines[4:]]))
    journal = Journal(path, SETTINGS, resume=True)
    assert journal.resumed.done == {0: {0}}
    journal.close()
    assert path.read_text() == "".join(lines[:3])


def change_line(path, number, change):
    lines = path.read_text().splitlines(keepends=True)
    entry = json.loads(lines[number].partition("\t")[0])
    change(entry.get("window") or entry["batch"])
    lines[number] = line_of(entry).decode()
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (3, lambda batch: batch["results"].pop()),
        (3, lambda batch: batch.update(window=1)),
        (3, lambda batch: batch["results"][0].update(position=5)),
        (5, lambda batch: batch["results"].clear()),
        (1, lambda window: window.update(batches=3)),
        (1, lambda window: window.update(count=6)),
        (1, lambda window: window["bad"].clear()),
    ],
)
def test_records_that_are_missing_are_told_and_nothing_is_lost(tmp_path, number, change):
    path = write(tmp_path / "j")
    change_line(path, number, change)
    before = path.read_bytes()
    with pytest.raises(SetupError, match=r"/j is damaged: a (window|batch|record).*move it away or restore .*--overw"):
        Journal(path, SETTINGS, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:4], lines[4][:9] + "\n", lines[5]],
        lambda lines: [*lines[:4], "x\n", "x\n"],
        lambda lines: lines[:4],
        lambda lines: [lines[0], *lines[4:]],
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_window_that_is_lost_while_the_run_goes_on_is_told(tmp_path, damage, resumed):
    path = write(tmp_path / "j")
    lines = path.read_text().splitlines(keepends=True)
    if resumed:
        path.write_text("".join(lines[:4]))
    journal = Journal(path, SETTINGS, resume=resumed)
    if not resumed:
        begin(journal)
    end(journal)
    path.write_text("".join(damage(lines)))
    with pytest.raises(SetupError, match="j is damaged: a (window is missing|batch is without its window)"):
        list(journal.results())
    journal.close()


def test_another_environment_is_told_and_kept(tmp_path):
    path = tmp_path / "j"
    for threads, told in ((2, []), (2, []), (1, ["threads: 2, now 1"]), (2, ["threads: 1, now 2"])):
        journal = Journal(path, SETTINGS, True, {"threads": threads})
        assert journal.differences == told
        journal.begin({"batch_size": 2})
        journal.close()


@pytest.mark.parametrize("over", [False, True])
def test_of_two_runs_that_begin_together_the_second_is_refused(tmp_path, monkeypatch, over):
    path = tmp_path / "j"
    runs = []

    def first_run_begins() -> None:
        if not runs:
            runs.append(None)
            runs[0] = Journal(path, SETTINGS, resume=False)
            runs[0].begin({"batch_size": 2})

    def exists(self, exists=Path.exists):
        found = exists(self)
        first_run_begins()
        return found

    def open_first(name, *options, open=os.open):
        first_run_begins()
        return open(name, *options)

    def lock_when_over(handle, path):
        if over and len(runs) == 1 and runs[0] is not None:
            runs[0].remove()
        lock(handle, path)

    lock = journals.lock
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(os, "open", open_first)
    monkeypatch.setattr(journals, "lock", lock_when_over)
    with pytest.raises(SetupError, match="another run"):
        Journal(path, SETTINGS, resume=False)
    runs[0].close()
    assert path.is_file() != over
    assert over or b'"journal"' in path.read_bytes()


def test_a_journal_is_removed_while_it_is_locked(tmp_path, monkeypatch):
    done = Journal(write(tmp_path / "j"), SETTINGS, resume=True)
    locked = []
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok: locked.append(not done._file.closed))
    done.remove()
    assert locked == [True]
