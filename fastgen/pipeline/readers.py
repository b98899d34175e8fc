"""Reading inputs, one row at a time, whatever they are stored as.

A reader never stops at a bad row: it yields the row with an `error`, so that the caller can report it under the
line number that a person would look up, and go on. Nothing here holds more than a chunk of the file in memory.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.settings import STANDARD_STREAM, TEXT_SUFFIXES, Settings

CHUNK = 1 << 20
# Counting the records of a CSV file means parsing all of it; beyond this size the progress bar does without a total.
COUNT_CSV_UP_TO = 64 << 20
# A JSON lines file has no schema: its columns are those of this many first rows.
PEEK_ROWS = 100


@dataclass(frozen=True)
class Problem:
    """Why a record is skipped: a short kind for programs and a message for people."""

    kind: str
    message: str


@dataclass(frozen=True)
class Row:
    """One row as stored: its fields, or the problem that kept it from being read."""

    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem | None = None


@dataclass(frozen=True)
class Record:
    """One input. `position` counts records from 0; `line` is where a person finds it, counted from 1."""

    position: int
    line: int
    id: Any
    text: str
    reference: str | None = None


@dataclass(frozen=True)
class BadRecord:
    """An input that is skipped."""

    position: int
    line: int
    id: Any
    problem: Problem


class Source:
    """Rows from one place. Subclasses say how they are stored."""

    name: str
    columns: list[str] | None = None

    def rows(self) -> Iterator[Row]:
        """The rows in order."""
        raise NotImplementedError

    def count(self) -> int | None:
        """How many rows there are, where that can be known cheaply."""
        return None

    def identity(self) -> dict[str, Any]:
        """What tells this input from another one, for the journal."""
        return {"name": self.name}


class FileSource(Source):
    """A file, or standard input."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.path = path
        if path != STANDARD_STREAM:
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise SetupError(f"cannot read {path}: {error.strerror or error}") from error

    def open(self) -> BinaryIO:
        """The bytes of the file; standard input is never closed."""
        if self.path == STANDARD_STREAM:
            return open(sys.stdin.fileno(), "rb", closefd=False) if _has_descriptor(sys.stdin) else sys.stdin.buffer
        return open(self.path, "rb")

    def identity(self) -> dict[str, Any]:
        """Size and a digest of both ends: cheap for files of any size, and indifferent to copies and dates."""
        if self.path == STANDARD_STREAM:
            return {"name": STANDARD_STREAM}
        size = os.path.getsize(self.path)
        digest = hashlib.sha256()
        with open(self.path, "rb") as handle:
            digest.update(handle.read(CHUNK))
            if size > CHUNK:
                handle.seek(max(CHUNK, size - CHUNK))
                digest.update(handle.read(CHUNK))
        return {"name": os.path.abspath(self.path), "size": size, "digest": digest.hexdigest()[:32]}

    def count_lines(self) -> int | None:
        """Lines in the file; None for standard input, which can be read only once."""
        if self.path == STANDARD_STREAM:
            return None
        lines, last = 0, b"\n"
        with open(self.path, "rb") as handle:
            while chunk := handle.read(CHUNK):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
        return lines + (last != b"\n")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        r"""Numbered lines without their end. Only \n ends a line: the other breaks of Unicode may occur within one."""
        with self.open() as handle:
            for number, line in enumerate(handle, start=1):
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    line = line[3:]
                yield number, line.rstrip(b"\n").removesuffix(b"\r")


class TextSource(FileSource):
    """A sample a line."""

    columns = ["text"]

    def rows(self) -> Iterator[Row]:
        for number, line in self.lines():
            try:
                yield Row(number, {"text": line.decode("utf-8")})
            except UnicodeDecodeError as error:
                yield Row(number, problem=Problem("invalid-utf8", f"the line is not UTF-8: {error.reason}"))

    def count(self) -> int | None:
        return self.count_lines()


