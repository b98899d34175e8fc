"""A fork that a test kills stops neither the test's process nor other forks."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
from tqdm.std import TqdmDefaultWriteLock, tqdm

from tests.pipeline.children import finished, in_child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_that_is_killed_while_it_draws_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests do not use this lock: if this test fails, it stays locked.
    monkeypatch.setattr(TqdmDefaultWriteLock, "mp_lock", multiprocessing.RLock(), raising=False)
    monkeypatch.setattr(tqdm, "_lock", TqdmDefaultWriteLock(), raising=False)

    class Other(tqdm):
        """As the libraries have, with tqdm's lock in an attribute of its own."""

    Other.set_lock(tqdm.get_lock())

    def run() -> None:
        for bar in (tqdm, Other):
            bar.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    assert finished(in_child(run)) == -signal.SIGKILL
    for lock in tqdm.get_lock().locks:
        assert lock.acquire(False)
        lock.release()
