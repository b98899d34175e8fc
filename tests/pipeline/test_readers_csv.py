"""CSV: rows over several lines, rows that break the rules, and headers."""

from __future__ import annotations

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.readers import open_source
from tests.pipeline.reading import bad_kinds, inputs, read


def test_csv_loses_no_row_and_no_cell(tmp_path):
    path = tmp_path / "in.csv"
    lines = ["id,text", "1,one", "2,two,more", "3", '4,"open', "5,five", '6,"six"x', '7,"seven', 'lines"', "id,text",
             '8,5" pipe', '9,"never closed', "10,ten"]  # fmt: skip
    path.write_text("\r\n".join(lines) + "\r\n")
    found = read(path, input_column="text", id_column="id")
    messages = {record.line: record.problem.message for record in found if record.problem}
    # What is known of the id of a bad record; its position would be taken for the id of another one.
    assert [record.id for record in found if record.problem] == ["2", "3", None, None, "id", None]
    assert messages == {
        3: "number of cells: 3, of columns: 2",
        4: "number of cells: 1, of columns: 2",
        5: "a quote is not closed, or text follows it: ',' expected after '\"'",
        7: "a quote is not closed, or text follows it: ',' expected after '\"'",
        10: "the header again",
        12: "a quote is not closed, or text follows it: unexpected end of data",
    }
    assert [(record.line, record.id, record.text) for record in found if not record.problem] == [
        (2, "1", "one"), (6, "5", "five"), (8, "7", "seven\r\nlines"), (11, "8", '5" pipe'), (13, "10", "ten"),
    ]  # fmt: skip
    assert inputs(path, input_column="text").total == len(found)


def test_a_csv_cell_has_a_limit_so_that_an_open_quote_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("fastgen.pipeline.readers.LONGEST_TEXT", 1000)
    path = tmp_path / "in.csv"
    path.write_text('id,text\n1,"open\n' + "2,two\n" * 1000)
    found = read(path, input_column="text")
    assert bad_kinds(found) == {2: "malformed"}
    assert len(found) == 1001


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("text,id,text\n", "column 'text' twice"), ('id,"text\n1,one\n', "line 1: a quote is not closed"),
        ("\n", "no header line"), ("", "no header line"),
    ],
)  # fmt: skip
def test_a_header_that_names_no_columns_or_one_twice(tmp_path, header, message):
    path = tmp_path / "in.csv"
    path.write_text(header)
    with pytest.raises(SetupError, match=message):
        inputs(path, input_column="text")


@pytest.mark.parametrize("again", ["id,text", "\ufeffid,text", "id, text ", '\ufeff"id","text"'])
def test_a_csv_header_again_is_found_with_a_mark_or_spaces(tmp_path, again):
    path = tmp_path / "in.csv"
    path.write_text(f"id,text\n1,a\n{again}\n2,b\n", encoding="utf-8")
    assert [row.line for row in open_source(str(path)).rows() if row.problem] == [3]


def test_a_wide_file_names_some_of_its_columns(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text(",".join(f"c{number}" for number in range(40_000)) + "\n")
    with pytest.raises(SetupError, match="the columns are: c0, c1, .*c49 and 39950 more$"):
        inputs(path)
