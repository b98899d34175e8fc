"""Peak memory of processes and backends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def high_water_mark(process: int) -> int:
    """Returns the largest resident set so far of the process with this id, in bytes. Linux only."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class DevicePeaks:
    """Peak memory on a CUDA device for each of several backends that alternate in one process.

    A backend keeps allocations between its runs (graphs, static buffers). A run counts these, and its own allocations
    beyond them, but not what other backends keep. `bytes` has the largest value of all runs of each backend, warm-up
    included, because a graph's memory is allocated when it is captured.
    """

    method = "torch.cuda.max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def of(self, backend: str) -> Iterator[None]:
        """Attributes allocations in this block to the backend. Does nothing without a CUDA device."""
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
