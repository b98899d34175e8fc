"""`fastgen.compare`: the promise, checked on the user's own model."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastgen import counters, memory, patching
from fastgen.counters import DRAFTS, GENERATE, Drafts
from fastgen.decoding.randomness import RandomState


@dataclass(frozen=True)
class Run:
    """One run of `generate`."""

    seconds: float
    """Wall time of the call, without the warm-up."""
    peak_memory: int | None
    """Bytes in use at the most during the call beyond what was in use before it: device memory on CUDA, resident memory
    of the process elsewhere; None where the system does not tell."""


@dataclass(frozen=True)
class Comparison:
    """The result of `fastgen.compare`. `print` gives a table."""

    identical: bool
    """Whether both runs gave the same token ids."""
    first_difference: tuple[int, int] | None
    """(row, position) of the first token that differs, or None. A position behind the end of one of the results means
    that they have different lengths; (-1, -1), that they have different numbers of rows."""
    original: Run
    fastgen: Run
    accelerated: bool
    """Whether FastGen accelerated the call; if not, both runs were the original code."""
    fallback: str | None
    """Why it was not accelerated, or None."""
    drafts: Drafts | None = None
    """Tokens that speculative decoding drafted and accepted, or None if there were none."""
    not_drafted: str | None = None
    """Why a call that could have had drafts went without them, or None."""

    @property
    def speedup(self) -> float:
        """How many times faster FastGen was."""
        return self.original.seconds / self.fastgen.seconds

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "original", "fastgen", "ratio")]
        rows.append(("seconds", *(f"{s.seconds:.3f}" for s in (self.original, self.fastgen)), f"{self.speedup:.2f}x"))
        before, after = self.original.peak_memory, self.fastgen.peak_memory
        if before is not None and after is not None:
            share = f"{after / before:.2f}" if before else "-"
            rows.append(("peak memory", *(f"{size / 2**20:.1f} MiB" for size in (before, after)), share))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        different = "DIFFERENT, first at row {}, position {}"
        lines.append("tokens: " + (different.format(*self.first_difference) if self.first_difference else "identical"))
        lines.append(f"accelerated: {'yes' if self.accelerated else f'no ({self.fallback})'}")
        if self.drafts or self.not_drafted:
            lines.append(f"drafts: {self.drafts or f'none ({self.not_drafted})'}")
        return "\n".join(lines)


def compare(model: Any, inputs: Any, generate_kwargs: dict[str, Any]) -> Comparison:
    """See `fastgen.compare`."""
    arguments = {**(inputs if isinstance(inputs, Mapping) else {"inputs": inputs}), **generate_kwargs}
    arguments.pop("streamer", None)  # it would be fed twice
    random_state = RandomState(model.device)
    runs, tokens = [], []
    for context in (patching.suspended, contextlib.nullcontext):
        with context():
            _warm_up(model, arguments)
            random_state.restore()
            before = counters.snapshot()
            run, result = _measured(model, arguments)
            after = counters.snapshot()
        runs.append(run)
        tokens.append(result if isinstance(result, torch.Tensor) else result.sequences)
    difference = _first_difference(*tokens)
    accelerated = _count(after, GENERATE, "accelerated") > _count(before, GENERATE, "accelerated")
    fallback = None if accelerated else _reasons(before, after, GENERATE, "fallback") or "FastGen is disabled"
    return Comparison(
        difference is None, difference, runs[0], runs[1], accelerated, fallback, Drafts.between(before, after),
        _reasons(before, after, DRAFTS, "not used"),
    )  # fmt: skip


def _count(stats: dict[str, Any], entry_point: str, what: str) -> Any:
    return stats.get(entry_point, {}).get(what, 0)


def _reasons(before: dict[str, Any], after: dict[str, Any], entry_point: str, what: str) -> str | None:
    """Those that have been counted in between."""
    known, found = (_count(stats, entry_point, what) or {} for stats in (before, after))
    return "; ".join(reason for reason, calls in found.items() if calls > known.get(reason, 0)) or None


def _warm_up(model: Any, arguments: dict[str, Any]) -> None:
    """Two tokens: the first call of a process pays for threads, kernels and memory that later ones find ready."""
    lengths = ("max_length", "min_length", "min_new_tokens")
    short = {name: _copied(value) for name, value in arguments.items() if name not in lengths}
    model.generate(**{**short, "max_new_tokens": 2})


def _measured(model: Any, arguments: dict[str, Any]) -> tuple[Run, Any]:
    arguments = {name: _copied(value) for name, value in arguments.items()}
    peak_memory = _peak_memory(model.device)
    start = time.perf_counter()
    result = model.generate(**arguments)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return Run(time.perf_counter() - start, peak_memory()), result


def _copied(value: Any) -> Any:
    """A copy of what a call changes: caches, encoder outputs, processors and criteria. Anything else as it is."""
    if isinstance(value, Mapping):
        return copy.copy(value)
    if not (isinstance(value, list) or hasattr(value, "get_seq_length")):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):  # it holds a lock, or a tensor with a history: both runs share it
        return value


def _peak_memory(device: torch.device) -> Callable[[], int | None]:
    """What says later how much memory was in use at the most since now, beyond what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - allocated
    try:
        # What earlier calls freed goes back to the system first, or it would hide what this one needs.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of the resident memory
        resident = memory.entry("/proc/self/status", "VmRSS")
    except (OSError, AttributeError):
        return lambda: None  # not Linux with glibc
    return lambda: max(memory.entry("/proc/self/status", "VmHWM") - resident, 0)


def _first_difference(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int] | None:
    if first.shape[0] != second.shape[0]:
        return -1, -1
    common = min(first.shape[1], second.shape[1])
    different = (first[:, :common] != second[:, :common]).nonzero()
    if len(different):
        return int(different[0][0]), int(different[0][1])
    return None if first.shape == second.shape else (0, common)
