"""The form of a command's records in the journal and in each format of its output.

Each command has a `Layout`. `GENERATION` is that of `fastgen-generate`:

- `.txt`: the best output of every record on the line of its number, with line breaks in it as spaces. A skipped record
  leaves an empty line.
- `.jsonl`: an object per record; `scores` holds one for each sequence: the library's own for beam search, otherwise the
  summed log-probability of its tokens; null if the decoding mode has none. A skipped record is left out.
- `.csv`, `.tsv`: the best output of a record, its score and its counts of tokens. A skipped record is left out.
- `.parquet`: the same as `.jsonl`, as columns.

That of vectors and labels:

- `.npy`: one array [records, size]. The row of a skipped record is NaN, so that row n is record n.
- `.jsonl`, `.csv`: a record per line. Skipped records are left out.
- `.parquet`: the same as columns.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.errors import SetupError

Result = dict[str, Any]
"""One record in the journal: `position`, `line` and `id`, and either `text` and what belongs to it, or `error` (the
kind) and `message`.
"""

CHUNK = 1 << 20
# Everything that some program treats as the end of a line.
_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_PARQUET_ROWS = 8192
_EXACT = 2**53  # a float holds every integer up to this one
DELIMITERS = {"csv": ",", "tsv": "\t"}


def dumps(value: Any) -> str:
    """Returns compact JSON with readable text; values that JSON does not know (dates as record ids) become strings."""
    return json.dumps(value, ensure_ascii=False, default=str)


def read_back(value: Any) -> Any:
    """Returns a value as it is after a round trip through JSON."""
    return json.loads(dumps(value))


def encode(value: Any) -> bytes:
    """Returns a line of JSON. Half of a surrogate pair, which UTF-8 cannot represent, becomes its JSON escape."""
    return dumps(value).encode("utf-8", "backslashreplace") + b"\n"


def cells(values: Iterable[Any], delimiter: str = ",") -> bytes:
    """Returns a line of a CSV file. Values that are neither text nor numbers are written as JSON."""
    line = io.StringIO()
    # With both characters as line terminator, every release of Python quotes a field that contains one of them.
    csv.writer(line, delimiter=delimiter, lineterminator="\r\n").writerow(map(_cell, values))
    return line.getvalue()[:-2].encode("utf-8", "backslashreplace") + b"\n"


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else dumps(value)


class Layout:
    """The form of a record that was not skipped, in the journal and in the output.

    A subclass defines what a result holds beside `position`, `line` and `id`, and may have formats of its own.
    """

    fields: tuple[str, ...]
    """The names of a record's output fields, in order, if it has all of them."""
    optional: frozenset[str] = frozenset()
    """Fields that are left out of an output without any record."""
    has_id = True
    """Whether the column `id` holds the records' ids."""
    has_numbers = True
    """Whether all ids are integers; otherwise they are text in Parquet."""

    def tokens(self, result: Result) -> int:
        """Returns how many tokens a result counts for in the progress and in the report."""
        return int(result["input_tokens"])

    def column_types(self) -> dict[str, Any]:
        """Returns the pyarrow type of each field except the id."""
        import pyarrow

        text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
        return {
            **dict.fromkeys(("input", "text", "reference", "pair", "label"), text),
            **dict.fromkeys(("sequences", "labels"), pyarrow.list_(text)),
            **{"input_tokens": number, "output_tokens": pyarrow.list_(number), "truncated": pyarrow.bool_()},
            **{"score": real, "scores": pyarrow.list_(real), "token_ids": pyarrow.list_(pyarrow.list_(number))},
        }

    def written(self, result: Result) -> dict[str, Any]:
        """Returns the fields of a record for Parquet."""
        return {name: result[name] for name in self.fields if name in result}

    def plain(self, result: Result) -> dict[str, Any]:
        """Returns the fields of a record for JSON."""
        return self.written(result)

    def look(self, results: Iterable[Result]) -> None:
        """Examines all records before any is written in Parquet, whose columns have types."""
        self.has_numbers = all("error" in result or type(result["id"]) is int for result in results)

    def header(self, form: str) -> bytes:
        """Returns the beginning of a line format."""
        return b""

    def line(self, result: Result, form: str) -> bytes:
        """Returns a record, skipped or not, in a line format."""
        return b"" if "error" in result else encode(self.plain(result))

    def write(self, path: Path, form: str, results: Iterable[Result]) -> None:
        """Writes a whole output."""
        if form == "parquet":
            self._write_parquet(path, results)
            return
        with open(path, "wb", buffering=CHUNK) as handle:
            handle.write(self.header(form))
            handle.writelines(self.line(result, form) for result in results)

    def _write_parquet(self, path: Path, results: Iterable[Result]) -> None:
        import pyarrow
        from pyarrow import parquet

        rows = (self._row(result) for result in results if "error" not in result)
        some = list(itertools.islice(rows, _PARQUET_ROWS))
        with parquet.ParquetWriter(path, self._schema(some)) as writer:
            while some:
                writer.write_table(pyarrow.Table.from_pylist(some, schema=writer.schema))
                some = list(itertools.islice(rows, _PARQUET_ROWS))

    def _row(self, result: Result) -> dict[str, Any]:
        row = self.written(result)
        if self.has_id and not self.has_numbers and row["id"] is not None:
            row["id"] = str(row["id"])
        return row

    def _schema(self, rows: list[dict[str, Any]]) -> Any:
        import pyarrow

        types = {"id": pyarrow.int64() if self.has_numbers else pyarrow.string(), **self.column_types()}
        present = rows[0] if rows else set(self.fields) - self.optional
        return pyarrow.schema([(name, types[name]) for name in self.fields if name in present])


