"""The team of a thread that leaves the work to another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastgen
from fastgen import openmp
from tests.equivalence.models import BY_NAME

pytestmark = [
    pytest.mark.skipif(openmp._pause() is None, reason="torch has no OpenMP of GNU's"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads of a process are counted by Linux's"),
]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def with_a_team(then: Callable[[], object], ends: bool = True) -> tuple[int, int]:
    """Threads of the process before and behind `then`, in a thread that has made a product."""
    found: list[int] = []

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        x = torch.ones(300, 300)
        product = x @ x
        found.append(threads())
        then()
        until = time.monotonic() + 10
        while ends and threads() >= found[0] and time.monotonic() < until:
            time.sleep(0.01)
        found.append(threads())
        assert torch.equal(x @ x, product)
        torch.set_num_threads(before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before, behind = found
    return before, behind


def test_a_team_ends() -> None:
    before, behind = with_a_team(openmp.end_team)
    assert behind == before - 3


def test_a_forked_process_has_no_team_to_end() -> None:
    """It has what OpenMP knows of the team, and none of its threads: to wait for these would take for ever."""
    with_a_team(lambda: None if in_fork(openmp.end_team) == 0 else pytest.fail("it did not end"), ends=False)


def in_fork(run: Callable[[], object]) -> int:
    """The exit status of a forked process that calls it; not 0 if it does not end."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        run()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_an_engine_does_the_work_of_those_who_make_it() -> None:
    model = BY_NAME["llama"].build()
    before, behind = with_a_team(lambda: fastgen.Engine(model))
    assert behind == before - 3
