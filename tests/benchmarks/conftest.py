"""For workloads that run in a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from benchmarks.workloads import no_repeat_ngram


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    monkeypatch.setattr(no_repeat_ngram, "_SAMPLE_SECONDS", 0.001)
    yield
    torch.set_num_threads(threads)
