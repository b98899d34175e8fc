"""A run of several workloads, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as runs
from benchmarks.record import Record
from benchmarks.workload import Context, Workload


@dataclass(frozen=True, kw_only=True)
class Nothing(Workload):
    def run(self, context: Context, record: Record) -> None:
        record.notes.append("done")


@pytest.mark.parametrize(("usable", "done"), [(True, ["a", "b"]), (False, ["a"])])
def test_an_unusable_device_ends_the_run(usable, done, monkeypatch):
    """Each of the others would fail, in place of what was measured earlier."""
    monkeypatch.setattr(runs, "is_usable", lambda device: usable)
    written = []
    results = SimpleNamespace(add=lambda record: written.append(record.name))
    workloads = [Nothing(name=name, title=name) for name in ("a", "b")]
    records = runs.run_all(workloads, Context(), results)
    assert [record.name for record in records] == written == done


def test_a_device_that_raises_is_unusable(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not runs.is_usable(torch.device("cuda"))
    assert runs.is_usable(torch.device("cpu"))
