"""Timing, with alternating runs of the backends."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.benchmark import Timer

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[float, T]:
    """Returns the seconds of `work`, and its result. Waits for work queued on a CUDA device."""
    # Collects the garbage of earlier runs before this one.
    gc.collect()
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return time.perf_counter() - start, result


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Returns the bandwidth of a copy of `size` bytes, in bytes per second, reads and writes included."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    source.random_()
    timer = Timer("target.copy_(source)", globals={"target": target, "source": source})
    return 2 * size / timer.blocked_autorange().median


def alternate(
    runs: Mapping[str, Callable[[], tuple[float, T]]],
    repetitions: int,
    log: Callable[[str], None] = lambda line: None,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[tuple[float, T]]]:
    """Interleaves runs, A B A B ..., so that a change of the machine's speed affects every backend.

    Args:
        runs: for each backend a function that makes one run, and returns its seconds and any value.
        repetitions: runs of each.
        log: gets a line for each run.
        failed: called with a backend that failed; raises if the others are useless without it. The backend makes no
            more runs and has no results. Without this, a failure ends everything.
    """
    results: dict[str, list[tuple[float, T]]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        for name in list(results):
            try:
                seconds, value = runs[name]()
            except Exception as error:
                if failed is None:
                    raise
                failed(name, error)
                del results[name]
                continue
            results[name].append((seconds, value))
            log(f"run {repetition + 1} of {repetitions}, {name}: {format_seconds(seconds)}")
    return results


def summary(seconds: list[float]) -> dict[str, Any]:
    """Returns every run's seconds, and their median and range."""
    if not seconds:
        raise ValueError("no runs to summarise")
    return {
        "seconds": list(seconds),
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
    }


def format_seconds(seconds: float) -> str:
    """Formats a time with about three digits, in a suitable unit."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 0.9995:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