class JsonLinesSource(FileSource):
    """A JSON object (or a bare string) a line."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._peeked: list[Row] | None = None
        if path == STANDARD_STREAM:
            self._stream = self._parsed()
            self._peeked = list(itertools.islice(self._stream, PEEK_ROWS))
            first = self._peeked
        else:
            first = list(itertools.islice(self._parsed(), PEEK_ROWS))
        names: dict[str, None] = {}
        for row in first:
            names.update(dict.fromkeys(row.fields))
        self.columns = list(names) or None

    def rows(self) -> Iterator[Row]:
        if self._peeked is None:
            return self._parsed()
        return itertools.chain(self._peeked, self._stream)

    def _parsed(self) -> Iterator[Row]:
        for number, line in self.lines():
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Row(number, problem=Problem("invalid-utf8", f"the line is not UTF-8: {error.reason}"))
            except (ValueError, RecursionError) as error:
                if not line.strip():
                    yield Row(number, problem=Problem("empty", "the line is empty"))
                else:
                    yield Row(number, problem=Problem("malformed", f"the line is not JSON: {one_line(error)}"))
            else:
                if isinstance(value, str):
                    yield Row(number, {"text": value})
                elif isinstance(value, dict):
                    yield Row(number, value)
                else:
                    kind = type(value).__name__
                    yield Row(number, problem=Problem("wrong-type", f"the line is a {kind}, not an object"))

    def count(self) -> int | None:
        return self.count_lines()


class CsvSource(FileSource):
    """Comma- or tab-separated values with a header line."""

    def __init__(self, path: str, delimiter: str = ",") -> None:
        super().__init__(path)
        self.delimiter = delimiter
        # A cell may be a whole document; the limit of the module is 128 KiB.
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        header = next(self._cells(), None)
        if header is None or header[1] is None:
            raise SetupError(f"{path} has no header line")
        self.columns = header[1]

    def _cells(self) -> Iterator[tuple[int, list[str] | None]]:
        """Lines on which records start and their cells; None for a record the module cannot parse."""
        # Bytes that are not UTF-8 come through as surrogates, which the check of the text finds.
        with io.TextIOWrapper(self.open(), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            reader = csv.reader(text, delimiter=self.delimiter)
            while True:
                start = reader.line_num + 1
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    yield start, None
                else:
                    yield start, cells

    def rows(self) -> Iterator[Row]:
        cells = self._cells()
        next(cells)
        for line, values in cells:
            if values is None:
                yield Row(line, problem=Problem("malformed", "the line is not valid CSV"))
            elif values:
                yield Row(line, dict(zip(self.columns or [], values, strict=False)))
            else:
                yield Row(line, problem=Problem("empty", "the line is empty"))

    def count(self) -> int | None:
        if self.path == STANDARD_STREAM or os.path.getsize(self.path) > COUNT_CSV_UP_TO:
            return None
        return sum(1 for _ in self._cells()) - 1


class ParquetSource(FileSource):
    """A Parquet file, read a few row groups' worth of the columns needed at a time."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        parquet = _import("pyarrow.parquet", "pyarrow", "reading .parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except Exception as error:
            raise SetupError(f"cannot read {path} as Parquet: {one_line(error)}") from error
        self.columns = list(self._file.schema_arrow.names)
        self.needed: list[str] | None = None

    def rows(self) -> Iterator[Row]:
        line = 0
        for batch in self._file.iter_batches(batch_size=1024, columns=self.needed):
            names = batch.schema.names
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                line += 1
                yield Row(line, dict(zip(names, values, strict=True)))

    def count(self) -> int | None:
        return int(self._file.metadata.num_rows)


