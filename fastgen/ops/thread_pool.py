"""FastGen's own thread pool for the operators of a recorded graph, for cases in which torch's threads would sleep.

Torch's threads spin for a few milliseconds after an operator, and then sleep. If a process has more of them than
processors, they sleep at once (libgomp). A second thread that has used torch, such as a web server's, is enough,
because it has its own team of threads. Then each operator wakes the threads, which takes as long as a small operator.

If other processes compete for the processors, a thread that spins for another thread's part may hold the very processor
that this part is waiting for.

So a replay counts how often its thread has slept, or has lost its processor. If that was often, the next replays run on
the pool (csrc/cpu/parallel.cpp), where the caller runs a part that no thread has started. Work is divided in the same
way, and results are the same.

If the thread may use fewer processors than torch has threads, there is no pool: some of its threads would spin while
others wait for their processor.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

from fastgen.interrupts import undoing
from fastgen.ops import _library

_resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None
# Only Linux counts by thread.
_OF_THREAD: int | None = getattr(_resource, "RUSAGE_THREAD", None)

# Replays on the pool after one whose thread was switched out too often. Torch's threads are then tried again, which may
# take seconds if they compete: the number doubles after each failed try, up to the maximum.
REPLAYS, MOST_REPLAYS = 256, 8192
# A replay tolerates this many switches: now and then another process gets the processor.
_MOST_SWITCHES = 8

_left, _next = 0, REPLAYS


@contextlib.contextmanager
def for_replay() -> Iterator[None]:
    """A context in which FastGen's operators run on the pool, if torch's threads have slept lately."""
    global _left, _next
    threads = torch.get_num_threads()
    if _left > 0 and threads <= processors():
        with undoing(torch.ops.fastgen.give_team_back.default):
            if torch.ops.fastgen.take_team.default(threads):
                _left -= 1
                yield
                return
    before = _switches()
    yield
    has_switched = _switches() - before > _MOST_SWITCHES and is_available()
    _left, _next = (_next, min(2 * _next, MOST_REPLAYS)) if has_switched else (_left, REPLAYS)


def is_available() -> bool:
    """Whether this process can have a pool."""
    return _OF_THREAD is not None and _library.has_kernel("fastgen::take_team", "CompositeExplicitAutograd")


def processors() -> int:
    """Returns how many processors this thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _switches() -> int:
    """Returns how often this thread has slept so far, or has lost its processor to another one."""
    if _OF_THREAD is None:
        return 0
    usage = _resource.getrusage(_OF_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


# Makes FastGen's operators that this thread calls run on this many threads of the pool. Returns False if they do not:
# the number is below 2 or above 1024, or this or another thread has the pool.
_library.define("take_team(int threads) -> bool")
_library.define("give_team_back() -> ()")
