"""The host: its free memory, its processor, how a buffer grows, and times without garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from fastgen import interrupts
from fastgen.locks import forkable_lock

# psutil does not know the limits of containers.
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# The limit of a control group, what it uses, and the parts of its statistics that the kernel gives back when asked.
# First the names of version 2, then those of version 1.
_LIMIT = ("memory.max", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
# Microseconds of processor time in a period, and the period: one file in version 2, and two in version 1.
_QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_RECLAIMABLE = (("inactive_file", "active_file"), ("total_inactive_file", "total_active_file"))
_MIN_GROWTH = 64  # positions
# Of all threads: without collection until the last one is over.
_blocks: set[object] = set()
_changing = forkable_lock()


def capacity(needed: int, present: int) -> int:
    """Positions to allocate for a buffer of `present` positions that must hold `needed`.

    It grows by a quarter at least, so that its content is seldom copied.
    """
    return max(needed, present + max(present // 4, _MIN_GROWTH))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python does not look for garbage meanwhile: to look through all of a process takes as long as several steps."""
    if not (_blocks or gc.isenabled()):  # the user does without it
        yield
        return
    block = object()
    with interrupts.undoing(functools.partial(_leave, block)):
        with _changing:
            _blocks.add(block)
            gc.disable()
        yield


def _leave(block: object) -> None:
    with _changing:
        _blocks.discard(block)
        if not _blocks:
            gc.enable()


def _forked() -> None:
    """The other threads have not come along."""
    if _blocks:
        _blocks.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def is_out(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on whichever device. On the CPU torch has no type for it."""
    signs = (
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "cannot allocate memory",
        "allocate memory:",
        "bad_alloc",
    )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def free_host_memory() -> int:
    """Bytes that this process can allocate without swapping.

    It is the smaller of what the machine has available and of what the limits of its container leave. Where the system
    tells neither, 4 GiB are assumed.
    """
    left = _available()
    for group in _groups("memory"):
        left = min([left, *_left(group, left)])
    return max(left, 0)


def processor_limit() -> int | None:
    """The processors that the limits of its container leave this process, rounded up; None without a limit.

    More threads than these wait for each other where the container is made to pause.
    """
    found = [limit for group in _groups("cpu") for limit in _processors(group)]
    return min(found, default=None)


def give_back_free() -> None:
    """What the C library has free, of all threads, goes back to the system, where it is one that can.

    It keeps most of what other threads than the main one have freed, as those of the engine and of encoders: as much as
    their largest batch took.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows has no library of all names
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@functools.cache
def processor() -> str:
    """The processor's name, as the operating system gives it, and psutil does not."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _available() -> int:
    # Of systems that it does not know well enough, and of /proc in some containers, it lets other errors through.
    with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError, AttributeError, RuntimeError):
        return int(psutil.virtual_memory().available)
    return 2**32


def _groups(controller: str) -> Iterator[Path]:
    """The control groups whose limits apply: that of the process, and those around it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = _CONTROL_GROUPS / controllers
            group = root / name.lstrip("/")
            # A container often sees its own group as the root, and not the path that the file names.
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    yield folder


def _left(group: Path, enough: int) -> Iterator[int]:
    """What is left of a group's limits, where that is less than `enough`."""
    for limit, used, reclaimable in zip(_LIMIT, _USED, _RECLAIMABLE, strict=True):
        # A group without a limit has no such file, or the word "max" in it.
        with contextlib.suppress(OSError, ValueError):
            left = int((group / limit).read_text()) - int((group / used).read_text())
            # The kernel takes long to write its statistics: they are read only where they can matter.
            if left < enough:
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield left + sum(int(statistics.get(name, 0)) for name in reclaimable)


def _processors(group: Path) -> Iterator[int]:
    """The limit of a group, if it has one."""
    for names in _QUOTA:
        # A group without a limit has no such file, or the word "max" in it, or a quota of -1.
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            if quota > 0 and period > 0:
                yield -(-quota // period)
