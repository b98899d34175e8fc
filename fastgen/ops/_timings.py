"""What has been measured on this machine, kept in a file so that it is measured once.

The file is `fastgen/timings.json` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache), or in the folder named by
FASTGEN_CACHE; an empty FASTGEN_CACHE keeps everything in memory. It holds numbers only. Entries belong to a processor,
a release of torch and a number of threads. A file that cannot be read or written is done without.

While other work keeps the processors, what is measured says more about that work than about the operator. Linux tells
how long threads have waited for a processor. If that was long, the same is measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastgen.locks import forkable_lock
from fastgen.memory import processor
from fastgen.ops import _team

Timing = tuple[float, ...]

# All threads of this process together may wait for a processor for this part of the time of a measurement. If they have
# waited longer, it is repeated: so many measurements at most.
_MOST_WAITING = 0.05
_ATTEMPTS = 5

_lock = forkable_lock()
_known: dict[str, dict[str, Timing]] | None = None


def get(operator: str, key: str, count: int, measure: Callable[[], Sequence[float]] | None) -> Timing | None:
    """The `count` timings of `key` on this machine, in seconds.

    Those that are known, or else what `measure()` gives, which is kept; None if there is no `measure`.
    """
    section = _section(operator)
    with _lock:
        known = _load()
        timing = known.get(section, {}).get(key, ())
        if len(timing) == count:
            return timing
        if measure is None:
            return None
        timing = known.setdefault(section, {})[key] = _measured(measure)
        _save(known)
        return timing


def all(operator: str) -> dict[str, Timing]:
    """Every timing known of `operator` on this machine."""
    with _lock:
        return dict(_load().get(_section(operator), {}))


def _measured(measure: Callable[[], Sequence[float]]) -> Timing:
    """What `measure()` gives; the shortest times of several if this process had to wait for processors."""
    # With fewer processors than threads, the threads always wait for each other.
    attempts = _ATTEMPTS if torch.get_num_threads() <= _team.processors() else 1
    found: list[Sequence[float]] = []
    is_quiet = False
    while not is_quiet and len(found) < attempts:
        start, before = time.perf_counter(), _waits()
        found.append(measure())
        waited = sum(seconds - before.get(thread, 0.0) for thread, seconds in _waits().items())
        is_quiet = waited <= _MOST_WAITING * (time.perf_counter() - start)
    return tuple(float(min(values)) for values in zip(*found, strict=True))


def _waits() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a processor; nothing where the system does not count."""
    waits = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended, or there is no count
            waits[file.parent.name] = int(file.read_text().split()[1]) * 1e-9
    return waits


def _section(operator: str) -> str:
    # What the processor can do may be limited for this process (ATEN_CPU_CAPABILITY).
    machine = f"{processor()} | {torch.backends.cpu.get_cpu_capability()} | {torch.get_num_threads()} threads"
    other = "" if torch.backends.mkldnn.enabled else " without oneDNN"
    # Products of float32 may have fewer bits, if the user allows that.
    precision = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none")
    other += "" if precision in ("none", "ieee") else f" in {precision}"
    return f"{operator} | {machine} | torch {torch.__version__}{other}"


def path() -> Path | None:
    """The file, or None where nothing is to be kept."""
    folder = os.environ.get("FASTGEN_CACHE")
    if folder is not None:
        return Path(folder, "timings.json") if folder else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache", "fastgen", "timings.json")
    except RuntimeError:  # there is no home
        return None


def _load() -> dict[str, dict[str, Timing]]:
    global _known
    if _known is None:
        _known = _read()
    return _known


def _read() -> dict[str, dict[str, Timing]]:
    file = path()
    try:
        content = json.loads(file.read_text()) if file is not None else {}
        return {
            section: {key: tuple(float(value) for value in values) for key, values in entries.items()}
            for section, entries in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}  # nothing measured yet, or not what we wrote: it is measured again


def _save(known: dict[str, dict[str, Timing]]) -> None:
    """Writes what is known, and what other processes have written since; whole or not at all."""
    file = path()
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        for section, entries in _read().items():
            known[section] = {**entries, **known.get(section, {})}
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with open(handle, "w") as new:
                json.dump(known, new, indent=1)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