class DatasetSource(Source):
    """A data set of the `datasets` library: a hub name, a directory of data files, or one saved with save_to_disk."""

    def __init__(self, name: str, config: str | None, split: str | None) -> None:
        self.name = name
        self.split = split
        self.config = config
        datasets = _import("datasets", "datasets", "reading data sets")
        datasets.utils.logging.set_verbosity_error()
        quiet_hub()
        datasets.disable_progress_bars()
        saved = any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json"))
        try:
            data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
        except Exception as error:
            raise SetupError(f"{name} is neither a file nor a data set that loads: {one_line(error)}") from error
        if isinstance(data, dict):
            data = self._choose_split(data)
        self._data = data
        self.columns = list(data.column_names)
        self.needed: list[str] | None = None

    def _choose_split(self, splits: Mapping[str, Any]) -> Any:
        if self.split is None:
            self.split = next((name for name in ("test", "validation") if name in splits), None)
            if self.split is None and len(splits) == 1:
                self.split = next(iter(splits))
        if self.split is None or self.split not in splits:
            asked = f"has no split {self.split!r}" if self.split else "needs a split"
            raise SetupError(f"data set {self.name} {asked}: there are {', '.join(splits)}")
        return splits[self.split]

    def rows(self) -> Iterator[Row]:
        data = self._data.select_columns(self.needed) if self.needed else self._data
        line = 0
        for chunk in data.iter(batch_size=1024):
            names = list(chunk)
            for values in zip(*chunk.values(), strict=True):
                line += 1
                yield Row(line, dict(zip(names, values, strict=True)))

    def count(self) -> int | None:
        return len(self._data)

    def identity(self) -> dict[str, Any]:
        # The fingerprint of a data set read from its original files changes with their path and date, so it says more
        # than is wanted here; rows and columns say enough to catch a mistake.
        return {
            "name": self.name,
            "config": self.config,
            "split": self.split,
            "rows": len(self._data),
            "columns": self.columns,
        }


def open_source(path: str, input_format: str = "auto", config: str | None = None, split: str | None = None) -> Source:
    """The reader for INPUT: by its format, its suffix, or what it is on disk."""
    chosen = input_format
    suffix = TEXT_SUFFIXES.get(Path(path).suffix.lower())
    if chosen == "auto":
        if path == STANDARD_STREAM:
            chosen = "txt"
        elif Path(path).is_dir():
            chosen = "dataset"
        elif Path(path).exists():
            chosen = suffix or "txt"
        elif suffix or path.startswith((".", "/", "~")) or Path(path).suffix or path.count("/") > 1:
            raise SetupError(f"cannot read {path}: no such file")
        else:
            chosen = "dataset"
    if path == STANDARD_STREAM and chosen not in ("txt", "jsonl"):
        raise SetupError(f"standard input is read as txt or jsonl, not as {chosen}")
    if chosen == "dataset":
        return DatasetSource(path, config, split)
    if chosen == "csv":
        return CsvSource(path)
    if chosen == "tsv":
        return CsvSource(path, delimiter="\t")
    return {"txt": TextSource, "jsonl": JsonLinesSource, "parquet": ParquetSource}[chosen](path)


def choose_column(source: Source, settings: Settings) -> str:
    """The column that holds the input; a SetupError lists the columns where it is not clear or not there."""
    columns = source.columns or []
    there = f"the columns are: {', '.join(columns)}" if columns else "it has no readable row"
    wanted = settings.input_column
    if wanted is None:
        if isinstance(source, TextSource):
            return "text"
        if len(columns) == 1:
            return columns[0]
        # The layout of translation data sets: {"translation": {"en": ..., "de": ...}}.
        if "translation" in columns and settings.src_lang:
            return f"translation.{settings.src_lang}"
        raise SetupError(f"{source.name}: choose the input column, {there}")
    _check_column(source, wanted, "input column")
    return wanted


def _check_column(source: Source, wanted: str, what: str) -> None:
    columns = source.columns or []
    if wanted not in columns and wanted.split(".")[0] not in columns:
        there = f"the columns are: {', '.join(columns)}" if columns else "it has no readable row"
        raise SetupError(f"{source.name} has no {what} {wanted!r}, {there}")


def field_of(fields: Mapping[str, Any], column: str) -> tuple[bool, Any]:
    """Whether a row has a column (`a.b` looks into column `a`), and its value."""
    if column in fields:
        return True, fields[column]
    value: Any = fields
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


