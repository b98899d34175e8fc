r"""The journal, which makes a run resumable.

`OUTPUT.partial` is a file to which every finished batch is appended as **one line**: JSON, a tab, and a checksum. So a
batch is either wholly there or not there at all; on resuming, a line that a kill has cut short is dropped, and so is
everything after a damaged line. The first line records the settings that decide what the output is; a run with other
settings is refused. When the run is complete, the output file is written from the journal in input order and put in
place by a rename: half an output is never visible, and an interrupted run ends with the same file as an uninterrupted
one.

    {"journal": 3, "settings": {...}, "environment": {...}, "plan": {...}}
    {"window": {"index": 0, "start": 0, "count": 1024, "batches": 64, "bad": [...]}}
    {"batch": {"window": 0, "index": 0, "results": [...]}}
    {"finishing": "OUTPUT, or the file of the scores or of the report, seen from the journal's directory"}
    {"finished": "a digest of that file, which is about to be put in place"}

A file of that name that does not begin like this belongs to another program: it is neither read nor replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.batches import Resumed, Window
from fastgen.pipeline.errors import RESUMABLE, SetupError, writing
from fastgen.pipeline.layouts import dumps, encode, read_back
from fastgen.pipeline.readers import digest
from fastgen.pipeline.records import Result

VERSION = 3
Values = Mapping[str, Any]
Check = Callable[["Left | None"], object]
_FIRST = b'{"journal": '  # the beginning of every journal
_REMEDY = "move it away or restore it, or start over with --overwrite"


class Collector:
    """Turns batches, which come in the order in which they are processed, into records in input order.

    Every method raises `SetupError` if windows and batches do not fit together, because records would be lost.

    Args:
        source: the origin of the batches, for messages.
    """

    def __init__(self, source: object = "the output") -> None:
        self._source = source
        self._window: Window | None = None
        self.end = 0  # the position after the last window
        self._complete = True
        self._batches: set[int] = set()
        self._results: dict[int, Result] = {}

    def take(self, entry: Mapping[str, Any]) -> list[Result]:
        """Takes an entry of the journal; returns the records of the window that it completes."""
        if "window" in entry:
            return self.open(Window(**entry["window"]))
        if "batch" in entry:
            return self.add(*(entry["batch"][name] for name in ("window", "index", "results")))
        return []

    def open(self, window: Window) -> list[Result]:
        """Begins a window; returns its records at once if it has no batches."""
        self.close(window.start)
        self.end = window.start + window.count
        self._window, self._complete, self._batches, self._results = window, False, set(), {}
        return self._keep(window, window.bad)

    def add(self, window: int, index: int, results: list[Result]) -> list[Result]:
        """Takes the results of a batch; returns all records of the window with its last batch."""
        if self._window is None or self._window.index != window:
            raise self._damaged("a batch is without its window")
        if index in self._batches:  # a batch that is in the journal twice counts once
            return []
        self._batches.add(index)
        return self._keep(self._window, results)

    def close(self, end: int) -> None:
        """Ends the input: checks that the window has all batches, and that the windows reach to this position."""
        if not self._complete:
            raise self._damaged("a window lacks a batch")
        if self.end != end:
            raise self._damaged("a window is missing")

    def _keep(self, window: Window, results: list[Result]) -> list[Result]:
        positions = range(window.start, window.start + window.count)
        self._results |= {result["position"]: result for result in results}
        if any(result["position"] not in positions for result in results):
            raise self._damaged("a record is not of its window")
        if len(self._batches) < window.batches:
            return []
        if len(self._results) < window.count:
            raise self._damaged("a window lacks records")
        self._complete = True
        return [self._results.pop(position) for position in positions]

    def _damaged(self, fault: str) -> SetupError:
        return SetupError(f"{self._source} is damaged: {fault} ({_REMEDY})")


@dataclass(frozen=True)
class Left:
    """What an interrupted run has left: its journal, as far as it can be read without the run's settings."""

    path: Path
    finishing: set[str] = field(default_factory=set)
    """The files that it had begun to write under their unfinished names."""
    finished: set[str] = field(default_factory=set)
    """The digests of complete files, which the run may have put in place."""

    def has_begun(self, path: Path) -> bool:
        """Whether the run may have left this file under its unfinished name."""
        return os.path.relpath(path, self.path.parent) in self.finishing

    def has_written(self, path: Path) -> bool:
        """Whether a file is one that the run has put in place."""
        return path.is_file() and digest(path) in self.finished


