"""The host: its free memory, its processor, the growth of buffers, and blocks without garbage collection.

Owners of what is kept from one call to the next `register` a function that frees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastgen.interrupts import forkable_lock, undoing

# psutil does not know the limits of containers.
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Files of a control group: its limit, its usage, and the parts of its statistics that the kernel can reclaim. The names
# of version 2 come first, then those of version 1.
_LIMIT = ("memory.max", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
# Microseconds of processor time in a period, and the period: one file in version 2, and two in version 1.
_QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_RECLAIMABLE = (("inactive_file", "active_file"), ("total_inactive_file", "total_active_file"))
_MIN_GROWTH = 64  # positions
# Blocks of all threads: collection is off until the last one ends.
_blocks: set[object] = set()
_changing = forkable_lock()


def capacity(needed: int, present: int) -> int:
    """Returns how many positions to allocate for a buffer of `present` positions that must hold `needed`.

    It grows by at least a quarter, so that its content is rarely copied.
    """
    return max(needed, present + max(present // 4, _MIN_GROWTH))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collection: one collection of a whole process takes as long as several steps."""
    if not (_blocks or gc.isenabled()):  # the user has disabled it
        yield
        return
    block = object()
    with undoing(functools.partial(_leave, block)):
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
    """Ends all blocks in a forked process, which has none of the other threads."""
    if _blocks:
        _blocks.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def is_out(error: BaseException) -> bool:
    """Whether an exception reports that memory ran out, on any device. On the CPU, torch has no type for it."""
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
    """Returns how many bytes this process can allocate without swapping.

    This is the smaller of what the machine has available and of what the limits of its container leave. If the system
    reports neither, it is 4 GiB.
    """
    left = _available()
    for group in _groups("memory"):
        left = min([left, *_left(group, left)])
    return max(left, 0)


def processor_limit() -> int | None:
    """Returns how many processors the limits of its container leave this process, rounded up; None without a limit.

    More threads than that wait for each other when the container is throttled.
    """
    found = [limit for group in _groups("cpu") for limit in _processors(group)]
    return min(found, default=None)


def give_back_free() -> None:
    """Returns the C library's free memory, of all threads, to the system, on systems that support it.

    The C library keeps most of what threads other than the main one have freed, such as those of the engine and of
    encoders: as much as their largest batch took.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # on Windows, CDLL(None) does not work
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@functools.cache
def processor() -> str:
    """Returns the processor's name from the operating system, because psutil does not provide it."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _available() -> int:
    import psutil  # takes longer than all of `import fastgen`

    # psutil lets other errors through on systems that it knows little, and without /proc in some containers.
    with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError, AttributeError, RuntimeError):
        return int(psutil.virtual_memory().available)
    return 2**32


def _groups(controller: str) -> Iterator[Path]:
    """Yields the control groups whose limits apply: that of the process, and its parents."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = _CONTROL_GROUPS / controllers
            group = root / name.lstrip("/")
            # A container often sees its own group as the root, and not the path in the file.
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    yield folder


def _left(group: Path, enough: int) -> Iterator[int]:
    """Yields what is left of a group's limits, if that is less than `enough`."""
    for limit, used, reclaimable in zip(_LIMIT, _USED, _RECLAIMABLE, strict=True):
        # A group without a limit has no such file, or the word "max" in it.
        with contextlib.suppress(OSError, ValueError):
            left = int((group / limit).read_text()) - int((group / used).read_text())
            # The kernel computes its statistics slowly: they are read only if they can matter.
            if left < enough:
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield left + sum(int(statistics.get(name, 0)) for name in reclaimable)


def _processors(group: Path) -> Iterator[int]:
    """Yields the processor limit of a group, if it has one."""
    for names in _QUOTA:
        # A group without a limit has no such file, or the word "max" in it, or a quota of -1.
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            if quota > 0 and period > 0:
                yield -(-quota // period)


# ---- what is kept from one call to the next

# Limit of entries that are remembered of a model in addition to the caches.
MOST_REMEMBERED = 1000
_registered: dict[Callable[[], object], bool] = {}  # value: whether it frees captured steps


def register(free: Callable[[], object], captured_steps: bool = False) -> None:
    """Registers `free`, to be called when FastGen is disabled. With `captured_steps`, it is also called when a device
    runs out of memory, and must return whether it has freed any step.
    """
    _registered[free] = captured_steps


def limit(*remembered: dict[Any, Any] | set[Any]) -> None:
    """Clears collections that have grown too large: calls with ever new options must not fill the memory."""
    for each in remembered:
        if len(each) > MOST_REMEMBERED:
            each.clear()


def free_all() -> None:
    """Frees everything that no running call uses."""
    for free in _registered:
        free()


def free_captured_steps() -> bool:
    """Frees the captured steps that no running call uses, and returns whether there were any."""
    return any([free() for free, captured_steps in _registered.items() if captured_steps])
