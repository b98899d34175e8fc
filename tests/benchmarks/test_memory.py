from __future__ import annotations

import mmap

import pytest
import torch

from benchmarks import memory


def test_storages_are_counted_once_and_whole():
    whole = torch.zeros(10, 10)
    assert memory.storage_bytes([whole[:2], whole.transpose(0, 1), whole[5:, 5:]]) == 400
    assert memory.storage_bytes([whole, torch.zeros(5)]) == 420
    assert memory.storage_bytes([]) == 0


@pytest.mark.parametrize("resettable", [True, False])
def test_peak(monkeypatch, resettable):
    if not resettable:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    with memory.PeakMemory(torch.device("cpu")) as peak:
        for _ in range(3):
            # 128 MiB of the system, whatever malloc has in store, gone again before the block ends.
            torch.frombuffer(mmap.mmap(-1, 2**27), dtype=torch.uint8).fill_(1)
    assert 2**27 * 0.9 < peak.bytes < 2**29
    assert peak.method.startswith("resident set")
