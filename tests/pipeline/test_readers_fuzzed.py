"""Random files against plain definitions: no record lost, none twice, in order, and bad ones under their line."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fastgen.pipeline.batches import Window
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.writers import FileOutput

# Whatever has a meaning in one of the formats, and a few that have none.
PIECES = ["a", "é", "雪", '"', '""', ",", "\t", "\n", "\r\n", "\r", "\0", "\u2028", "\x85", " ", "\\", "{", "}", "text"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
BYTES = st.lists(st.sampled_from([*(piece.encode() for piece in PIECES), b"\xff", b"\xc3", b"\xed\xa0\x80"])).map(
    b"".join
)
BOM = st.sampled_from([b"", b"\xef\xbb\xbf"])


def read(data: bytes, form: str, **options):
    """What is made of a file, and how many records the file says it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"in.{form}"
        path.write_bytes(data)
        source = Inputs(RunOptions(model="m", input=str(path), output="-", **options))
        found = list(source)
    assert [record.position for record in found] == list(range(len(found)))
    assert source.total == len(found)
    return [(record.line, None if record.problem else record.text) for record in found]


def usable(text) -> bool:
    """Whether a record may have this text."""
    return isinstance(text, str) and bool(text.strip()) and not re.search("[\0\ud800-\udfff]", text)


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def lines_of(data: bytes) -> list[str]:
    """Lines as an editor counts them that knows no other line end than this one."""
    lines = decoded(data).split("\n")
    lines[0] = lines[0].removeprefix("\ufeff")
    return [line.removesuffix("\r") for line in (lines[:-1] if data.endswith(b"\n") or not data else lines)]


def begins_as_text(data: bytes) -> bool:
    """Files with zeros in a certain pattern in front are taken for UTF-16 or UTF-32."""
    return b"\0" not in data[:4]


@given(BOM, BYTES)
@settings(max_examples=60)
def test_text(bom, data):
    assume(begins_as_text(bom + data))
    expected = [(line, text if usable(text) else None) for line, text in enumerate(lines_of(bom + data), start=1)]
    assert read(bom + data, "txt") == expected


NUMBERS = st.integers() | st.just(10**400) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
ROWS = st.fixed_dictionaries({"text": VALUES}, optional={"id": VALUES, "reference": VALUES}) | VALUES


