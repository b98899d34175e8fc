"""The two kinds of outputs: a file at the end of the run, and a stream.

Nothing that exists is replaced without `overwrite`, and with it only when the run is complete: a run that ends early
leaves the old output and its error file as they were. The journal is removed last, after scores and report are written,
and knows which of the files belong to the run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.pipeline import journal
from fastgen.pipeline.batches import Collector, Window
from fastgen.pipeline.errors import RESUMABLE, SetupError, writing
from fastgen.pipeline.journal import Journal, sync
from fastgen.pipeline.layouts import GENERATION, Layout, Result, error_line
from fastgen.pipeline.postprocess import MetricTotals
from fastgen.pipeline.settings import DataOptions, followed, is_special, unfinished_path

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ERROR_START = b'{"line": '  # the beginning of every line of an error file
_JSON_START = b'{\n  "samples": '  # the beginning of scores and report


@dataclass
class Totals:
    """The totals of a finished output."""

    layout: Layout = GENERATION
    samples: int = 0
    skipped: int = 0
    tokens: int = 0
    truncated: int = 0
    metrics: MetricTotals = field(default_factory=MetricTotals)

    def add(self, result: Result) -> None:
        if "error" in result:
            self.skipped += 1
            return
        self.samples += 1
        self.tokens += self.layout.tokens(result)
        self.truncated += bool(result.get("truncated"))
        if result.get("statistics") is not None:
            self.metrics.add(result["statistics"])


class FileOutput:
    """An output file: kept as a journal during the run, written and put in place at its end."""

    def __init__(
        self,
        settings: DataOptions,
        identity: dict[str, Any],
        environment: dict[str, Any] | None = None,
        layout: Layout = GENERATION,
    ) -> None:
        check_free(settings)
        self._settings = settings
        self._layout = layout
        self._path = Path(settings.output)
        # Checked again once it is locked: another run may have ended in between.
        check = functools.partial(_check_replaced, settings)
        self.journal = Journal(settings.partial_path, identity, settings.resume, environment, check)
        try:
            unfinished_path(self._path).unlink(missing_ok=True)
            # The errors of this run begin with those of an interrupted run; without errors there is no file.
            settings.errors_partial_path.unlink(missing_ok=True)
            self._report(self.journal.errors)
        except BaseException:
            self.journal.close()
            raise

    def _report(self, results: Iterable[Result]) -> None:
        """Reports skipped records among these immediately, so that the errors of a long run can be watched."""
        path = self._settings.errors_partial_path
        lines = [error_line(result) for result in results if "error" in result]
        if lines:
            with writing(path, RESUMABLE), open(path, "ab") as handle:
                handle.writelines(lines)

    def window(self, window: Window) -> None:
        self.journal.window(window)
        self._report(window.bad)

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        self.journal.batch(window, index, results)
        self._report(results)

    def finish(self) -> Totals:
        """Writes the output from the journal and puts it in place. The journal stays until `complete`."""
        totals = Totals(self._layout)
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
                self._layout.look(self.journal.results())
            self._layout.write(unfinished, form, counted())
            if failed:
                # Now in input order, whatever the order in which they were met.
                errors_partial.write_bytes(b"".join(map(error_line, failed)))
                sync(errors_partial)
                os.replace(errors_partial, errors)
            elif self._settings.overwrite:
                # The errors of the replaced output.
                errors.unlink(missing_ok=True)
        return totals

    def complete(self) -> None:
        """Removes the journal, because everything that the run writes is in place."""
        self.journal.remove()

    def drop(self) -> None:
        """Removes the files of a run that produced nothing."""
        self.journal.remove()
        self._settings.errors_partial_path.unlink(missing_ok=True)

    def close(self) -> None:
        self.journal.close()


class StreamOutput:
    """Standard output: written window by window in input order, not resumable. Errors go to standard error."""

    journal: Journal | None = None

    def __init__(self, settings: DataOptions, layout: Layout = GENERATION) -> None:
        self._layout, self._form = layout, settings.resolved_output_format
        self._collector = Collector()
        self._totals = Totals(layout)
        self._stream: Any = getattr(sys.stdout, "buffer", None)
        self._begun = False

    def _put(self, line: bytes) -> None:
        if self._stream is not None:
            self._stream.write(line)
        else:
            sys.stdout.write(line.decode("utf-8"))

    def _write(self, results: list[Result]) -> None:
        with writing("standard output"):
            if not self._begun:
                self._put(self._layout.header(self._form))
                self._begun = True
            for result in results:
                self._totals.add(result)
                if "error" in result:
                    print(f"line {result['line']} skipped: {result['message']}", file=sys.stderr)
                self._put(self._layout.line(result, self._form))
            if results:
                (self._stream or sys.stdout).flush()

    def window(self, window: Window) -> None:
        self._write(self._collector.open(window))

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        self._write(self._collector.add(window, index, results))

    def finish(self) -> Totals:
        """Writes the header of an output without records; everything else is written already."""
        self._write([])
        return self._totals

    def close(self) -> None:
        """Does nothing: there is no journal, a stream cannot be taken back, and its owner closes it."""

    complete = drop = close


Output = FileOutput | StreamOutput


def check_free(settings: DataOptions) -> None:
    """Raises `SetupError` if a file of the run cannot be written, or would replace something without being asked.

    Files that FastGen did not write are never replaced, except those that `overwrite` covers: OUTPUT, scores and
    report.
    """
    left = None
    if not settings.to_stdout:
        path, partial = Path(settings.output), settings.partial_path
        if is_special(path):
            raise SetupError(f"cannot write {path}: it is not a regular file")
        check_suffix(path, is_chosen=settings.output_format != "auto")
        for target in (path, partial, settings.errors_path, settings.errors_partial_path):
            check_writable(target)
        left = journal.find(partial)
    _check_replaced(settings, left)


def _check_replaced(settings: DataOptions, left: journal.Left | None) -> None:
    """The part of `check_free` that depends on the files that exist, and on what an interrupted run has left."""
    placed = [Path(name) for name in settings.written_beside().values() if name is not None]
    if not settings.to_stdout:
        placed.insert(0, Path(settings.output))
        if left is not None and not (settings.resume or settings.overwrite):
            how = "--resume continues it, --overwrite drops it"
            raise SetupError(f"{left.path} is left from an interrupted run ({how})")
        if left is None and settings.resume and not settings.overwrite and os.path.lexists(settings.output):
            nothing = "no run is interrupted, so there is nothing to resume"
            raise SetupError(f"{settings.output} exists already, and {nothing} (--overwrite replaces it)")
        for target in (settings.errors_path, settings.errors_partial_path):
            # Even with resume: without the work file, these belong to no run.
            if left is None and not settings.overwrite:
                check_absent(target)
            if os.path.lexists(target):
                journal.check_own(target, _ERROR_START)
    for path in placed:
        check_writable(path)
        if is_special(path):
            continue
        # A kill may have come when the file was already in place.
        if not settings.overwrite and (left is None or not left.has_written(path)):
            check_absent(path)
        check_unfinished(path, left, b"" if path == Path(settings.output) else _JSON_START)


def check_suffix(path: Path, is_chosen: bool = False) -> None:
    """Raises SetupError if the name of an output promises another format: compressed, or one JSON value.

    Args:
        is_chosen: the format does not follow from the name.
    """
    if path.suffix.lower() == ".json" and not is_chosen:
        raise SetupError(f"{path} would not be JSON: name it {path.with_suffix('.jsonl').name}, with an object a line")
    if path.suffix.lower() in _COMPRESSED:
        raise SetupError(f"{path} is not written compressed: leave out {path.suffix}, or compress the output of -")


def check_writable(path: Path) -> None:
    """Raises SetupError if no file can be written at a path."""
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
        # Without POSIX, this is unknown.
        is_read_only = hasattr(os, "statvfs") and os.statvfs(followed(path).parent).f_flag & os.ST_RDONLY
        raise SetupError(f"cannot write {path}: {'read-only file system' if is_read_only else 'permission denied'}")


def check_absent(path: Path, remedy: str = "--overwrite replaces it") -> None:
    """Raises SetupError if something exists at a path."""
    # A link to nothing would be replaced as well.
    if os.path.lexists(path):
        raise SetupError(f"{path} exists already ({remedy})")


def check_unfinished(path: Path, left: journal.Left | None, beginning: bytes = b"") -> None:
    """Raises SetupError if the unfinished form of a file exists that may not be FastGen's."""
    unfinished = unfinished_path(path)
    # For a run without a journal, only the file itself shows it.
    own = beginning and journal.is_own(unfinished, beginning)
    if not own and (left is None or not left.has_begun(path)):
        check_absent(unfinished, "move it away: it may be another program's")


@contextlib.contextmanager
def placed(path: Path, journal: Journal | None = None, remedy: str = "") -> Iterator[Path]:
    """Yields where to write a file that must appear as a whole or not at all; the end of the block puts it in place.

    What cannot be replaced, such as a pipe, is written to directly.

    Args:
        journal: the run's journal, which records the file, so that a resumed run knows it.
        remedy: what to do when it cannot be written.
    """
    if is_special(path):
        with writing(path):
            yield path
        return
    unfinished = unfinished_path(path)
    with writing(path, RESUMABLE if journal else remedy):
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
    """Writes a JSON file for people and programs; for `journal` see `placed`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    with placed(Path(name), journal) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
