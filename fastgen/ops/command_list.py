"""Command lists: consecutive operators of a recorded graph that one call from Python executes.

A call from Python takes a few microseconds: it checks its arguments, releases the interpreter's lock, goes through
torch's dispatcher and takes the lock again. A decode step of 30 layers has some 300 calls. So consecutive operators are
stored in C++ with their arguments, as a command list (csrc/cpu/plan.h, which calls it a plan).

A profiler sees nothing inside a list. While one runs, operators are therefore called one by one (`is_profiled`).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
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
