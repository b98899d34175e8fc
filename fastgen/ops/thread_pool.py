"""A thread pool of FastGen's own for the operators of a recorded graph, where torch's threads would sleep between them.

Torch's threads look out for the next operator for a few milliseconds, and then sleep. When a process has more of them
than processors, they sleep at once (libgomp). A second thread that has used torch is enough, because it has threads of
its own: a web server's, say. Then each operator wakes them, which takes as long as a small operator.

Where other processes want the processors, a thread that looks out for another one's part may hold the very processor
that the part is waiting for.

So a replay counts how often its thread has slept, or has lost its processor. If that was often, the next replays run on
the pool (csrc/cpu/parallel.cpp), where a part that no thread has come to is run by the one that asked for it. Work is
divided in the same way, and results are the same.

Where the thread may not use a processor for each of torch's threads, there is no pool: while some of its threads looked
out for work, others would wait for their processor.
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
# Only Linux counts by threads.
_OF_THREAD: int | None = getattr(_resource, "RUSAGE_THREAD", None)

# Replays on the pool after one whose thread has given way. Then torch's threads have another try, which may take
# seconds where they are in each other's way: after each that fails twice as many, up to the most.
REPLAYS, MOST_REPLAYS = 256, 8192
# So often it may give way in a replay: now and then another process has the processor.
_MOST_SWITCHES = 8

_left, _next = 0, REPLAYS


@contextlib.contextmanager
def for_replay() -> Iterator[None]:
    """Inside this, FastGen's operators run on the pool, if torch's threads have slept lately."""
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
    """Whether there can be a pool in this process."""
    return _OF_THREAD is not None and _library.has_kernel("fastgen::take_team", "CompositeExplicitAutograd")


def processors() -> int:
    """How many this thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _switches() -> int:
    """How often this thread has slept so far, or has had to give its processor to another one."""
    if _OF_THREAD is None:
        return 0
    usage = _resource.getrusage(_OF_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


# From now on, FastGen's operators that this thread calls run on so many threads of the pool. False if they do not: they
# are fewer than two or more than 1024, or this or another thread has the pool.
_library.define("take_team(int threads) -> bool")
_library.define("give_team_back() -> ()")