def error_line(result: Result) -> bytes:
    """Returns a skipped record as a line of the error file."""
    return encode({name: result[name] for name in ("line", "position", "id", "error", "message")})


def finite(values: Iterable[float]) -> list[float | None]:
    """Converts numbers to JSON, which has no NaN and no infinity."""
    return [value if math.isfinite(value) else None for value in values]


class Generation(Layout):
    """Texts of sequences, with their scores.

    Args:
        kept: columns of the input that are also written, in place of the id, the input and the reference.
        output_column: the name of the column of texts.
        with_reference, with_ids: whether records have references, and token ids.

    Raises:
        SetupError: a column that is kept has the name of another one.
    """

    fields: tuple[str, ...] = (
        "id", "input", "text", "sequences", "scores", "input_tokens", "output_tokens", "reference", "token_ids",
    )  # fmt: skip
    optional: frozenset[str] = frozenset({"reference", "token_ids"})
    _OF_INPUT = ("id", "input", "reference")

    def __init__(
        self,
        kept: Sequence[str] = (),
        output_column: str = "text",
        with_reference: bool = False,
        with_ids: bool = False,
    ) -> None:
        self._kept, self._text, self.has_id = tuple(kept), output_column, not kept
        self.optional = Generation.optional - {*kept}
        self._types: dict[str, Any] = {}
        self._as_json: set[str] = set()
        own = [output_column if name == "text" else name for name in Generation.fields]
        if kept:
            own = [name for name in own if name not in self._OF_INPUT]
        self.fields = (*kept, *own)
        reference, ids = with_reference and not kept, with_ids
        beside = ("score", "input_tokens", "output_tokens", *["reference"] * reference, *["token_ids"] * ids)
        self._cells = (*(kept or ("id", "input")), output_column, *beside)
        for name in (*self.fields, *self._cells):
            if self.fields.count(name) > 1 or self._cells.count(name) > 1:
                remedy = "name it otherwise (--output-column)" if name == output_column else "leave it out of --keep"
                raise SetupError(f"column {name!r} would be twice in the output: {remedy}")

    def tokens(self, result: Result) -> int:
        return sum(result["output_tokens"])

    def column_types(self) -> dict[str, Any]:
        types = super().column_types()
        kept = {name: self._types.get(name) or types["text"] for name in self._kept}
        return types | {self._text: types["text"]} | kept

    def look(self, results: Iterable[Result]) -> None:
        """Finds the type of each kept column: the one that holds all its values, or JSON in a text."""
        if not self._kept:
            super().look(results)
            return
        import pyarrow

        found: dict[str, Any] = dict.fromkeys(self._kept, pyarrow.null())
        large = dict.fromkeys(self._kept, False)
        rows = (result["kept"] for result in results if "error" not in result)
        while some := list(itertools.islice(rows, _PARQUET_ROWS)):
            for name, values in zip(self._kept, zip(*some, strict=True), strict=True):
                large[name] |= any(type(value) is int and abs(value) > _EXACT for value in values)
                if found[name] is not None:
                    found[name] = _common(found[name], values)
                if large[name] and found[name] == pyarrow.float64():
                    found[name] = None
        self._types = {name: None if kind == pyarrow.null() else kind for name, kind in found.items()}
        self._as_json = {name for name, kind in found.items() if kind is None}

    def written(self, result: Result) -> dict[str, Any]:
        left_out = self._OF_INPUT if self._kept else ()
        kept = dict(zip(self._kept, result["kept"], strict=True)) if self._kept else {}
        own = {name: result[name] for name in Generation.fields if name in result and name not in left_out}
        if own.get("scores"):
            own["scores"] = finite(own["scores"])
        return kept | {self._text if name == "text" else name: value for name, value in own.items()}

    def header(self, form: str) -> bytes:
        return cells(self._cells, DELIMITERS[form]) if form in DELIMITERS else b""

    def line(self, result: Result, form: str) -> bytes:
        if form == "txt":
            return (_LINE_BREAK.sub(" ", result.get("text", "")) + "\n").encode("utf-8", "replace")
        if form not in DELIMITERS or "error" in result:
            return super().line(result, form)
        fields = self.written(result)
        fields["score"] = (fields.get("scores") or [None])[0]
        fields["output_tokens"] = fields["output_tokens"][0]
        return cells([fields.get(name) for name in self._cells], DELIMITERS[form])

    def _row(self, result: Result) -> dict[str, Any]:
        row = super()._row(result)
        return row | {name: _cell(row[name]) for name in self._as_json}


