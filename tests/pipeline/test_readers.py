"""Every format gives the same records; bad rows are found, numbered, and passed over."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tracemalloc

import pytest

from fastgen.pipeline.errors import PipelineError, SetupError
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.readers import PEEK_ROWS, JsonLinesSource
from tests.pipeline.reading import TEXTS, bad_kinds, inputs, read, write, write_parquet


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "tsv", "parquet", "dataset"])
def test_every_format_gives_the_same_records(tmp_path, form):
    path = write(tmp_path / f"in.{form}", TEXTS, form)
    column = {} if form == "txt" else {"input_column": "text"}
    source = inputs(path, **column)
    found = list(source)
    assert [record.text for record in found] == TEXTS
    assert [record.position for record in found] == [0, 1, 2, 3]
    assert [record.line for record in found] == ([2, 3, 4, 5] if form in ("csv", "tsv") else [1, 2, 3, 4])
    assert source.total == 4
    assert [record.text for record in read(path, limit=2, **column)] == TEXTS[:2]
    assert inputs(path, **column).identity() == source.identity()


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "dataset"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, form):
    path = write(tmp_path / f"in.{form}", TEXTS, form)
    for options in ({"input_column": "document"}, {"input_column": ""}, {}):
        with pytest.raises(SetupError, match=r"columns are: a, text"):
            read(path, **options)


def test_bad_lines_of_json(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [b'{"text": "one"}', b'{"text": 3}', b"{text}", b"", b'{"other": "x"}', b'{"text": null}', b"[1]", b"\xff",
            b'{"text": "\\ud800"}', b'{"text": ""}', b'"bare"']  # fmt: skip
    path.write_bytes(b"\n".join(rows) + b"\n")
    found = read(path, input_column="text")
    assert bad_kinds(found) == {
        2: "wrong-type", 3: "malformed", 4: "empty", 5: "missing-column", 6: "wrong-type", 7: "wrong-type",
        8: "invalid-utf8", 9: "invalid-utf8", 10: "empty",
    }  # fmt: skip
    assert [record.text for record in found if not record.problem] == ["one", "bare"]
    messages = {each.line: each.problem.message for each in found if each.problem}
    assert messages[2] == "column 'text' has a value of type int, not a string"
    assert messages[6] == "column 'text' has no value (null)"


@pytest.mark.parametrize("wanted", [{}, {"input_column": "text"}])
@pytest.mark.parametrize("name", ["in.jsonl", "-"])
def test_many_bad_lines_before_the_first_good_one(tmp_path, monkeypatch, name, wanted):
    """They are reported one by one, however many there are."""
    lines = b"{text}\n" * (PEEK_ROWS + 7) + b'{"text": "one"}\nbad\n{"text": "two"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    (tmp_path / "in.jsonl").write_bytes(lines)
    found = read(name if name == "-" else tmp_path / name, input_format="jsonl", **wanted)
    assert len(bad_kinds(found)) == PEEK_ROWS + 8 and len(found) == PEEK_ROWS + 10
    assert [record.text for record in found if not record.problem] == ["one", "two"]


def test_bad_lines_of_a_file_are_not_kept(tmp_path):
    """They may be gigabytes: a text that is named like JSON lines."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"no JSON\n" * 20_000 + b'{"text": "one"}\n')
    tracemalloc.start()
    try:
        source = JsonLinesSource(str(path))
        assert source.columns == ["text"] and tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()
    assert len(list(source.rows())) == 20_001


def test_a_parquet_file_with_a_column_twice(tmp_path):
    import pyarrow

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns, names=["text", "text"]), tmp_path / "in.parquet")
    with pytest.raises(SetupError, match="column 'text' twice"):
        inputs(tmp_path / "in.parquet", input_column="text")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "-"])
def test_other_encodings_are_named(tmp_path, monkeypatch, encoding, form):
    path = tmp_path / f"in.{form}"
    path.write_bytes("text\none\ntwo\n".encode(encoding))
    if form == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    name = encoding[:6].upper()
    with pytest.raises(SetupError, match=f"is {name}: convert it to UTF-8"):
        list(inputs("-")) if form == "-" else inputs(path)


@pytest.mark.parametrize("start", [b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"])
@pytest.mark.parametrize("name", ["in.txt.gz", "in.jsonl", "in.csv", "in.parquet"])
def test_compressed_inputs_are_refused(tmp_path, start, name):
    (tmp_path / name).write_bytes(start + b"rest")
    with pytest.raises(SetupError, match="is compressed"):
        inputs(tmp_path / name)


@pytest.mark.parametrize("start", [b"PAR1\x15\x04", b"ARROW1\0\0", b"\xff\xff\xff\xff\x78\0"])
@pytest.mark.parametrize("name", ["in.pq", "in.jsonl", "in.csv", "-"])
def test_tables_that_are_no_text_are_refused(tmp_path, monkeypatch, start, name):
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(start + b"rest\nrest\n")))
    else:
        (tmp_path / name).write_bytes(start + b"rest\nrest\n")
    with pytest.raises(SetupError, match="is (Parquet: give it as a file named .parquet|Arrow: convert it to Parquet)"):
        list(inputs(name if name == "-" else tmp_path / name))