def find(path: Path) -> Left | None:
    """Returns what an interrupted run has left at this path, or None. Raises `SetupError` if the file is no journal."""
    if not os.path.lexists(path) or (path.is_file() and not path.stat().st_size):
        return None
    left = Left(path)
    check_own(path, _FIRST)
    with open(path, "rb") as handle:
        for line in handle:
            if line.startswith(b'{"finish'):
                entry = _entry(line) or {}
                left.finishing.add(str(entry.get("finishing", "")))
                left.finished.add(str(entry.get("finished", "")))
    return left


def check_own(path: Path, beginning: bytes) -> None:
    """Raises `SetupError` for a file that does not begin like FastGen's: it must not be replaced."""
    if not is_own(path, beginning):
        raise SetupError(f"{path} was not written by fastgen: move it away, or choose another OUTPUT")


def is_own(path: Path, beginning: bytes) -> bool:
    """Whether there is a file that begins like FastGen's."""
    if not path.is_file():
        return False
    with open(path, "rb") as handle:
        # A kill may have cut the beginning short.
        return beginning.startswith(handle.read(len(beginning)))


class Journal:
    """The journal of one run, open for appending and locked against a second run with the same output.

    Args:
        settings: everything that decides what the output is. A run with other settings is not resumed.
        environment: what may change the last digits of a score. It is stored, and differences are reported.
        resume: continue what is there. Otherwise it is dropped, if a FastGen run wrote it.
        check: called with what is there, once no other run can change it. Raises if that must not be replaced.

    Raises:
        SetupError: the file is not a journal, is damaged, belongs to other settings, or another run writes it.
    """

    def __init__(
        self,
        path: Path,
        settings: Values,
        resume: bool,
        environment: Values | None = None,
        check: Check = bool,
    ) -> None:
        self.path = path
        self.resumed = Resumed()
        self.plan: dict[str, Any] | None = None
        """The plan of the interrupted run, or None if there was none."""
        self.differences: list[str] = []
        """How the environment differs from that of the interrupted run, such as "threads: 2, now 1"."""
        self.count = 0
        """How many records it had done, including skipped ones."""
        self.errors: list[Result] = []
        """The skipped records, in the order in which they were met."""
        self._settings, self._environment = read_back(settings), read_back(environment or {})
        self._end = 0  # the position after its last window
        # Not emptied before it is locked: it may belong to another run.
        try:
            self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            lock(self._file, path)
            check(find(path))
            if resume:
                self._load()
            self._file.truncate()
        except BaseException:
            self._file.close()
            raise

    def _load(self) -> None:
        """Reads the file, and positions it after the last complete line."""
        first = self._file.readline()
        if not first.endswith(b"\n"):  # cut short by a kill: nothing was done yet
            self._file.seek(0)
            return
        end = len(first)
        self._take_over(first)
        collector = Collector(self.path)
        for line in self._file:
            entry = _entry(line)
            if entry is None:
                break
            end += len(line)
            collector.take(entry)
            done: list[Result] = []
            if "window" in entry:
                window = Window(**entry["window"])
                self.resumed.windows[window.index] = window
                done = window.bad
            elif "batch" in entry:
                self.resumed.done.setdefault(entry["batch"]["window"], set()).add(entry["batch"]["index"])
                done = entry["batch"]["results"]
            elif "environment" in entry:
                self._compare_environment(entry["environment"])
            self.count += len(done)
            self.errors += [result for result in done if "error" in result]
        self._end = collector.end
        self._file.seek(end)

    def _take_over(self, first: bytes) -> None:
        """Compares the first line with the settings of this run, and takes its plan."""
        version = re.match(rb'{"journal": (\d+)[,}]', first)
        if version and int(version[1]) != VERSION:
            raise SetupError(f"cannot resume: {self.path} was written by another version of fastgen")
        header = _entry(first)
        if header is None:
            raise SetupError(f"cannot resume: the first line of {self.path} is damaged ({_REMEDY})")
        settings, environment, self.plan = (header[name] for name in ("settings", "environment", "plan"))
        check_same(settings, self._settings)
        self._compare_environment(environment)

    def _compare_environment(self, environment: Any) -> None:
        for name, old, new in _differences(environment, self._environment):
            told = f"{name}: {old}, now {new}"
            if told not in self.differences:
                self.differences.append(told)

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Writes the first line of a new journal; appends the environment to a resumed one if it differs."""
        if self.plan is None:
            self.plan = dict(plan)
            first = {"settings": self._settings, "environment": self._environment, "plan": self.plan}
            self._append({"journal": VERSION, **first})
        elif self.differences:
            self._append({"environment": self._environment})

    def finishing(self, path: Path) -> None:
        """Records that a file is about to be written under its unfinished name."""
        self._append({"finishing": os.path.relpath(path, self.path.parent)})

    def finished(self, unfinished: Path) -> None:
        """Records the digest of the complete file, before it is put in place."""
        self._append({"finished": digest(unfinished)})

    def window(self, window: Window) -> None:
        self._end = window.start + window.count
        self._append({"window": vars(window)})

    def batch(self, window: int, index: int, results: list[Result]) -> None:
        self._append({"batch": {"window": window, "index": index, "results": results}})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with writing(self.path, RESUMABLE):
            self._file.write(line_of(entry))
            # Handed to the system, so that a kill of this process does not lose it.
            self._file.flush()

    def results(self) -> Iterator[Result]:
        """Yields every record, in input order. Raises `SetupError` if one is missing."""
        collector = Collector(self.path)
        with open(self.path, "rb") as handle:
            for line in handle:
                entry = _entry(line)
                if entry is not None:
                    yield from collector.take(entry)
        collector.close(self._end)

    def close(self) -> None:
        """Releases the file and its lock."""
        # After a failed write this fails as well. That write has been reported, and half a line is dropped later.
        with contextlib.suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        """Removes the journal when the run is complete and all of its files are in place."""
        # While it is locked: unlocked, it may belong to another run.
        self.path.unlink(missing_ok=True)
        self.close()


def line_of(entry: Mapping[str, Any]) -> bytes:
    """Formats an entry as a line."""
    text = encode(entry).rstrip(b"\n")
    return b"%b\t%08x\n" % (text, zlib.crc32(text))


def _entry(line: bytes) -> dict[str, Any] | None:
    """Parses a line; returns None if it is cut short or damaged."""
    text, tab, checksum = line.rpartition(b"\t")
    return json.loads(text) if tab and checksum == b"%08x\n" % zlib.crc32(text) else None


def check_same(old: Values, new: Values) -> None:
    """Raises `SetupError` if a run began with other settings than it is resumed with; both are as read from JSON."""
    for name, was, now in _differences(old, new):
        if name.startswith("model."):
            raise SetupError(f"cannot resume with another model: its {name[6:]} changed since the run began")
        what, _, part = name.partition(".")
        if what in ("input", "reference") and part in ("digest", "fingerprint", "size", "rows"):
            raise SetupError(f"cannot resume with another {what}: its content changed since the run began")
        raise SetupError(f"cannot resume with other settings: {name} was {_short(was)} and is now {_short(now)}")


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _short(value: Any) -> str:
    text = dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def lock(handle: BinaryIO, path: Path) -> None:
    """Locks an open file until it is closed. Raises `SetupError` if another run has the lock."""
    # Without POSIX, or on a file system without locks, such as some network mounts, two runs are not told apart. The
    # package filelock refuses such a mount, or leaves a file there that outlives a kill; older releases of it empty the
    # file that they lock, which is the journal itself.
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that had the lock may have removed the file.
            if not os.path.samestat(os.fstat(handle.fileno()), os.stat(path)):
                raise FileNotFoundError(path)
        except (BlockingIOError, FileNotFoundError) as error:
            raise SetupError(f"another run is writing {path}") from error


def sync(path: Path) -> None:
    """Flushes the file to disk before it takes its final name."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
