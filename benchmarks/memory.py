"""The most memory that processes and backends have had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def high_water_mark(process: int) -> int:
    """The largest resident set so far of the process of this number, in bytes. Linux tells it."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class DevicePeaks:
    """The largest memory on a CUDA device of each of several backends that take turns in one process.

    A backend keeps what it has allocated between its runs (graphs, static buffers), so a run counts that and what the
    run allocates beyond it. What other backends keep is not counted. `bytes` has the largest of all runs of each
    backend, warm-up included: what a graph needs is allocated when it is captured.
    """

    method = "torch.cuda.max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def of(self, backend: str) -> Iterator[None]:
        """What runs in here is the backend's. Does nothing where there is no CUDA device."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        start = torch.cuda.memory_allocated(self._device)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            kept = self._kept.get(backend, 0)
            peak = kept + torch.cuda.max_memory_allocated(self._device) - start
            self.bytes[backend] = max(self.bytes.get(backend, 0), peak)
            self._kept[backend] = kept + torch.cuda.memory_allocated(self._device) - start