GENERATION = Generation()


def _common(kind: Any, values: Sequence[Any]) -> Any:
    """Returns the pyarrow type that holds values of a type and these values; None if there is none."""
    import pyarrow

    try:
        both = [pyarrow.schema([("x", each)]) for each in (kind, pyarrow.array(values).type)]
        found = pyarrow.unify_schemas(both, promote_options="permissive").field("x").type
    except (pyarrow.ArrowException, OverflowError):
        return None
    return None if _has_empty_struct(found) else found


def _has_empty_struct(kind: Any) -> bool:
    """Whether a type contains an object without fields, which Parquet cannot hold."""
    import pyarrow

    parts = [kind.field(number).type for number in range(kind.num_fields)]
    return (pyarrow.types.is_struct(kind) and not parts) or any(map(_has_empty_struct, parts))


class Vectors(Layout):
    """A vector for each text.

    Args:
        size: elements of a vector.
        dtype: float32 or float16.
    """

    fields = ("id", "input", "vector", "input_tokens", "truncated")

    def __init__(self, size: int, dtype: str) -> None:
        import numpy

        self._size, self.dtype = size, numpy.dtype(dtype).newbyteorder("<")

    def of_row(self, numbers: Any) -> Result:
        """Returns a vector's bytes in base64: exact and short for the journal."""
        return {"vector": base64.b64encode(numbers.tobytes()).decode("ascii")}

    def column_types(self) -> dict[str, Any]:
        import pyarrow

        number = pyarrow.from_numpy_dtype(self.dtype.newbyteorder("="))
        return super().column_types() | {"vector": pyarrow.list_(number)}

    def written(self, result: Result) -> dict[str, Any]:
        return super().written(result) | {"vector": self._vector(result)}

    def plain(self, result: Result) -> dict[str, Any]:
        return super().written(result) | {"vector": self._vector(result).tolist()}

    def write(self, path: Path, form: str, results: Iterable[Result]) -> None:
        if form != "npy":
            super().write(path, form, results)
            return
        with open(path, "wb", buffering=CHUNK) as handle:
            self._write_array(handle, results)

    def _write_array(self, handle: BinaryIO, results: Iterable[Result]) -> None:
        """Writes the array row by row. The number of rows is known at the end, and the header has room for it."""
        import numpy

        start = self._header(0)
        handle.write(start)
        missing = numpy.full(self._size, numpy.nan, self.dtype).tobytes()
        rows = 0
        for result in results:
            handle.write(missing if "error" in result else base64.b64decode(result["vector"]))
            rows += 1
        end = self._header(rows)
        assert len(end) == len(start), "NumPy leaves room in the header for the number of rows"
        handle.seek(0)
        handle.write(end)

    def _header(self, rows: int) -> bytes:
        from numpy.lib import format as npy

        header = io.BytesIO()
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": (rows, self._size)}
        npy.write_array_header_1_0(header, about)
        return header.getvalue()

    def _vector(self, result: Result) -> Any:
        import numpy

        return numpy.frombuffer(base64.b64decode(result["vector"]), self.dtype)


class Labels(Layout):
    """Labels with their scores, best first. `label` and `score` are the first ones.

    Args:
        labels: the model's labels.
        count: how many are written for each record.
    """

    dtype = "float32"
    fields = ("id", "input", "pair", "label", "score", "labels", "scores", "input_tokens", "truncated")
    optional = frozenset({"pair"})

    def __init__(self, labels: Sequence[str], count: int, with_pair: bool) -> None:
        self._labels, self._count = labels, count
        pair = ("pair",) if with_pair else ()
        numbered = [(f"label_{number}", f"score_{number}") for number in range(2, count + 1)]
        self._columns = ("id", "input", *pair, "label", "score", *(name for both in numbered for name in both))

    def of_row(self, numbers: Any) -> Result:
        """Returns the best labels with their scores; equal scores keep the model's order."""
        scores = numbers.tolist()
        best = sorted(range(len(scores)), key=lambda label: (-scores[label], label))[: self._count]
        return {"labels": [self._labels[label] for label in best], "scores": [scores[label] for label in best]}

    def written(self, result: Result) -> dict[str, Any]:
        return super().written(result | {"label": result["labels"][0], "score": result["scores"][0]})

    def header(self, form: str) -> bytes:
        return cells(self._columns) if form == "csv" else b""

    def line(self, result: Result, form: str) -> bytes:
        if form != "csv" or "error" in result:
            return super().line(result, form)
        pair = [result["pair"]] if "pair" in self._columns else []
        best = [value for both in zip(result["labels"], result["scores"], strict=True) for value in both]
        return cells([result["id"], result["input"], *pair, *best])
