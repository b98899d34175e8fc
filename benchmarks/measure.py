"""Timing: how the runs of the backends alternate."""

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
    """Seconds that `work` takes, and what it returns. Work queued on a CUDA device is waited for."""
    # A collection of what earlier runs have left must not fall into this one.
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
    """Bytes per second of a copy of `size` bytes, read and written."""
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
    """Makes interleaved runs, A B A B ..., so that a machine that gets slower or faster does so for every backend.

    Args:
        runs: for each backend what makes one run; returns its seconds and anything else.
        repetitions: how often each is made.
        log: gets a line for each run.
        failed: is told of a backend that failed, and raises if the others are worth nothing without it. The backend
            makes no more runs and has no results. Without this, a failure ends everything.
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
    """Every run, and their median and spread."""
    if not seconds:
        raise ValueError("no runs to summarise")
    return {
        "seconds": list(seconds),
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
    }


def format_seconds(seconds: float) -> str:
    """Three digits or so, in the unit that suits."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 0.9995:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
