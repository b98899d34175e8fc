"""How a recorded graph calls FastGen's operators: in command lists, and on a thread pool of its own.

**Command lists.** A call from Python takes a few microseconds: it checks its arguments, releases the interpreter's
lock, goes through torch's dispatcher and takes the lock again. A decode step of 30 layers has some 300 calls. So
consecutive operators are stored in C++ with their arguments, and one call executes them (csrc/cpu/plan.h, which calls
it a plan). A profiler sees nothing inside a list. While one runs, operators are called one by one (`is_profiled`).

**The thread pool** is for cases in which torch's threads would sleep. Those spin for a few milliseconds after an
operator, and then sleep. If a process has more of them than processors, they sleep at once (libgomp). A second thread
that has used torch, such as a web server's, is enough, because it has its own team of threads. Then each operator wakes
the threads, which takes as long as a small operator. If other processes compete for the processors, a thread that spins
for another thread's part may hold the very processor that this part is waiting for.

So a replay counts how often its thread has slept, or has lost its processor. If that was often, the next replays run on
the pool (csrc/cpu/parallel.cpp), where the caller runs a part that no thread has started. Work is divided in the same
way, and results are the same. If the thread may use fewer processors than torch has threads, there is no pool: some of
its threads would spin while others wait for their processor.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fastgen.interrupts import undoing
from fastgen.ops import _library

# Operators with FASTGEN_PLANNED in csrc/cpu, and those that check whether a list is open.
OPERATORS = frozenset(
    f"fastgen::{name}"
    for name in (
        "advance_",
        "best_candidates_out",
        "top_two_out",
        "decode_attention_out",
        "gemv_out",
        "gemv_batch_out",
        "elementwise",
        "expert_linear_out",
        "grouped_linear_out",
        "grouped_linear_batch_out",
        "kv_write",
        "panels_gemm_batch_out",
        "packed_attention.out",
        "rms_norm_out",
        "sort_rows_out",
        "bf16x3_gemm_out",
        "gemm_out",
        "gemm_batch_out",
        "take_beams_",
        "take_rows_",
        "commit_",
    )
)


def with_command_lists(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Returns the same calls, with a command list in place of consecutive FastGen operators.

    A list holds the tensors that its calls were given, and reads their contents whenever it runs.
    """
    found: list[Callable[[], object]] = []
    for is_held, some in itertools.groupby(calls, _can_be_held):
        alike = list(some)
        recorded = _recorded(alike) if is_held and len(alike) > 1 else None
        found += alike if recorded is None else [recorded]
    return found


def is_profiled() -> bool:
    """Whether one of torch's profilers observes this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def _can_be_held(call: Any) -> bool:
    function = call.func if isinstance(call, partial) else None
    is_one = isinstance(function, torch._ops.OpOverload) and function.name() in OPERATORS
    return is_one and _library.has_kernel("fastgen::run_plan", "CompositeExplicitAutograd")


def _recorded(calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
    """Combines these calls into one; returns None if no more lists can be made."""
    with undoing(_close):
        torch.ops.fastgen.open_plan.default()
        for call in calls:
            call()  # adds it to the list
        number = torch.ops.fastgen.close_plan.default(len(calls))
    if number < 0:
        return None
    run = partial(torch.ops.fastgen.run_plan.default, number)
    weakref.finalize(run, _drop, number).atexit = False
    return run


def _close() -> None:
    """Makes operators of this thread execute again."""
    with contextlib.suppress(RuntimeError):  # it has no list open
        torch.ops.fastgen.close_plan.default(-1)


def _drop(number: int) -> None:
    """Frees a list. That may happen during a recording, which must not record this operator."""
    with torch._C._DisableTorchDispatch():
        torch.ops.fastgen.drop_plan.default(number)


# Opens a list: operators that this thread calls are added to it instead of being executed.
_library.define("open_plan() -> ()")
# Returns the list's number; -1 if the list does not have `expected` operators, or if there are too many lists.
_library.define("close_plan(int expected) -> int")
_library.define("run_plan(int plan) -> ()")
_library.define("drop_plan(int plan) -> ()")


# ---- the thread pool

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