def json_text(line: str):
    """The text in a line of JSON; None where there is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value.get("text") if isinstance(value, dict) else value


@given(
    BOM, st.lists(ROWS.map(lambda row: json.dumps(row).encode()) | BYTES, max_size=8), st.sampled_from([b"\n", b"\r\n"])
)
@settings(max_examples=60)
@example(b"", [b"[" * 100_000, b'{"text": "a"}', b'{"text": "b", "x": ' + b"9" * 5000 + b"}"], b"\n")
def test_json_lines(bom, rows, end):
    # The first row has what says where the text is.
    data = bom + end.join([b'{"text": "first"}', *rows])
    expected = []
    for number, line in enumerate(lines_of(data), start=1):
        readable = len(line) < 5000 and not re.search("[\ud800-\udfff]", line)
        text = json_text(line) if readable else None
        expected.append((number, text if usable(text) else None))
    assert read(data, "jsonl", input_column="text") == expected


def csv_records(body: str, delimiter: str):
    """Records by the grammar: the number of lines before each one, and its cells, or None where it breaks the rules.

    A cell is quoted as a whole, with its quotes doubled, or does not begin with a quote and has no carriage return. A
    record that breaks the rules ends with its first line.
    """
    cell = rf'(?:"(?:[^"]|"")*"|(?!")[^{delimiter}\r\n]*)'
    record = re.compile(rf"{cell}(?:{delimiter}{cell})*(?=\r*(?:\n|\Z))")
    position = line = 0
    while position < len(body):
        match = record.match(body, position)
        if match:
            found = re.findall(rf"(?:^|{delimiter})({cell})", match[0])
            cells = [one[1:-1].replace('""', '"') if one.startswith('"') else one for one in found]
            yield line, cells if match[0] else []
            line += match[0].count("\n")
            position = match.end()
        else:
            yield line, None
        end = body.find("\n", position)
        position = end + 1 if end >= 0 else len(body)
        line += 1


@pytest.mark.parametrize(("form", "delimiter"), [("csv", ","), ("tsv", "\t")])
@settings(max_examples=60)
@given(bom=BOM, data=BYTES)
@example(bom=b"", data=b'a,"b\n"a,"b"\na,b\n"never')
@example(bom=b"", data=b'a,"b\r\nc"\r\nid,text\r\na,b\r\n\r\n')
@example(bom=b"", data=b'a,b\rc\na,"b\rc"\n\ra,b\na,b\r\r\na,b')
def test_csv(form, delimiter, bom, data):
    header = ["id", "text"]
    expected = []
    records = list(csv_records(decoded(data), delimiter))
    while records and records[-1][1] == []:
        records.pop()  # blank lines at the end are none
    for line, cells in records:
        good = cells is not None and len(cells) == 2 and cells != header and usable(cells[1])
        expected.append((line + 2, cells[1] if good else None))
    start = bom + delimiter.join(header).encode() + b"\n"
    assert read(start + data, form, input_column="text") == expected


@given(
    st.lists(st.tuples(st.none() | TEXT | st.text(st.characters(codec="utf-8")), st.integers(0, 2**64 - 1))),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_parquet(rows, group):
    import pyarrow
    from pyarrow import parquet

    ids = pyarrow.array([number for _, number in rows], pyarrow.uint64())
    table = pyarrow.table({"text": pyarrow.array([text for text, _ in rows], pyarrow.string()), "id": ids})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, row_group_size=group)
    expected = [(line, text if usable(text) else None) for line, (text, _) in enumerate(rows, start=1)]
    assert read(sink.getvalue().to_pybytes(), "parquet", input_column="text", id_column="id") == expected


HUGE = st.integers(-(2**64), 2**64)
HALF = st.just("half a pair: \ud800")


def records_with(ids):
    """Lists of records with such ids."""
    return st.lists(st.fixed_dictionaries({"id": ids, "text": TEXT | HALF, "reference": TEXT | HALF}), max_size=8)


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
@settings(max_examples=40)
@given(rows=st.sampled_from([HUGE, VALUES | HALF]).flatmap(records_with))
def test_whatever_is_accepted_can_be_written(form, rows):
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "in.jsonl", Path(folder) / f"out.{form}"
        source.write_text("".join(json.dumps(row) + "\n" for row in [{"id": 0, "text": "", "reference": ""}, *rows]))
        columns = {"input_column": "text", "id_column": "id", "reference_column": "reference"}
        options = RunOptions(model="m", input=str(source), output=str(path), **columns)
        records = list(Inputs(options))
        good = [record for record in records if not record.problem]
        bad = [record.error() for record in records if record.problem]
        output = FileOutput(options, {})
        output.journal.begin({"batch_size": 2})
        output.window(Window(0, 0, len(records), 1, bad))
        results = [
            {
                "position": record.position, "line": record.line, "id": record.id, "input": record.text,
                "text": record.text, "sequences": [record.text], "scores": [math.nan], "input_tokens": 1,
                "output_tokens": [1], "reference": record.reference,
            }
            for record in good
        ]  # fmt: skip
        output.batch(0, 0, results)
        output.finish()
        output.complete()
        errors = [json.loads(line) for line in Path(f"{path}.errors.jsonl").read_bytes().splitlines()]
        assert [error["line"] for error in errors] == [failure["line"] for failure in bad]
        if form == "txt":
            lines = path.read_text(encoding="utf-8").split("\n")
            assert len(lines) == len(records) + 1
            assert [bool(line) for line in lines[:-1]] == [not record.problem for record in records]
            return
        if form == "jsonl":
            written = [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().split(b"\n")[:-1]]
        else:
            from pyarrow import parquet

            written = parquet.read_table(path).to_pylist()
        texts = [(row["text"], row["reference"], row["scores"]) for row in written]
        assert texts == [(record.text, record.reference, [None]) for record in good]
        if form == "jsonl" or all(type(record.id) is int for record in good):
            assert [row["id"] for row in written] == [record.id for record in good]
        else:
            assert [row["id"] for row in written] == [None if record.id is None else str(record.id) for record in good]
