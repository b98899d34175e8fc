"""No test of a benchmark looks at a time: what only makes times exact is left out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from benchmarks import profile
from benchmarks.workloads import no_repeat_ngram


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that wait for one another are most of the time of a tiny model, and so are collections, with all of the
    library in memory. The machine's rates come from a small product and a small copy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    monkeypatch.setattr(no_repeat_ngram, "_SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr(profile, "_SIZE", 64)
    monkeypatch.setattr(profile, "_COPY_BYTES", 2**16)
    yield
    torch.set_num_threads(threads)