class Inputs:
    """The records of a run: input rows with their references, checked one by one."""

    def __init__(self, settings: Settings) -> None:
        self.limit = settings.limit
        self.source = open_source(settings.input, settings.input_format, settings.dataset_config, settings.split)
        self.column = choose_column(self.source, settings)
        self.id_column = settings.id_column
        self.reference_column = settings.reference_column
        for column, what in ((self.id_column, "id column"), (self.reference_column, "reference column")):
            if column:
                _check_column(self.source, column, what)
        if isinstance(self.source, ParquetSource | DatasetSource):
            wanted = (self.column, self.id_column, self.reference_column)
            top = [c if c in (self.source.columns or []) else c.split(".")[0] for c in wanted if c]
            self.source.needed = list(dict.fromkeys(top))
        self.references: Source | None = None
        if settings.reference:
            if settings.reference == STANDARD_STREAM:
                raise SetupError("references cannot be read from standard input")
            if not Path(settings.reference).is_file():
                raise SetupError(f"reference file {settings.reference} does not exist")
            self.references = open_source(settings.reference)
            if not isinstance(self.references, TextSource) and len(self.references.columns or []) != 1:
                raise SetupError(
                    f"reference file {settings.reference} must be text or have a single column; "
                    "references that are a column of the input are chosen with the reference column"
                )
        self.total = self.source.count()
        if self.limit is not None and self.total is not None:
            self.total = min(self.total, self.limit)
        if self.references and self.total is not None:
            there = self.references.count()
            if there is not None and (there < self.total or (self.limit is None and there != self.total)):
                raise SetupError(_mismatch(self.references.name, there, self.total))

    def identity(self) -> dict[str, Any]:
        """What the journal compares before it lets a run be continued."""
        return {
            "input": self.source.identity(),
            "reference": self.references.identity() if self.references else None,
            "columns": [self.column, self.id_column, self.reference_column],
            "limit": self.limit,
        }

    def __iter__(self) -> Iterator[Record | BadRecord]:
        references = self.references.rows() if self.references else None
        position = -1
        for position, row in enumerate(itertools.islice(self.source.rows(), self.limit)):
            reference = None
            if references is not None:
                reference = self._next_reference(references, position)
            yield self._record(position, row, reference)
        if references is not None and self.limit is None and next(references, None) is not None:
            raise SetupError(_mismatch(_name_of(self.references), f"more than {position + 1}", position + 1))

    def _next_reference(self, references: Iterator[Row], position: int) -> str:
        row = next(references, None)
        name = _name_of(self.references)
        if row is None:
            raise SetupError(_mismatch(name, position, f"at least {position + 1}"))
        value = next(iter(row.fields.values()), None)
        # An empty CSV or JSON line is an empty reference, which is allowed.
        if row.problem is not None and row.problem.kind == "empty":
            return ""
        if row.problem is not None or not isinstance(value, str):
            reason = row.problem.message if row.problem else "it is not a string"
            raise SetupError(f"{name}, line {row.line}: {reason}")
        return value

    def _record(self, position: int, row: Row, reference: str | None) -> Record | BadRecord:
        identity: Any = position
        if row.problem is None and self.id_column:
            identity = field_of(row.fields, self.id_column)[1]
            if not isinstance(identity, str | int | float | None):
                identity = str(identity)

        def bad(kind: str, message: str) -> BadRecord:
            return BadRecord(position, row.line, identity, Problem(kind, message))

        if row.problem is not None:
            return BadRecord(position, row.line, identity, row.problem)
        present, text = field_of(row.fields, self.column)
        if not present:
            return bad("missing-column", f"the record has no column {self.column!r}")
        if not isinstance(text, str):
            return bad("wrong-type", f"column {self.column!r} is a {type(text).__name__}, not a string")
        if not _encodable(text):
            return bad("invalid-utf8", "the text is not valid UTF-8")
        if not text.strip():
            return bad("empty", "the text is empty")
        if self.reference_column:
            present, reference = field_of(row.fields, self.reference_column)
            if not isinstance(reference, str):
                return bad("bad-reference", f"column {self.reference_column!r} holds no string")
        return Record(position, row.line, identity, text, reference)


def quiet_hub() -> None:
    """No line for every attempt to reach the hub: if none succeeds, the error says so."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _name_of(source: Source | None) -> str:
    """The name of a source for a message."""
    return source.name if source else ""


def _mismatch(name: str, there: object, wanted: object) -> str:
    return f"reference file {name} has {there} lines but the input has {wanted}"


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _import(module: str, package: str, purpose: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(f"{purpose} needs the package {package}, which is not installed") from error
