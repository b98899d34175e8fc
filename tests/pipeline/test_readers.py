"""Every format gives the same records; bad rows are found, numbered, and passed over."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.readers import BadRecord, Inputs, Record
from fastgen.pipeline.settings import Settings

TEXTS = ["one", 'two, with "quotes"', "three\u2028breaks only in unicode", "naïve 雪"]


def inputs(path, **options):
    return Inputs(Settings(model="m", input=str(path), output="-", **options))


def read(path, **options):
    return list(inputs(path, **options))


def bad_kinds(records):
    return {record.line: record.problem.kind for record in records if isinstance(record, BadRecord)}


def write_parquet(path, columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def write(path, texts, form):
    if form == "txt":
        path.write_bytes("".join(text + "\n" for text in texts).encode())
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"a": 1, "text": text}) + "\n" for text in texts))
    elif form in ("csv", "tsv"):
        with open(path, "w", newline="", encoding="utf-8") as handle:
            csv.writer(handle, delimiter="\t" if form == "tsv" else ",").writerows(
                [["a", "text"], *([1, t] for t in texts)]
            )
    elif form == "parquet":
        write_parquet(path, {"a": [1] * len(texts), "text": texts})
    else:
        from datasets import Dataset

        Dataset.from_dict({"a": [1] * len(texts), "text": texts}).save_to_disk(str(path))
    return path


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
    for options in ({"input_column": "document"}, {}):
        with pytest.raises(SetupError, match=r"columns are: a, text"):
            read(path, **options)


def test_bad_lines_of_text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \n\xff\xfe\nlast without a line end")
    found = read(path)
    assert bad_kinds(found) == {2: "empty", 3: "empty", 4: "invalid-utf8"}
    assert [record.text for record in found if isinstance(record, Record)] == ["one", "last without a line end"]
    assert inputs(path).total == 5


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
    assert [record.text for record in found if isinstance(record, Record)] == ["one", "bare"]


def test_bad_lines_of_csv(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b'id,text\n1,one\n2\n\n3,"two\nlines"\n4,\xff\n5,\n6,six\n')
    found = read(path, input_column="text", id_column="id")
    assert bad_kinds(found) == {3: "missing-column", 4: "empty", 7: "invalid-utf8", 8: "empty"}
    assert [(record.line, record.text) for record in found if isinstance(record, Record)] == [
        (2, "one"), (5, "two\nlines"), (9, "six"),
    ]  # fmt: skip
    assert [record.id for record in found if isinstance(record, Record)] == ["1", "3", "6"]


def test_bad_rows_of_parquet(tmp_path):
    write_parquet(tmp_path / "in.parquet", {"text": ["one", None, "", "two"], "n": [1, 2, 3, 4]})
    found = read(tmp_path / "in.parquet", input_column="text")
    assert bad_kinds(found) == {2: "wrong-type", 3: "empty"}
    assert set(bad_kinds(read(tmp_path / "in.parquet", input_column="n")).values()) == {"wrong-type"}


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


def test_references_follow_their_records(tmp_path):
    path = write(tmp_path / "in.txt", ["a", "", "c"], "txt")
    references = write(tmp_path / "ref.txt", ["A", "B", ""], "txt")
    found = read(path, reference=str(references))
    assert [(record.position, record.reference) for record in found if isinstance(record, Record)] == [
        (0, "A"),
        (2, ""),
    ]


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
    with pytest.raises(SetupError, match="there are train, test"):
        read(tmp_path / "data", split="dev")


def test_a_changed_file_has_another_identity(tmp_path):
    path = write(tmp_path / "in.txt", ["a", "b"], "txt")
    before = inputs(path).identity()
    write(path, ["a", "c"], "txt")
    assert inputs(path).identity() != before
