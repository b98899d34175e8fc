"""The formats, and what is left of a skipped record in each."""

from __future__ import annotations

import io
import json
import sys

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.planner import Window
from fastgen.pipeline.readers import BadRecord, Problem
from fastgen.pipeline.settings import Settings
from fastgen.pipeline.writers import FileOutput, StreamOutput, Totals, check_free, text_line, write_json

BAD = BadRecord(1, 2, "b", Problem("empty", "the text is empty"))


def result(position, text, identity):
    return {
        "position": position, "line": position + 1, "id": identity, "input": "in", "text": text,
        "sequences": [text, "other"], "scores": [-0.5, -1.0], "input_tokens": 3, "output_tokens": [2, 4],
        "statistics": None,
    }  # fmt: skip


def settings(path, **options):
    return Settings(model="m", input="none", output=str(path), **options)


def fill(output, ids=(0, "b", 2)):
    output.window(Window(0, 0, 3, 1, [BAD]))
    output.batch(0, 0, [result(2, "second\nline\u2028end", ids[2]), result(0, "first", ids[0])])
    totals = Totals(())
    output.finish(totals)
    output.close()
    assert (totals.samples, totals.skipped, totals.tokens) == (2, 1, 12)


def file_output(path, **options):
    output = FileOutput(settings(path, **options), {})
    output.journal.begin({})
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
    assert text_line({"text": text}) == b"a b\n"


def test_json_lines_hold_everything_but_skipped_records(tmp_path):
    fill(file_output(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]
    assert [row["id"] for row in rows] == [0, 2]
    assert rows[1] == {
        "id": 2, "input": "in", "text": "second\nline\u2028end", "sequences": ["second\nline\u2028end", "other"],
        "scores": [-0.5, -1.0], "input_tokens": 3, "output_tokens": [2, 4],
    }  # fmt: skip


@pytest.mark.parametrize(("ids", "kept"), [((0, 1, 2), [0, 2]), (("x", "b", 2), ["x", "2"])])
def test_parquet(tmp_path, ids, kept):
    from pyarrow import parquet

    output = file_output(tmp_path / "out.parquet")
    output.window(Window(0, 0, 3, 1, [BadRecord(1, 2, ids[1], BAD.problem)]))
    output.batch(0, 0, [result(2, "two", ids[2]), result(0, "one", ids[0])])
    output.finish(Totals(()))
    output.close()
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["id"] == kept
    assert table["text"] == ["one", "two"]
    assert table["scores"] == [[-0.5, -1.0]] * 2


def test_an_empty_parquet_file_has_its_columns(tmp_path):
    from pyarrow import parquet

    output = file_output(tmp_path / "out.parquet")
    output.finish(Totals(()))
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.num_rows == 0
    assert "sequences" in table.column_names


def test_standard_output_is_in_input_order(monkeypatch, capsys):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream))
    fill(StreamOutput(settings("-")))
    assert stream.getvalue().decode() == "first\n\nsecond line end\n"
    assert "line 2 skipped: the text is empty" in capsys.readouterr().err


def test_nothing_is_replaced_unasked(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(SetupError, match="--overwrite"):
        file_output(path)
    output = file_output(path, overwrite=True)
    assert path.read_text() == "old"
    fill(output)
    assert path.read_text().startswith("first")
    path.unlink()
    (tmp_path / "out.txt.partial").write_text("work")
    with pytest.raises(SetupError, match="--resume continues"):
        file_output(path)
    with pytest.raises(SetupError, match="is a directory"):
        file_output(tmp_path)
    with pytest.raises(SetupError, match="does not exist"):
        file_output(tmp_path / "none" / "out.txt")


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
    errors.write_text("own")
    output = file_output(path, resume=True)
    output.batch(0, 0, [result(2, "c", 2), result(0, "a", 0)])
    output.finish(Totals(()))
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


def test_input_and_output_must_differ(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    with pytest.raises(SetupError, match="same file"):
        Settings(model="m", input=str(path), output=str(path), overwrite=True)
