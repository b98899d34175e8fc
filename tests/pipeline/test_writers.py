"""The formats, and what is left of a skipped record in each."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest

from fastgen.pipeline import journal
from fastgen.pipeline.batches import Window
from fastgen.pipeline.errors import PipelineError, Problem, SetupError
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.inputs import Record
from fastgen.pipeline.layouts import GENERATION
from fastgen.pipeline.writers import FileOutput, StreamOutput, check_free, write_json
from tests.pipeline.children import files_of_at_most

BAD = Record(1, 2, "b", problem=Problem("empty", "the text is empty")).error()


def result(position, text, identity):
    return {
        "position": position, "line": position + 1, "id": identity, "input": "in", "text": text,
        "sequences": [text, "other"], "scores": [-0.5, -1.0], "input_tokens": 3, "output_tokens": [2, 4],
        "statistics": None,
    }  # fmt: skip


def settings(path, **options):
    return RunOptions(model="m", input="none", output=str(path), **options)


def fill(output, ids=(0, "b", 2)):
    output.window(Window(0, 0, 3, 1, [BAD]))
    output.batch(0, 0, [result(2, "second\nline\u2028end", ids[2]), result(0, "first", ids[0])])
    totals = output.finish()
    output.complete()
    output.close()
    assert (totals.samples, totals.skipped, totals.tokens) == (2, 1, 12)


def file_output(path, **options):
    output = FileOutput(settings(path, **options), {})
    output.journal.begin({"batch_size": 2})
    return output


def test_text_keeps_lines_aligned(tmp_path):
    fill(file_output(tmp_path / "out.txt"))
    assert (tmp_path / "out.txt").read_text() == "first\n\nsecond line end\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "out.txt.errors.jsonl"]
    assert json.loads((tmp_path / "out.txt.errors.jsonl").read_text()) == {
        "line": 2, "position": 1, "id": "b", "error": "empty", "message": "the text is empty",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["a\r\nb", "a\rb", "a\vb", "a\x85b", "a\u2029b", "a\nb"])
def test_every_line_break_becomes_a_space(text):
    assert GENERATION.line({"text": text}, "txt") == b"a b\n"


def test_json_lines_hold_everything_but_skipped_records(tmp_path):
    fill(file_output(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]
    assert [row["id"] for row in rows] == [0, 2]
    assert rows[1] == {
        "id": 2, "input": "in", "text": "second\nline\u2028end", "sequences": ["second\nline\u2028end", "other"],
        "scores": [-0.5, -1.0], "input_tokens": 3, "output_tokens": [2, 4],
    }  # fmt: skip


@pytest.mark.parametrize(("ids", "kept"), [((0, 1, 2), [0, 2]), ((0, "b", 2), [0, 2]), (("x", "b", 2), ["x", "2"])])
def test_parquet(tmp_path, ids, kept):
    from pyarrow import parquet

    output = file_output(tmp_path / "out.parquet")
    output.window(Window(0, 0, 3, 1, [BAD | {"id": ids[1]}]))
    output.batch(0, 0, [result(2, "two", ids[2]), result(0, "one", ids[0])])
    output.finish()
    output.complete()
    output.close()
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["id"] == kept
    assert table["text"] == ["one", "two"]
    assert table["scores"] == [[-0.5, -1.0]] * 2


def test_an_empty_parquet_file_has_its_columns(tmp_path):
    from pyarrow import parquet

    output = file_output(tmp_path / "out.parquet")
    output.finish()
    output.complete()
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.num_rows == 0
    assert "sequences" in table.column_names


def test_standard_output_is_in_input_order(monkeypatch, capsys):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream))
    fill(StreamOutput(settings("-")))
    assert stream.getvalue().decode() == "first\n\nsecond line end\n"
    assert "line 2 skipped: the text is empty" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["output", "work file"])
def test_what_another_run_has_written_between_the_check_and_the_lock_is_not_replaced(
    tmp_path, monkeypatch, resume, kind
):
    path, work = tmp_path / "out.txt", tmp_path / "out.txt.partial"
    lock = journal.lock

    def late(handle, locked):
        if kind == "output":
            path.write_text("theirs")
        else:
            work.write_text(f'{{"journal": {journal.VERSION}}}\n')
        lock(handle, locked)

    monkeypatch.setattr(journal, "lock", late)
    with pytest.raises(SetupError, match="exists already|is left from an interrupted run|first line .* is damaged"):
        file_output(path, resume=resume)
    assert (path if kind == "output" else work).read_text() in ("theirs", f'{{"journal": {journal.VERSION}}}\n')
    monkeypatch.undo()
    if kind == "output":
        path.unlink()
        fill(file_output(path))  # what is left of the refused run is in nobody's way
        assert [left.name for left in tmp_path.iterdir() if "errors" not in left.name] == ["out.txt"]


def test_a_resumed_run_may_rewrite_its_own_files_only(tmp_path):
    path, errors = tmp_path / "out.txt", tmp_path / "out.txt.errors.jsonl"
    errors.write_text("old")
    with pytest.raises(SetupError, match="errors.jsonl exists already .--overwrite"):
        file_output(path, resume=True)
    assert errors.read_text() == "old"
    errors.unlink()
    output = file_output(path)
    output.window(Window(0, 0, 3, 1, [BAD]))
    output.close()
    assert sorted(left.name for left in tmp_path.iterdir()) == ["out.txt.errors.jsonl.partial", "out.txt.partial"]
    # As if the interrupt had come between the two renames.
    errors.write_text('{"line": 1}\n')
    output = file_output(path, resume=True)
    output.batch(0, 0, [result(2, "c", 2), result(0, "a", 0)])
    output.finish()
    output.complete()
    assert path.read_text() == "a\n\nc\n"
    assert json.loads(errors.read_text())["line"] == 2
    assert sorted(left.name for left in tmp_path.iterdir()) == ["out.txt", "out.txt.errors.jsonl"]


def test_links_are_followed_and_devices_are_not_replaced(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_json(str(tmp_path / "link.json"), 1)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
    check_free(settings("-", report="/dev/null"))
    with pytest.raises(SetupError, match="not a regular file"):
        check_free(settings("/dev/null", overwrite=True))
    with pytest.raises(SetupError, match="link.json exists already"):
        check_free(settings("-", report=str(tmp_path / "link.json")))


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("where", ["journal", "errors", "output"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, form, where):
    path = tmp_path / f"out.{form}"
    output = file_output(path)
    output.window(Window(0, 0, 3, 1, [BAD]))
    results = [result(2, "second", 2), {"position": 0, "line": 1, "id": 0, "error": "model", "message": "no"}]
    named = {"journal": ".partial", "errors": ".errors.jsonl.partial", "output": ""}[where]
    if where == "output":
        output.batch(0, 0, results)
    size = 3 if where == "output" else (tmp_path / f"out.{form}{named}").stat().st_size
    with contextlib.ExitStack() as stack, pytest.raises(PipelineError, match=f"cannot write {path}{named}: .*--resume"):
        if where != "journal":
            # The journal holds more than the others, so that a limit for all would stop it first.
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(output.journal, "_append", lambda entry: None)
        stack.enter_context(files_of_at_most(size))
        output.batch(0, 0, results) if where != "output" else output.finish()
    output.close()
    assert not path.exists()
    output = file_output(path, resume=True)
    output.batch(0, 0, results)
    output.finish()
    output.complete()
    assert path.exists()
    errors = (tmp_path / f"out.{form}.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in errors] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_journal_leaves_no_output(tmp_path):
    output = file_output(tmp_path / "out.txt")
    output.window(Window(0, 0, 3, 1, [BAD]))
    output.batch(0, 0, [result(0, "first", 0)])
    with pytest.raises(SetupError, match="out.txt.partial is damaged: a window lacks records"):
        output.finish()
    output.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt.errors.jsonl.partial", "out.txt.partial"]


def test_a_full_standard_output_is_one_line(monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        with pytest.raises(PipelineError, match="cannot write standard output: No space left"):
            fill(StreamOutput(settings("-")))


@pytest.mark.parametrize("name", ["out.txt.gz", "out.jsonl.zst", "OUT.GZ"])
def test_compressed_outputs_are_refused(tmp_path, name):
    with pytest.raises(SetupError, match="is not written compressed"):
        check_free(settings(tmp_path / name))


def test_an_output_is_no_json(tmp_path):
    path = tmp_path / "Out.JSON"
    with pytest.raises(SetupError, match="Out.JSON would not be JSON: name it Out.jsonl"):
        check_free(settings(path))
    for form in ("jsonl", "txt"):
        check_free(settings(path, output_format=form))


def test_the_directory_that_a_link_leads_to_is_named(tmp_path):
    (tmp_path / "out.txt").symlink_to(tmp_path / "gone" / "out.txt")
    with pytest.raises(SetupError, match="the directory .*/gone does not exist"):
        check_free(settings(tmp_path / "out.txt"))
