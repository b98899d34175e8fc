"""What the records of a command are in the journal and in each format of its output.

A `Layout` is that of one command. `GENERATION` is that of `fastgen-generate`:

- `.txt`: the best output of every record on the line of its number, line breaks within it as spaces. A skipped record
  leaves an empty line.
- `.jsonl`: an object a record; `scores` holds one for each sequence: the library's own for beam search, otherwise the
  summed log-probability of its tokens; null where the decoding mode has none. A skipped record is left out.
- `.parquet`: the same as columns.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastgen.pipeline.records import Result

CHUNK = 1 << 20
# Everything that some program or other takes for the end of a line.
_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_PARQUET_ROWS = 8192


def dumps(value: Any) -> str:
    """Compact JSON that keeps the text readable; values JSON does not know (dates as record ids) become strings."""
    return json.dumps(value, ensure_ascii=False, default=str)


def encode(value: Any) -> bytes:
    """A line of JSON. Half of a surrogate pair, which UTF-8 has no bytes for, becomes its JSON escape."""
    return dumps(value).encode("utf-8", "backslashreplace") + b"\n"


class Layout(ABC):
    """What a record that was not skipped is in the journal and in the output.

    A subclass says what a result holds beside `position`, `line` and `id`, and may have formats of its own.
    """

    fields: tuple[str, ...]
    """The names of what is written of a record, in order, where there is all of it."""
    optional: frozenset[str] = frozenset()
    """Those that are left out of an output without any record."""

    @abstractmethod
    def sound(self, result: Mapping[str, Any]) -> bool:
        """Whether what is read of a result is there, and of the right type."""

    @abstractmethod
    def tokens(self, result: Result) -> int:
        """How many tokens a result counts for in the progress and in the report."""

    @abstractmethod
    def column_types(self) -> dict[str, Any]:
        """The type of pyarrow of each field but the id."""

    def written(self, result: Result) -> dict[str, Any]:
        """The fields of a record as Parquet has them."""
        return {name: result[name] for name in self.fields if name in result}

    def plain(self, result: Result) -> dict[str, Any]:
        """The fields of a record as JSON has them."""
        return self.written(result)

    def header(self, form: str) -> bytes:
        """What a format of lines begins with."""
        return b""

    def line(self, result: Result, form: str) -> bytes:
        """A record, skipped or not, in a format of lines."""
        return b"" if "error" in result else encode(self.plain(result))

    def write(self, path: Path, form: str, results: Iterable[Result], numbered: bool) -> None:
        """Writes a whole output. `numbered` says that every id is an integer; other ids are text in Parquet."""
        if form == "parquet":
            self._write_parquet(path, results, numbered)
            return
        with open(path, "wb", buffering=CHUNK) as handle:
            handle.write(self.header(form))
            handle.writelines(self.line(result, form) for result in results)

    def _write_parquet(self, path: Path, results: Iterable[Result], numbered: bool) -> None:
        import pyarrow
        from pyarrow import parquet

        rows = self._rows(results, numbered)
        some = list(itertools.islice(rows, _PARQUET_ROWS))
        with parquet.ParquetWriter(path, self._schema(some, numbered)) as writer:
            while some:
                writer.write_table(pyarrow.Table.from_pylist(some, schema=writer.schema))
                some = list(itertools.islice(rows, _PARQUET_ROWS))

    def _rows(self, results: Iterable[Result], numbered: bool) -> Iterator[dict[str, Any]]:
        for result in results:
            if "error" not in result:
                row = self.written(result)
                yield row if numbered or row["id"] is None else row | {"id": str(row["id"])}

    def _schema(self, rows: list[dict[str, Any]], numbered: bool) -> Any:
        import pyarrow

        types = {"id": pyarrow.int64() if numbered else pyarrow.string(), **self.column_types()}
        present = rows[0] if rows else set(self.fields) - self.optional
        return pyarrow.schema([(name, types[name]) for name in self.fields if name in present])


def error_line(result: Result) -> bytes:
    """A skipped record as a line of the error file."""
    return encode({name: result[name] for name in ("line", "position", "id", "error", "message")})


def finite(values: Iterable[float]) -> list[float | None]:
    """Numbers as JSON has them, which knows no NaN and no infinity."""
    return [value if math.isfinite(value) else None for value in values]


class Generation(Layout):
    """Texts of sequences, with their scores."""

    fields = ("id", "input", "text", "sequences", "scores", "input_tokens", "output_tokens", "reference", "token_ids")
    optional = frozenset({"reference", "token_ids"})

    def sound(self, result: Mapping[str, Any]) -> bool:
        return (
            type(result.get("text")) is str
            and type(result.get("output_tokens")) is list
            and all(type(count) is int for count in result["output_tokens"])
            and all(type(text) is str for text in result.get("sequences", []))
            and all(type(score) in (int, float) for score in result.get("scores") or [])
        )

    def tokens(self, result: Result) -> int:
        return sum(result["output_tokens"])

    def column_types(self) -> dict[str, Any]:
        import pyarrow

        text, number = pyarrow.string(), pyarrow.int64()
        return {
            "input": text,
            "text": text,
            "sequences": pyarrow.list_(text),
            "scores": pyarrow.list_(pyarrow.float64()),
            "input_tokens": number,
            "output_tokens": pyarrow.list_(number),
            "reference": text,
            "token_ids": pyarrow.list_(pyarrow.list_(number)),
        }

    def written(self, result: Result) -> dict[str, Any]:
        fields = super().written(result)
        if fields.get("scores"):
            fields["scores"] = finite(fields["scores"])
        return fields

    def line(self, result: Result, form: str) -> bytes:
        if form == "txt":
            return (_LINE_BREAK.sub(" ", result.get("text", "")) + "\n").encode("utf-8", "replace")
        return super().line(result, form)


GENERATION = Generation()
