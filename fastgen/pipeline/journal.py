r"""The journal: what makes a run resumable.

`OUTPUT.partial` is a JSON lines file to which every finished batch is appended as **one line**, so that a batch is
either wholly there or not there at all; a line cut short by a kill is dropped when the run is resumed. Its first
line records the settings that decide what the output is, and a run with others is refused. When the run is complete,
the output file is written from the journal in input order and put in place by a rename: nobody ever sees half an
output, and an interrupted run ends in the same file as one that was not.

    {"journal": 1, "settings": {...}, "plan": {...}}
    {"window": {"index": 0, "start": 0, "count": 1024, "batches": 64, "bad": [...]}}
    {"batch": {"window": 0, "index": 0, "results": [...]}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.planner import Resumed, Window
from fastgen.pipeline.readers import BadRecord, Problem

VERSION = 1

Result = dict[str, Any]
"""One record as the journal holds it: `position`, `line` and `id`, and either `text` and what belongs to it, or
`error` (the kind) and `message`."""


def dumps(value: Any) -> str:
    """Compact JSON that keeps the text readable; values JSON does not know (dates as record ids) become strings."""
    return json.dumps(value, ensure_ascii=False, default=str)


def encode(value: Any) -> bytes:
    """A line of JSON. Half of a surrogate pair, which UTF-8 has no bytes for, becomes its JSON escape."""
    return dumps(value).encode("utf-8", "backslashreplace") + b"\n"


def bad_result(bad: BadRecord) -> Result:
    """A skipped record as a result."""
    return {
        "position": bad.position,
        "line": bad.line,
        "id": bad.id,
        "error": bad.problem.kind,
        "message": bad.problem.message,
    }


class Collector:
    """Turns batches, which come in the order in which they are worked on, into records in input order."""

    def __init__(self) -> None:
        self._window: Window | None = None
        self._results: dict[int, Result] = {}

    def open(self, window: Window) -> list[Result]:
        """Begin a window; its records are returned at once if it has no batches."""
        self._window = window
        self._results = {bad.position: bad_result(bad) for bad in window.bad}
        return self._complete()

    def add(self, results: list[Result]) -> list[Result]:
        """Take the results of a batch; all records of the window are returned with its last batch."""
        # By position: a batch that is in the journal twice counts once.
        self._results.update((result["position"], result) for result in results)
        return self._complete()

    def _complete(self) -> list[Result]:
        if self._window is None or len(self._results) < self._window.count:
            return []
        ordered = [self._results[position] for position in sorted(self._results)]
        self._window = None
        return ordered


class Journal:
    """The journal of one run, open for appending and locked against a second run with the same output."""

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.resumed = Resumed()
        self.plan: dict[str, Any] | None = None
        """What the interrupted run had decided for itself, or None where there was none."""
        self._settings = json.loads(dumps(dict(settings)))
        # Not emptied before it is locked: it may be another run's.
        try:
            self._file: BinaryIO = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            _lock(self._file, path)
            if resume:
                self._load()
            self._file.truncate()
        except BaseException:
            self._file.close()
            raise

    def _load(self) -> None:
        """Take over what the file holds and leave its end after the last complete line."""
        end = 0
        for entry, end_of_entry in _entries(self._file):
            if end == 0 and "journal" not in entry:
                raise SetupError(f"cannot resume: {self.path} was not written by fastgen")
            if "journal" in entry:
                self._compare(entry)
                self.plan = entry["plan"]
            elif "window" in entry:
                window = _window_from(entry["window"])
                self.resumed.windows[window.index] = window
            elif "batch" in entry:
                batch = entry["batch"]
                self.resumed.done.setdefault(batch["window"], set()).add(batch["index"])
            end = end_of_entry
        self._file.seek(end)

    def _compare(self, header: Mapping[str, Any]) -> None:
        if header["journal"] != VERSION:
            raise SetupError(f"cannot resume: {self.path} was written by another version of fastgen")
        differences = list(_differences(header["settings"], self._settings))
        if differences:
            name, old, new = differences[0]
            raise SetupError(f"cannot resume with other settings: {name} was {_short(old)} and is now {_short(new)}")

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write the first line of a new journal; a resumed one has it."""
        if self.plan is None:
            self.plan = dict(plan)
            self._append({"journal": VERSION, "settings": self._settings, "plan": self.plan})

    def window(self, window: Window) -> None:
        """Record that a window has been begun."""
        entry = {
            "index": window.index,
            "start": window.start,
            "count": window.count,
            "batches": window.batches,
            "bad": [bad_result(bad) for bad in window.bad],
        }
        self._append({"window": entry})

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        """Record a finished batch."""
        self._append({"batch": {"window": window, "index": index, "results": results}})

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(encode(entry))
        # Out of this process, so that a kill cannot take it back.
        self._file.flush()

    def results(self) -> Iterator[Result]:
        """Every record so far whose window is complete, in input order."""
        collector = Collector()
        for entry in self._all():
            if "window" in entry:
                yield from collector.open(_window_from(entry["window"]))
            elif "batch" in entry:
                yield from collector.add(entry["batch"]["results"])

    def count(self) -> int:
        """How many records there are so far, those that were skipped among them."""
        return sum(
            len(entry.get("window", {}).get("bad", [])) + len(entry.get("batch", {}).get("results", []))
            for entry in self._all()
        )

    def errors(self) -> Iterator[Result]:
        """Every skipped record so far, in the order in which they were met."""
        for entry in self._all():
            listed = entry.get("window", {}).get("bad", []) or entry.get("batch", {}).get("results", [])
            yield from (result for result in listed if "error" in result)

    def _all(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as handle:
            for entry, _ in _entries(handle):
                yield entry

    def close(self) -> None:
        """Release the file and its lock."""
        self._file.close()

    def remove(self) -> None:
        """The run is complete and its output in place."""
        self.close()
        self.path.unlink(missing_ok=True)


def _entries(handle: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """Complete entries and the offset after each; stops at the first line that is not one."""
    offset = 0
    for line in handle:
        if not line.endswith(b"\n"):
            return
        try:
            entry = json.loads(line)
        except ValueError:
            return
        offset += len(line)
        yield entry, offset


def _window_from(entry: Mapping[str, Any]) -> Window:
    bad = [
        BadRecord(item["position"], item["line"], item["id"], Problem(item["error"], item["message"]))
        for item in entry["bad"]
    ]
    return Window(entry["index"], entry["start"], entry["count"], entry["batches"], bad)


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _short(value: Any) -> str:
    text = dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lock(handle: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not POSIX: two runs with one output are not told apart
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SetupError(f"another run is writing {path}") from error
    except OSError:
        # A file system without locks, as some network mounts are.
        return


def sync(path: Path) -> None:
    """Have the file on disk before it takes its final name."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
