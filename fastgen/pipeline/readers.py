"""Reads inputs row by row, in all formats.

A reader does not stop at a bad row: it yields the row with a `problem` and the line number in the file, and goes on.
No reader holds more than a small part of the file in memory.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import json
import logging
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.errors import PipelineError, Problem, SetupError, check_installed, explained, one_line
from fastgen.pipeline.settings import STANDARD_STREAM, TEXT_SUFFIXES

CHUNK = 1 << 20
# Counting the records of a CSV file means parsing all of it. Larger files are not counted; the progress shows no total.
COUNT_CSV_UP_TO = 64 << 20
# Limit for the characters of a text, and the bytes of a line. It would take minutes to find that a longer text is too
# long for any model, and a file without line ends, or with an unclosed quote, would be read into memory.
LONGEST_TEXT = 1 << 26
# A JSON lines file has no header. Its columns are those of its first rows, up to this many, or of its first readable
# one.
PEEK_ROWS = 100
ROWS_AT_ONCE = 1024
# First bytes of files that are not text, and what to do with them. Arrow's streams begin with a marker.
_NO_TEXT = {
    b"PAR1": "is Parquet: give it as a file named .parquet, or with --input-format parquet",
    b"ARROW1": "is Arrow: convert it to Parquet",
    b"\xff\xff\xff\xff": "is Arrow: convert it to Parquet",
}
_COMPRESSED = re.compile(rb"\x1f\x8b|BZh[1-9]1AY&|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04")
# The first bytes of files in other encodings: a mark (one of UTF-32's begins with one of UTF-16's), or the zeros in
# their ASCII characters.
_ENCODINGS = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|[^\0]\0\0\0|\0\0\0[^\0]"),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]"),
}


@dataclass(frozen=True)
class Row:
    """One row as it is stored: its fields, or the problem in reading it. `line` counts from 1."""

    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem | None = None


class FileSource:
    """A file, or standard input. This class reads text: each line is an input. Each other format is a subclass."""

    columns: list[str] | None = ["text"]
    needed: list[str] | None = None
    """Columns that are sufficient, for formats in which others cost time."""
    has_rows = True
    """False if there are no rows, and therefore no known columns."""
    start = b""
    """The first bytes of a file of the format."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == STANDARD_STREAM:
            return
        # A file is read several times: to identify it, to count its records, and to read them. A pipe gives data once.
        if os.path.exists(name) and not os.path.isfile(name):
            raise SetupError(f"cannot read {name}: it is not a regular file (- reads standard input)")
        try:
            with open(name, "rb") as handle:
                start = handle.read(8)
        except OSError as error:
            raise SetupError(f"cannot read {name}: {error.strerror or error}") from error
        if not self.start or not start.startswith(self.start):
            _check_start(name, start)

    def open(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """Opens the file's bytes; standard input is never closed."""
        if self.name != STANDARD_STREAM:
            return open(self.name, "rb")
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return open(sys.stdin.fileno(), "rb", closefd=False)
        return contextlib.nullcontext(sys.stdin.buffer)  # a stand-in without a descriptor

    def rows(self) -> Iterator[Row]:
        r"""Yields the rows in order: here lines, as `text`. Only \n ends a line, not Unicode's other line ends."""
        with self.open() as handle:
            for number in itertools.count(1):
                line = handle.readline(LONGEST_TEXT + 1)
                if not line:
                    return
                if len(line) > LONGEST_TEXT:
                    while line and not line.endswith(b"\n"):
                        line = handle.readline(CHUNK)
                    yield Row(number, problem=Problem("malformed", f"the line is longer than {LONGEST_TEXT} bytes"))
                    continue
                if number == 1:
                    # Standard input could not be checked earlier.
                    _check_start("standard input", line)
                    line = line.removeprefix(b"\xef\xbb\xbf")
                try:
                    row = Row(number, {"text": line.rstrip(b"\n").removesuffix(b"\r").decode("utf-8")})
                except UnicodeDecodeError as error:
                    row = Row(number, problem=Problem("invalid-utf8", f"the line is not UTF-8: {error.reason}"))
                yield row

    def count(self) -> int | None:
        """Returns the number of rows; None if counting would take long, and for standard input, which is read once."""
        if self.name == STANDARD_STREAM:
            return None
        lines, last = 0, b"\n"
        with open(self.name, "rb") as handle:
            while chunk := handle.read(CHUNK):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
        return lines + (last != b"\n")

    def identity(self) -> dict[str, Any]:
        """Returns what the journal keeps to refuse another input on resuming: the size, and a digest of the whole file.

        A digest takes a second for a gigabyte, which a model reads for hours.
        """
        if self.name == STANDARD_STREAM:
            return {"name": STANDARD_STREAM}
        size = os.path.getsize(self.name)
        return {"name": os.path.abspath(self.name), "size": size, "digest": digest(Path(self.name))}


class JsonLinesSource(FileSource):
    """A JSON lines file: each line is an object, or a string."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._stream = self._parsed()
        self._peeked = list(itertools.islice(self._stream, PEEK_ROWS))
        if all(row.problem for row in self._peeked):  # they are reported with the others, as rows without a text
            behind = _up_to_readable(self._stream)  # rows of a file are read again, so that few need to be kept
            self._peeked += behind if name == STANDARD_STREAM else (row for row in behind if not row.problem)
        self.has_rows = bool(self._peeked)
        self.columns = list(dict.fromkeys(name for row in self._peeked for name in row.fields)) or None

    def look_for_columns(self) -> None:
        """Finds the columns of all rows, which takes a pass over the file. For standard input they stay as known."""
        if self.name != STANDARD_STREAM:
            self.columns = list(dict.fromkeys(name for row in self._parsed() for name in row.fields)) or None

    def rows(self) -> Iterator[Row]:
        # Standard input gives its rows once.
        return itertools.chain(self._peeked, self._stream) if self.name == STANDARD_STREAM else self._parsed()

    def _parsed(self) -> Iterator[Row]:
        for row in super().rows():
            yield row if row.problem else _json_row(row.line, row.fields["text"])


def _up_to_readable(rows: Iterator[Row]) -> Iterator[Row]:
    """Yields rows up to the first one without a problem, and no row behind it."""
    for row in rows:
        yield row
        if not row.problem:
            return


def _json_row(line: int, text: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.strip():
            return Row(line, problem=Problem("empty", "the line is empty"))
        return Row(line, problem=Problem("malformed", f"the line is not JSON: {one_line(error)}"))
    if isinstance(value, str):
        value = {"text": value}
    if isinstance(value, dict):
        return Row(line, value)
    return Row(line, problem=Problem("wrong-type", f"the line is a {type(value).__name__}, not an object"))


class CsvSource(FileSource):
    """Comma- or tab-separated values with a header line.

    Read by the csv module under its strict rules. (pyarrow.csv accepts unclosed quotes, numbers rows instead of lines,
    and gives up at a cell that is longer than its block.) A record that cannot be parsed is bad on its first line, and
    reading goes on with the line after that one: an unclosed quote costs one line, not the file. Blank lines at the
    end, which exports and editors leave, are no records.
    """

    def __init__(self, name: str, delimiter: str = ",") -> None:
        super().__init__(name)
        self._delimiter = delimiter
        with open(name, "rb") as handle:
            # If lines end with \n, a carriage return in a row does not end it. Otherwise it may be the line end.
            self._newline = "\n" if b"\n" in handle.read(CHUNK) else ""
        csv.field_size_limit(LONGEST_TEXT)
        header = next(self._records(), (1, []))[1]
        if isinstance(header, Problem):
            raise SetupError(f"{name}, line 1: {header.message}")
        if not header:
            raise SetupError(f"{name} has no header line")
        self.columns: list[str] = header
        _check_names(name, header)

    def _records(self) -> Iterator[tuple[int, list[str] | Problem]]:
        """Yields the line on which each record starts, and its cells."""
        # Bytes that are not UTF-8 come through as surrogates, which the check of the text finds.
        with open(self.name, encoding="utf-8-sig", errors="surrogateescape", newline=self._newline) as text:
            taken: list[str] = []  # lines of the current record, which may have to be read again
            again: deque[str] = deque()

            def lines() -> Iterator[str]:
                while found := again.popleft() if again else text.readline():
                    taken.append(found)
                    yield found

            reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
            line = 1
            while True:
                taken.clear()
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fault = f"a quote is not closed, or text follows it: {one_line(error)}"
                    if "new-line character" in fault:
                        fault = "there is a carriage return outside quotes"
                    yield line, Problem("malformed", fault)
                    again.extendleft(reversed(taken[1:]))
                    reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
                    line += 1
                else:
                    yield line, cells
                    line += len(taken)

    def _records_to_the_last(self) -> Iterator[tuple[int, list[str] | Problem]]:
        """Yields the records before the blank lines at the end of the file."""
        blank = range(0)  # consecutive empty lines before the current position
        for line, cells in self._records():
            if cells == []:
                blank = range(blank.start if blank else line, line + 1)
                continue
            yield from ((empty, []) for empty in blank)
            blank = range(0)
            yield line, cells

    def rows(self) -> Iterator[Row]:
        for line, cells in itertools.islice(self._records_to_the_last(), 1, None):
            if isinstance(cells, Problem):
                yield Row(line, problem=cells)
            else:
                yield Row(line, dict(zip(self.columns, cells, strict=False)), self._problem(cells))

    def _problem(self, cells: list[str]) -> Problem | None:
        if not cells:
            return Problem("empty", "the line is empty")
        if len(cells) != len(self.columns):
            return Problem("malformed", f"number of cells: {len(cells)}, of columns: {len(self.columns)}")
        if len(cells) > 1 and list(map(_bare, cells)) == list(map(_bare, self.columns)):
            # Two files in one. With a single column this may be a text.
            return Problem("malformed", "the header again")
        return None

    def count(self) -> int | None:
        return None if os.path.getsize(self.name) > COUNT_CSV_UP_TO else sum(1 for _ in self._records_to_the_last()) - 1


def _bare(cell: str) -> str:
    """Returns a cell without an export's byte order mark, and without surrounding spaces and quotes."""
    return cell.strip("\ufeff \t").strip('"')


def _rows_of(tables: Iterable[Any]) -> Iterator[Row]:
    line = 0
    for table in tables:
        for values in zip(*map(_values, table.columns), strict=True):
            line += 1
            problem = next((value for value in values if isinstance(value, Problem)), None)
            fields = {} if problem else dict(zip(table.schema.names, values, strict=True))
            yield Row(line, fields, problem)


def _values(column: Any) -> list[Any]:
    """Returns the values of a column, with a `Problem` for each one that Python cannot hold."""
    try:
        return column.to_pylist()
    except Exception:
        return [_value(cell) for cell in column]


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return Problem("invalid-utf8", f"a value is not UTF-8: {error.reason}")
    except Exception as error:
        return Problem("malformed", f"a value cannot be read: {one_line(error)}")


class ParquetSource(FileSource):
    start = b"PAR1"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        check_installed("pyarrow", "reading .parquet")
        from pyarrow import parquet

        with explained(f"cannot read {name} as Parquet"):
            self._file = parquet.ParquetFile(name)
        self.columns = list(self._file.schema_arrow.names)
        _check_names(name, self.columns)

    def rows(self) -> Iterator[Row]:
        line = 0
        try:
            for row in _rows_of(self._file.iter_batches(batch_size=ROWS_AT_ONCE, columns=self.needed)):
                line = row.line
                yield row
        except OSError as error:
            raise PipelineError(f"cannot read {self.name} after record {line}: {one_line(error)}") from error

    def count(self) -> int | None:
        return int(self._file.metadata.num_rows)


class DatasetSource:
    """A data set of the `datasets` library: a hub name, a directory of data files, or one saved with save_to_disk."""

    has_rows = True

    def __init__(self, name: str, config: str | None, split: str | None) -> None:
        self.name, self._config, self._split = name, config, split
        check_installed("datasets", "reading data sets")
        import datasets

        datasets.utils.logging.set_verbosity_error()
        quiet_hub()
        datasets.disable_progress_bars()
        saved = any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json"))
        with explained(f"{name} is neither a file nor a data set that loads"):
            data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
        self._data = self._choose_split(data) if isinstance(data, dict) else data
        self.columns = list(self._data.column_names)
        self.needed: list[str] | None = None

    def _choose_split(self, splits: Mapping[str, Any]) -> Any:
        usual = ["test", "validation", *(splits if len(splits) == 1 else ())]
        chosen = self._split
        if chosen is None:
            chosen = next((name for name in usual if name in splits), None)
        if chosen is None or chosen not in splits:
            asked = f"has no split {chosen!r}" if chosen else "needs a split"
            raise SetupError(f"data set {self.name} {asked}: there are {', '.join(splits)}")
        self._split = chosen
        return splits[chosen]

    def rows(self) -> Iterator[Row]:
        data = self._data.select_columns(self.needed) if self.needed else self._data
        return _rows_of(data.with_format("arrow").iter(batch_size=ROWS_AT_ONCE))

    def count(self) -> int | None:
        return len(self._data)

    def identity(self) -> dict[str, Any]:
        # The library's fingerprint covers what the data set was made from, and how.
        named = {"name": self.name, "config": self._config, "split": self._split}
        fingerprint = getattr(self._data, "_fingerprint", None)
        return named | {"rows": len(self._data), "columns": self.columns, "fingerprint": fingerprint}


Source = FileSource | DatasetSource


def open_source(path: str, input_format: str = "auto", config: str | None = None, split: str | None = None) -> Source:
    """Returns the reader for INPUT. Its format is given, or follows from its name and from what it is on disk."""
    chosen = input_format
    suffix = TEXT_SUFFIXES.get(Path(path).suffix.lower())
    if chosen == "auto":
        if path == STANDARD_STREAM:
            chosen = "txt"
        elif Path(path).is_dir():
            chosen = "dataset"
        elif Path(path).exists():
            chosen = suffix or _text(path)
        elif suffix or path.startswith((".", "/", "~")) or Path(path).suffix or path.count("/") > 1:
            raise SetupError(f"cannot read {path}: no such file")
        else:
            chosen = "dataset"
    if path == STANDARD_STREAM and chosen not in ("txt", "jsonl"):
        raise SetupError(f"standard input is read as txt or jsonl, not as {chosen}")
    if chosen == "dataset":
        return DatasetSource(path, config, split)
    if chosen == "tsv":
        return CsvSource(path, delimiter="\t")
    return {"txt": FileSource, "jsonl": JsonLinesSource, "csv": CsvSource, "parquet": ParquetSource}[chosen](path)


def _text(path: str) -> str:
    """Returns the format of a file whose name shows none. Raises `SetupError` for .json, whose layout is unknown."""
    if Path(path).suffix.lower() == ".json":
        raise SetupError(
            f"{path} may be JSON in any layout: where each line is an object, name it .jsonl or give --input-format "
            "jsonl (txt reads lines as they are; jq -c '.[]' makes lines of a list)"
        )
    return "txt"


def quiet_hub() -> None:
    """Silences messages about each attempt to reach the hub. If all fail, the error says so."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _check_names(path: str, columns: list[str]) -> None:
    """Raises `SetupError` if two columns have one name, unless it is empty, as for a spreadsheet's empty columns."""
    counts = Counter(columns)
    repeated = next((name for name in counts if name and counts[name] > 1), None)
    if repeated is not None:
        raise SetupError(f"{path} has column {repeated!r} twice")


def _check_start(path: str, start: bytes) -> None:
    """Raises `SetupError` if the first bytes show that the file is not UTF-8 text."""
    for magic, remedy in _NO_TEXT.items():
        if start.startswith(magic):
            raise SetupError(f"{path} {remedy}")
    if _COMPRESSED.match(start):
        raise SetupError(f"{path} is compressed: decompress it first, or through a pipe into standard input (-)")
    found = next((name for name, pattern in _ENCODINGS.items() if pattern.match(start)), None)
    if found:
        raise SetupError(f"{path} is {found}: convert it to UTF-8 (iconv -f {found} -t UTF-8)")


def digest(path: Path) -> str:
    """Returns a digest of a file's bytes, in hexadecimal, which identifies an input, or an output in place."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as handle:
        while chunk := handle.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()