def test_an_arrow_file_is_no_parquet(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"ARROW1\0\0")
    with pytest.raises(SetupError, match="is Arrow"):
        inputs(tmp_path / "in.parquet")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"input_column": "text", "id_column": "a"},
        {"input_column": "text", "keep": ("a",), "output_format": "jsonl"},
    ],
)
@pytest.mark.parametrize("name", ["in.jsonl", "-"])
def test_lines_of_json_without_a_line(tmp_path, monkeypatch, name, options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    (tmp_path / "in.jsonl").write_bytes(b"")
    path = name if name == "-" else tmp_path / name
    assert read(path, input_format="jsonl", **options) == []


@pytest.mark.parametrize("name", ["in.json", "IN.JSON"])
def test_json_is_not_taken_for_lines_of_text(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(SetupError, match="name it .jsonl or give --input-format jsonl"):
        inputs(path)
    assert [record.text for record in inputs(path, input_format="jsonl")] == ["one", "two"]
    assert [record.text for record in inputs(path, input_format="txt")] == path.read_text().split("\n")[:2]


def test_a_pipe_is_read_as_standard_input_only(tmp_path):
    os.mkfifo(tmp_path / "in.txt")
    with pytest.raises(SetupError, match="not a regular file .- reads standard input"):
        inputs(tmp_path / "in.txt")


@pytest.mark.parametrize(("output", "bad"), [("out.txt", [4]), ("out.jsonl", [4]), ("out.parquet", [1, 2, 4])])
def test_an_id_that_the_output_cannot_hold(tmp_path, output, bad):
    path = tmp_path / "in.jsonl"
    ids = [2**63 - 1, 2**63, -(2**63) - 1, "b", "\ud800", -(2**63), None]
    path.write_text("".join(json.dumps({"id": one, "text": "x"}) + "\n" for one in ids))
    settings = RunOptions(model="m", input=str(path), output=output, input_column="text", id_column="id")
    found = list(Inputs(settings))
    assert [record.position for record in found if record.problem] == bad
    assert [record.id for record in found] == ids


def test_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": NaN, "text": "a", "x": NaN}\n{"id": 1e999, "text": "b"}\n{"id": 1, "text": NaN}\n')
    found = read(path, input_column="text", id_column="id")
    assert [record.id for record in found] == [None, None, 1]
    assert bad_kinds(found) == {3: "wrong-type"}


@pytest.mark.parametrize("form", ["jsonl", "file"])
def test_a_reference_that_no_output_can_hold(tmp_path, form):
    rows = [{"text": "one", "ref": "A"}, {"text": "two", "ref": "\ud800"}]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form == "jsonl":
        assert bad_kinds(read(path, input_column="text", reference_column="ref")) == {2: "bad-reference"}
    else:
        references = tmp_path / "ref.jsonl"
        references.write_text("".join(json.dumps(row["ref"]) + "\n" for row in rows))
        with pytest.raises(SetupError, match="line 2: it is not valid UTF-8"):
            read(path, input_column="text", reference=str(references))


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_cell_that_python_cannot_hold_costs_its_record_only(tmp_path, form):
    import pyarrow
    from datasets import Dataset

    text = pyarrow.array([b"one", b"\xff", b"three", b"four"]).cast(pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(4, text.buffers()[1], text.buffers()[2])
    day = pyarrow.array([0, 1, 2**40, 3], pyarrow.int64()).cast(pyarrow.timestamp("s"))
    path = tmp_path / f"in.{form}"
    if form == "parquet":
        write_parquet(path, {"text": text, "day": day})
    else:
        Dataset(pyarrow.table({"text": text, "day": day})).save_to_disk(str(path))
    found = read(path, input_column="text", id_column="day")
    assert bad_kinds(found) == {2: "invalid-utf8", 3: "malformed"}
    assert [(record.text, record.id) for record in found if not record.problem] == [
        ("one", "1970-01-01 00:00:00"), ("four", "1970-01-01 00:00:03"),
    ]  # fmt: skip


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "in.parquet"
    write_parquet(path, {"text": [random.Random(number).randbytes(400).hex() for number in range(20)]})
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = b"\xff" * 2000
    path.write_bytes(data)
    with pytest.raises(PipelineError, match=r"cannot read .*in.parquet after record \d+"):
        read(path, input_column="text")


def test_nested_columns_and_the_layout_of_translation_data(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 7, "translation": {"en": "house", "de": "Haus"}}\n')
    assert read(path, input_column="translation.en")[0].text == "house"
    found = read(path, src_lang="en", tgt_lang="de", reference_column="translation.de", id_column="id")[0]
    assert (found.text, found.reference, found.id) == ("house", "Haus", 7)


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_standard_input(monkeypatch, form):
    lines = TEXTS if form == "txt" else [json.dumps(text) for text in TEXTS]
    data = io.BytesIO("".join(line + "\n" for line in lines).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    source = inputs("-", input_format=form)
    assert source.total is None
    assert [record.text for record in source] == TEXTS
    assert not data.closed


def test_references_follow_their_records(tmp_path):
    path = write(tmp_path / "in.txt", ["a", "", "c"], "txt")
    references = write(tmp_path / "ref.txt", ["A", "B", ""], "txt")
    found = read(path, reference=str(references))
    assert [(record.position, record.reference) for record in found if not record.problem] == [(0, "A"), (2, "")]


@pytest.mark.parametrize("lines", [2, 4])
@pytest.mark.parametrize("known", [True, False])
def test_references_of_another_length(tmp_path, monkeypatch, lines, known):
    path = write(tmp_path / "in.txt", ["a", "b", "c"], "txt")
    references = write(tmp_path / "ref.txt", ["x"] * lines, "txt")
    if not known:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    with pytest.raises(SetupError, match=r"ref.txt has .* lines but the input has"):
        read(path if known else "-", reference=str(references))


def test_more_references_than_the_limit_are_fine(tmp_path):
    path = write(tmp_path / "in.txt", ["a", "b", "c"], "txt")
    references = write(tmp_path / "ref.txt", ["A", "B", "C"], "txt")
    assert [record.reference for record in read(path, reference=str(references), limit=2)] == ["A", "B"]


def test_missing_inputs(tmp_path):
    with pytest.raises(SetupError, match="no such file"):
        read(tmp_path / "none.txt")
    with pytest.raises(SetupError, match="does not exist"):
        read(write(tmp_path / "in.txt", ["a"], "txt"), reference=str(tmp_path / "none"))
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(SetupError, match="as Parquet"):
        read(tmp_path / "bad.parquet")
    with pytest.raises(SetupError, match="standard input"):
        read("-", input_format="parquet")


def test_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    def split(text):
        return Dataset.from_dict({"text": [text]})

    DatasetDict(train=split("x"), test=split("y")).save_to_disk(str(tmp_path / "data"))
    assert read(tmp_path / "data")[0].text == "y"
    assert read(tmp_path / "data", split="train")[0].text == "x"
    for other in ("dev", ""):
        with pytest.raises(SetupError, match="there are train, test"):
            read(tmp_path / "data", split=other)


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "tsv", "parquet"])
def test_a_change_in_the_middle_is_another_input(form, tmp_path):
    """Also of a large file, and where the size stays."""
    chosen = {} if form == "txt" else {"input_column": "text"}
    texts = [f"text {number:09d} {'x' * 1000}" for number in range(4000)]
    before = inputs(write(tmp_path / f"in.{form}", texts, form), **chosen).identity()
    texts[2000] = texts[2000].replace("xx", "xy", 1)
    after = inputs(write(tmp_path / f"in.{form}", texts, form), **chosen).identity()
    assert form == "parquet" or before["input"]["size"] == after["input"]["size"]
    assert before["input"]["digest"] != after["input"]["digest"]


def test_a_data_set_with_other_texts_is_another_input(tmp_path):
    identities = []
    for name, texts in (("a", ["one", "two"]), ("a", ["one", "two"]), ("b", ["one", "too"])):
        write(tmp_path / name, texts, "dataset")
        (tmp_path / name).rename(tmp_path / "in")
        identities.append(inputs(tmp_path / "in", input_column="text").identity()["input"])
        (tmp_path / "in").rename(tmp_path / f"done {len(identities)}")
    assert identities[0] == identities[1]
    assert {name for name in identities[0] if identities[0][name] != identities[2][name]} == {"fingerprint"}


@pytest.mark.parametrize("form", ["txt", "jsonl"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_line_that_is_longer_than_any_text(form, ends, tmp_path, monkeypatch):
    """It is skipped without being kept, and the lines after it are read."""
    monkeypatch.setattr("fastgen.pipeline.readers.LONGEST_TEXT", 1000)
    monkeypatch.setattr("fastgen.pipeline.readers.CHUNK", 64)
    path = write(tmp_path / f"in.{form}", ["one", "x" * 5000, "two", "y" * 5000], form)
    if not ends:
        path.write_bytes(path.read_bytes()[:-1])
    found = read(path, input_column="text")
    assert bad_kinds(found) == {2: "malformed", 4: "malformed"}
    assert "longer than 1000 bytes" in found[1].problem.message
    assert [record.text for record in found if not record.problem] == ["one", "two"]


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_text_that_is_longer_than_any(form, tmp_path, monkeypatch):
    monkeypatch.setattr("fastgen.pipeline.inputs.LONGEST_TEXT", 1000)
    found = read(write(tmp_path / f"in.{form}", ["one", "x" * 5000, "two"], form), input_column="text")
    assert bad_kinds(found) == {2: "malformed"}
