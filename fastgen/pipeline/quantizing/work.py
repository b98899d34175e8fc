"""OUT.partial: makes a run resumable, and lets OUT appear at once.

    OUT.partial/run.json              the run's identity, and earlier measurements
    OUT.partial/block-0003.safetensors  the quantised layers of a block, written under another name and renamed
    OUT.partial/model/                what OUT will be; its rename is the end of the run

A directory without such a run.json, or an OUT without a FastGen report, belongs to another program: it is not replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import RESUMABLE, PipelineError, SetupError, one_line, writing
from fastgen.pipeline.journal import check_same, lock, sync
from fastgen.pipeline.layouts import read_back
from fastgen.pipeline.quantizing.options import QuantizeOptions
from fastgen.pipeline.writers import check_absent, check_writable, placed

REPORT = "report.json"
_RUN = "run.json"
_FIRST = ("lock", f".{_RUN}.unfinished")  # what a directory holds before it has a run.json
_KEY = "fastgen-quantize"  # in both files: the format, and the mark of FastGen
_VERSION = 1


def check_output(options: QuantizeOptions) -> None:
    """Raises `SetupError` if OUT cannot be written, or something would be replaced without being asked."""
    out, partial = Path(options.output), options.partial
    check_writable(partial / _RUN if partial.is_dir() else partial)
    if os.path.lexists(out) and _read(out / REPORT) is None:
        raise SetupError(f"{out} exists and was not written by fastgen-quantize: move it away, or choose another OUT")
    left = _read(partial / _RUN)
    if left is None and partial.is_dir() and any(path.name not in _FIRST for path in partial.iterdir()):
        raise SetupError(f"{partial} was not written by fastgen-quantize: move it away, or choose another OUT")
    if options.resume or options.overwrite:
        return
    if left is not None:
        raise SetupError(f"{partial} is left from an interrupted run (--resume continues it, --overwrite drops it)")
    check_absent(out)


def own_text(values: Mapping[str, Any]) -> str:
    """Returns the text of a report, or of a run.json, with the mark of FastGen."""
    return json.dumps({_KEY: _VERSION, **values}, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and _KEY in values else None


class Work:
    """The directory of one run, locked against a second one with the same OUT.

    Args:
        identity: everything that decides what the quantised layers are. A run with another identity is not resumed.

    Raises:
        SetupError: another run writes it, or it belongs to other settings.
    """

    def __init__(self, options: QuantizeOptions, identity: Mapping[str, Any]) -> None:
        self.path = options.partial
        self._out = Path(options.output)
        self.identity = read_back(identity)
        self._lock = contextlib.ExitStack()
        self.measured: dict[str, Any] = {}
        """The measurements of the model before it was changed."""
        self.complete = False
        """Whether OUT is already the result of this run, which is only to be resumed."""
        with writing(self.path):
            self.path.mkdir(exist_ok=True)
            handle = self._lock.enter_context((self.path / "lock").open("ab"))
        try:
            lock(handle, self.path / "lock")
            check_output(options)
            if options.resume and self._is_in_place():
                self.complete = True
                self._drop()
                return
            before = _read(self.path / _RUN) if options.resume else None
            if before is not None:
                self._take_over(before)
            elif os.path.lexists(self._out) and not options.overwrite:
                self._drop()  # it is empty: nothing of this run is left
                raise SetupError(f"{self._out} is not of this model, text and options (--overwrite replaces it)")
            else:
                self._clear()
                self.keep({})
        except BaseException:
            self._lock.close()
            raise

    def _is_in_place(self) -> bool:
        return (_read(self._out / REPORT) or {}).get("identity") == self.identity

    def _clear(self) -> None:
        with writing(self.path):
            # The file that identifies the directory goes last: after a kill, it can still be replaced.
            for path in sorted(self.path.iterdir(), key=lambda path: path.name == _RUN):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()

    def _take_over(self, before: Mapping[str, Any]) -> None:
        if before[_KEY] != _VERSION:
            raise SetupError(f"cannot resume: {self.path} was written by another version of fastgen")
        if not isinstance(before.get("identity"), dict) or not isinstance(before.get("measured"), dict):
            raise SetupError(f"cannot resume: {self.path / _RUN} is damaged (--overwrite starts over)")
        check_same(before["identity"], self.identity)
        self.measured = before["measured"]

    def keep(self, measured: Mapping[str, Any]) -> None:
        """Writes measurements of the original model, with the identity of the run."""
        self.measured = dict(measured)
        with self.placed(_RUN) as path:
            path.write_text(own_text({"identity": self.identity, "measured": self.measured}), encoding="utf-8")

    def block(self, number: int) -> Path:
        """Returns where the layers of a block are kept, once it is finished."""
        return self.path / f"block-{number:04d}.safetensors"

    @contextlib.contextmanager
    def placed(self, name: str) -> Iterator[Path]:
        """Yields a path to write to; the file takes its name when the block ends without an error."""
        path = self.path / name
        with saving(path), placed(path, remedy=RESUMABLE) as unfinished:
            yield unfinished

    @property
    def model(self) -> Path:
        """Where OUT is built."""
        return self.path / "model"

    def finish(self) -> None:
        """Puts OUT in place and drops the rest."""
        with writing(self._out, RESUMABLE):
            for path in self.model.rglob("*"):
                if path.is_file():
                    sync(path)
            if os.path.lexists(self._out):
                os.rename(self._out, self.path / "replaced")
            os.rename(self.model, self._out)
        self._drop()

    def _drop(self) -> None:
        # While it is locked: unlocked, it may belong to another run.
        with contextlib.suppress(OSError, PipelineError):
            self._clear()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Releases the lock; finished work stays."""
        self._lock.close()


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns an error of the system, or of safetensors, in this block into a PipelineError on one line."""
    from safetensors import SafetensorError

    try:
        with writing(path, RESUMABLE):
            yield
    except SafetensorError as error:
        raise PipelineError(f"cannot write {path}: {one_line(error)} ({RESUMABLE})") from error
