"""No test of a benchmark looks at a time: what only makes times exact is left out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that wait for one another are most of the time of a tiny model, and so are collections, with all of the
    library in memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    yield
    torch.set_num_threads(threads)
