r"""The journal, which makes a run resumable, and the identity of a run in it.

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

The **identity** (`settings`) decides what the output is: the options, the input, and the content of the model, which is
its weights, its configuration, its tokenizer and the code that came with it. A run is resumed only with the same one.

The **environment** decides which kernels compute it. Within one environment, and with a number for the batch size, the
same command produces the same bytes, resumed or not. Between two, the order of additions may differ, and with it the
last digits of `scores` and nearly equal candidates. A run may be resumed in another environment: the report says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

from fastgen import patching
from fastgen import settings as process_settings
from fastgen._version import __version__
from fastgen.memory import processor
from fastgen.pipeline.batches import START_OVER, Collector, Resumed, Window
from fastgen.pipeline.errors import RESUMABLE, SetupError, writing
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.layouts import Result, dumps, encode, read_back
from fastgen.pipeline.loading import Loaded
from fastgen.pipeline.readers import digest
from fastgen.pipeline.settings import DataOptions
from fastgen.report import kernels

VERSION = 3
Values = Mapping[str, Any]
Check = Callable[["Left | None"], object]
_FIRST = b'{"journal": '  # the beginning of every journal


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
            raise SetupError(f"cannot resume: the first line of {self.path} is damaged ({START_OVER})")
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


# Further options that do not change the output: the model is identified by its content, and the input by itself.
_FREE = {"model", "input", "output", "generation", "generation_config"}
# The library's notes about where a model came from.
_NOTES = {
    "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "is_local", "local_files_only",
    "base_model_name_or_path", "revision", "peft_version",
}  # fmt: skip


def identity(settings: DataOptions, inputs: Inputs, loaded: Loaded) -> dict[str, Any]:
    """Returns everything that decides what the output is."""
    decisive = [f.name for f in dataclasses.fields(settings) if f.name not in _FREE and not f.metadata.get("free")]
    return {
        **{name: getattr(settings, name) for name in decisive},
        "model": content(loaded.model, loaded.tokenizer),
        **loaded.decisive(),
        "output_format": settings.resolved_output_format,
        "device": loaded.device.type,
        **inputs.identity(),
    }


def environment(device: Any) -> dict[str, Any]:
    """Returns everything that may change the last digits of a score."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fastgen": __version__ if patching.is_active() else "off",
        "kernels": kernels(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    now = vars(process_settings.current()).items()
    return found | {"settings": {name: value for name, value in now if name not in ("strict", "explicit")}}


def content(model: Any, tokenizer: Any) -> dict[str, str]:
    """Returns a digest of each part of a model in memory."""
    adapters = [f"{name} {_plain(each.to_dict())}" for name, each in getattr(model, "peft_config", {}).items()]
    parts = {"weights": _weights(model), "configuration": [_plain(model.config.to_dict()), *adapters]}
    own = vars(model).get("generate")  # from the folder custom_generate: replaces the model's method
    code = [each for each in (model, tokenizer, getattr(own, "func", own)) if each is not None]
    parts |= {"tokenizer": _tokenizer(tokenizer), "code": _code(*code)}
    return {name: _digest(part) for name, part in parts.items()}


def _weights(model: Any) -> Iterable[str]:
    """Yields of every tensor its name, type and shape, the sum of its elements' bits, and some of them in order."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        size = tensor.element_size()
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        if tensor.is_meta or tensor.layout != torch.strided or size not in integers:
            continue
        bits = tensor.detach().contiguous().view(integers[size]).flatten()
        # The sum detects a single weight that changed, the sample detects weights that changed places.
        sample = bits[:: max(1, len(bits) // 1024)]
        yield f"{int(bits.sum(dtype=torch.int64))} {sample.tolist()}"


def _tokenizer(tokenizer: Any) -> Iterable[str]:
    """Yields what determines the tokenizer's behaviour: its vocabulary, its rules, and its options."""
    yield _plain(tokenizer.init_kwargs) + _plain(tokenizer.special_tokens_map)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are set with every call.
        yield _plain({**json.loads(backend.to_str()), "truncation": None, "padding": None})
        return
    yield _plain(tokenizer.get_vocab())
    for name in sorted(tokenizer.vocab_files_names):
        path = getattr(tokenizer, name, None) or tokenizer.init_kwargs.get(name)
        if isinstance(path, str) and os.path.isfile(path):
            yield hashlib.blake2b(Path(path).read_bytes()).hexdigest()


def _code(*objects: Any) -> Iterable[str]:
    """Yields the source that came with the model: of its classes, or a function, and of the modules beside them that
    these import.
    """
    for value in objects:
        kind = value if isinstance(value, FunctionType) else type(value)
        module = kind.__module__
        yield f"{module.rpartition('.')[2]}.{kind.__qualname__}"
        if module.startswith("transformers_modules"):
            package = module.rpartition(".")[0] + "."
            for name in sorted(name for name in sys.modules if name.startswith(package)):
                path = getattr(sys.modules[name], "__file__", None)
                yield Path(path).read_text(encoding="utf-8") if path else ""


def _plain(values: dict[str, Any]) -> str:
    kept = {name: value for name, value in values.items() if name not in _NOTES and not name.endswith("_file")}
    return json.dumps(kept, sort_keys=True, default=_as_json)


def _as_json(value: Any) -> Any:
    """Converts what JSON cannot represent. A set has another order in each process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _digest(parts: Iterable[str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()
