"""The output formats, and the two ways in which an output comes about.

- `.txt`: the best output of every record on the line of its number, line breaks within it as spaces. A skipped record
  leaves an empty line.
- `.jsonl`: an object a record; `scores` holds one for each sequence: the library's own for beam search, otherwise the
  summed log-probability of its tokens; null where the decoding mode has none. A skipped record is left out.
- `.parquet`: the same as columns.

Nothing that exists is replaced without `overwrite`, and with it only when the run is complete: a run that ends early
leaves the old output and its error file as they were. The journal goes last, when scores and report are written as
well, and knows which of the files are the run's own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.pipeline import journal
from fastgen.pipeline.errors import RESUMABLE, SetupError, writing
from fastgen.pipeline.journal import Collector, Journal, encode, sync
from fastgen.pipeline.planner import Window
from fastgen.pipeline.postprocess import MetricTotals
from fastgen.pipeline.readers import CHUNK
from fastgen.pipeline.records import Result
from fastgen.pipeline.settings import RunOptions, followed, is_special, unfinished_path

# Everything that some program or other takes for the end of a line.
_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
# Of a record, where there are all of them.
_FIELDS = ("id", "input", "text", "sequences", "scores", "input_tokens", "output_tokens", "reference", "token_ids")
_PARQUET_ROWS = 8192
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ERROR_START = b'{"line": '  # how every line of an error file begins
_JSON_START = b'{\n  "samples": '  # how scores and report begin


def text_line(result: Result) -> bytes:
    """A record as a line of a .txt output."""
    return (_LINE_BREAK.sub(" ", result.get("text", "")) + "\n").encode("utf-8", "replace")


def json_line(result: Result) -> bytes:
    """A record as a line of a .jsonl output; nothing for a skipped one."""
    return b"" if "error" in result else encode(_fields(result))


def error_line(result: Result) -> bytes:
    """A skipped record as a line of the error file."""
    return encode({name: result[name] for name in ("line", "position", "id", "error", "message")})


def _fields(result: Result) -> dict[str, Any]:
    fields = {name: result[name] for name in _FIELDS if name in result}
    if fields.get("scores"):
        # JSON has no NaN and no infinity.
        fields["scores"] = [score if math.isfinite(score) else None for score in fields["scores"]]
    return fields


def _write_lines(path: Path, results: Iterable[Result], line: Callable[[Result], bytes]) -> None:
    with open(path, "wb", buffering=CHUNK) as handle:
        handle.writelines(map(line, results))


def _write_parquet(path: Path, results: Iterable[Result], numbered: bool) -> None:
    """`numbered` says that every id is an integer; other ids are written as text."""
    import pyarrow
    from pyarrow import parquet

    good = (_fields(result) for result in results if "error" not in result)
    rows = good if numbered else (row | {"id": None if row["id"] is None else str(row["id"])} for row in good)
    some = list(itertools.islice(rows, _PARQUET_ROWS))
    with parquet.ParquetWriter(path, _parquet_schema(some, numbered)) as writer:
        while some:
            writer.write_table(pyarrow.Table.from_pylist(some, schema=writer.schema))
            some = list(itertools.islice(rows, _PARQUET_ROWS))


def _parquet_schema(rows: list[dict[str, Any]], numbered: bool) -> Any:
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int64()
    types = [number if numbered else text, text, text, pyarrow.list_(text), pyarrow.list_(pyarrow.float64()), number]
    types += [pyarrow.list_(number), text, pyarrow.list_(pyarrow.list_(number))]
    present = rows[0] if rows else _FIELDS[:-2]
    return pyarrow.schema([(name, kind) for name, kind in zip(_FIELDS, types, strict=True) if name in present])


@dataclass
class Totals:
    """What a finished output amounts to."""

    samples: int = 0
    skipped: int = 0
    tokens: int = 0
    metrics: MetricTotals = field(default_factory=MetricTotals)

    def add(self, result: Result) -> None:
        if "error" in result:
            self.skipped += 1
            return
        self.samples += 1
        self.tokens += sum(result["output_tokens"])
        if result.get("statistics") is not None:
            self.metrics.add(result["statistics"])


class FileOutput:
    """An output file: kept as a journal while the run goes on, written and put in place at its end."""

    def __init__(
        self, settings: RunOptions, identity: dict[str, Any], environment: dict[str, Any] | None = None
    ) -> None:
        check_free(settings)
        self._settings = settings
        self._path = Path(settings.output)
        # Checked again once it is locked: another run may have ended in between.
        check = functools.partial(_check_replaced, settings)
        self.journal = Journal(settings.partial_path, identity, settings.resume, environment, check)
        try:
            unfinished_path(self._path).unlink(missing_ok=True)
            # The errors of this run begin with what an interrupted run has reported; without errors there is no file.
            settings.errors_partial_path.unlink(missing_ok=True)
            self._report(self.journal.errors)
        except BaseException:
            self.journal.close()
            raise

    def _report(self, results: Iterable[Result]) -> None:
        """Report the skipped records among these at once: whoever watches a long run sees its errors as they come."""
        path = self._settings.errors_partial_path
        lines = [error_line(result) for result in results if "error" in result]
        if lines:
            with writing(path, RESUMABLE), open(path, "ab") as handle:
                handle.writelines(lines)

    def window(self, window: Window) -> None:
        self.journal.window(window)
        self._report(bad.result() for bad in window.bad)

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        self.journal.batch(window, index, results)
        self._report(results)

    def finish(self) -> Totals:
        """Write the output from the journal and put it in place. The journal stays until `complete`."""
        totals = Totals()
        form = self._settings.resolved_output_format
        errors, errors_partial = self._settings.errors_path, self._settings.errors_partial_path
        failed: list[Result] = []

        def counted() -> Iterator[Result]:
            for result in self.journal.results():
                totals.add(result)
                if "error" in result:
                    failed.append(result)
                yield result

        with placed(self._path, self.journal) as unfinished:
            if form == "parquet":
                numbered = all("error" in result or type(result["id"]) is int for result in self.journal.results())
                _write_parquet(unfinished, counted(), numbered)
            else:
                _write_lines(unfinished, counted(), text_line if form == "txt" else json_line)
            if failed:
                # In input order now, whatever the order in which they were met.
                _write_lines(errors_partial, failed, error_line)
                sync(errors_partial)
                os.replace(errors_partial, errors)
            elif self._settings.overwrite:
                # Those of the output that is replaced.
                errors.unlink(missing_ok=True)
        return totals

    def complete(self) -> None:
        """All that the run writes is in place, so the journal has served its purpose."""
        self.journal.remove()

    def drop(self) -> None:
        """Remove what a run has left that did not get anywhere."""
        self.journal.remove()
        self._settings.errors_partial_path.unlink(missing_ok=True)

    def close(self) -> None:
        self.journal.close()


class StreamOutput:
    """Standard output: written window by window in input order, not resumable. Errors go to standard error."""

    journal: Journal | None = None

    def __init__(self, settings: RunOptions) -> None:
        self._line = text_line if settings.resolved_output_format == "txt" else json_line
        self._collector = Collector()
        self._totals = Totals()
        self._stream: Any = getattr(sys.stdout, "buffer", None)

    def _write(self, results: list[Result]) -> None:
        with writing("standard output"):
            for result in results:
                self._totals.add(result)
                if "error" in result:
                    print(f"line {result['line']} skipped: {result['message']}", file=sys.stderr)
                line = self._line(result)
                if self._stream is not None:
                    self._stream.write(line)
                else:
                    sys.stdout.write(line.decode("utf-8"))
            if results:
                (self._stream or sys.stdout).flush()

    def window(self, window: Window) -> None:
        self._write(self._collector.open(window))

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        self._write(self._collector.add(window, index, results))

    def finish(self) -> Totals:
        """All is written already."""
        return self._totals

    def close(self) -> None:
        """There is no journal, nothing can be taken back from a stream, and it stays with its owner."""

    complete = drop = close


Output = FileOutput | StreamOutput


def check_free(settings: RunOptions) -> None:
    """Raises `SetupError` where a file of the run cannot be written, or would replace something unasked.

    A file that FastGen did not write is never replaced, except those that `overwrite` is about: OUTPUT, scores and
    report.
    """
    left = None
    if not settings.to_stdout:
        path, partial = Path(settings.output), settings.partial_path
        if is_special(path):
            raise SetupError(f"cannot write {path}: it is not a regular file")
        check_suffix(path)
        for target in (path, partial, settings.errors_path, settings.errors_partial_path):
            check_writable(target)
        left = journal.find(partial)
    _check_replaced(settings, left)


def _check_replaced(settings: RunOptions, left: journal.Left | None) -> None:
    """The part of `check_free` that depends on the files that are there, and on what an interrupted run has left."""
    placed = [Path(name) for name in (settings.score_path, settings.report) if name is not None]
    if not settings.to_stdout:
        placed.insert(0, Path(settings.output))
        if left is not None and not (settings.resume or settings.overwrite):
            how = "--resume continues it, --overwrite drops it"
            raise SetupError(f"{left.path} is left from an interrupted run ({how})")
        for target in (settings.errors_path, settings.errors_partial_path):
            # With resume as well: without the work file there is no run that these could belong to.
            if left is None and not settings.overwrite:
                check_absent(target)
            if os.path.lexists(target):
                journal.check_own(target, _ERROR_START)
    for path in placed:
        check_writable(path)
        if is_special(path):
            continue
        # A kill may have come when the file was in place already.
        if not settings.overwrite and (left is None or not left.has_written(path)):
            check_absent(path)
        check_unfinished(path, left, b"" if path == Path(settings.output) else _JSON_START)


def check_suffix(path: Path) -> None:
    """A SetupError where the name of an output promises that it is compressed."""
    if path.suffix.lower() in _COMPRESSED:
        raise SetupError(f"{path} is not written compressed: leave out {path.suffix}, or compress the output of -")


def check_writable(path: Path) -> None:
    """A SetupError where no file can be written at a path."""
    if path.is_dir():
        raise SetupError(f"cannot write {path}: it is a directory")
    if is_special(path):
        writable = os.access(path, os.W_OK)
    else:
        parent = followed(path).parent
        if not parent.is_dir():
            raise SetupError(f"cannot write {path}: the directory {parent} does not exist")
        writable = os.access(parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
    if not writable:
        raise SetupError(f"cannot write {path}: permission denied")


def check_absent(path: Path, remedy: str = "--overwrite replaces it") -> None:
    """A SetupError where there is something at a path."""
    # A link to nothing would be replaced as well.
    if os.path.lexists(path):
        raise SetupError(f"{path} exists already ({remedy})")


def check_unfinished(path: Path, left: journal.Left | None, beginning: bytes = b"") -> None:
    """A SetupError where the unfinished form of a file is there, and may not be what FastGen has left."""
    unfinished = unfinished_path(path)
    # Of a run without a journal only the file itself tells.
    own = beginning and journal.is_own(unfinished, beginning)
    if not own and (left is None or not left.has_begun(path)):
        check_absent(unfinished, "move it away: it may be another program's")


@contextlib.contextmanager
def placed(path: Path, journal: Journal | None = None) -> Iterator[Path]:
    """Where to write a file that is to be there as a whole or not at all; it is put in place at the end of the block.

    What is written to and cannot be replaced, such as a pipe, is written to at once.

    Args:
        journal: of the run that it belongs to, which is told, so that a resumed run knows the file.
    """
    if is_special(path):
        with writing(path):
            yield path
        return
    unfinished = unfinished_path(path)
    with writing(path, RESUMABLE if journal else ""):
        try:
            if journal:
                journal.finishing(path)
            yield unfinished
            sync(unfinished)
            if journal:
                journal.finished(unfinished)
            os.replace(unfinished, followed(path))
        except (Exception, KeyboardInterrupt):
            unfinished.unlink(missing_ok=True)
            raise


def write_json(name: str, value: Any, journal: Journal | None = None) -> None:
    """A JSON file for people and programs; for `journal` see `placed`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    with placed(Path(name), journal) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
