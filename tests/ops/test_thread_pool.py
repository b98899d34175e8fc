"""FastGen's own threads: the same results as on torch's, one thread's at a time, and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from fastgen.ops import _library, rms_norm, runtime
from fastgen.ops.linear import choose, copies
from fastgen.ops.linear.kernels import GEMM, GEMV
from tests.ops.instructions import threads

needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
take, give_back = torch.ops.fastgen.take_team.default, torch.ops.fastgen.give_team_back.default


@pytest.fixture
def no_pool():
    yield
    give_back()
    runtime._left = 0


def others_time() -> float:
    return time.process_time() - time.thread_time()


@needs_kernel
@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_results_are_those_of_torchs_threads(rows, number, no_pool):
    torch.manual_seed(rows)
    weight, bias = torch.randn(301, 128), torch.randn(301)
    x, many = torch.randn(rows, 128), torch.randn(rows * 50, 576)

    def run():
        return (
            GEMV.multiply(x, weight, bias),
            GEMM.multiply(x, weight, bias),
            choose.linear(x, copies.panels(weight.half()), bias),
            rms_norm.rms_norm(many, torch.ones(576), 1e-6),
        )

    expected = run()
    assert take(number)
    for _ in range(20):  # with workers that sleep at first, and that look out for work then
        for found, wanted in zip(run(), expected, strict=True):
            assert torch.equal(found, wanted)


@needs_kernel
def test_work_is_divided(no_pool):
    x, weight = torch.randn(2000, 576), torch.ones(576)
    with threads(1):
        rms_norm.rms_norm(x, weight, 1e-6)
        assert take(2)
        before, own_before = others_time(), time.thread_time()
        for _ in range(200):
            rms_norm.rms_norm(x, weight, 1e-6)
        assert others_time() - before > (time.thread_time() - own_before) / 10  # and not just by how clocks are read


@needs_kernel
def test_one_thread_has_it(no_pool):
    assert not take(1)
    assert take(2)
    assert not take(2)  # it has it already
    found = []

    def other():
        found.append(take(2))
        give_back()

    for is_free in (False, True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found.pop() is is_free
        give_back()
    assert take(2)


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="this system neither forks nor binds threads to processors")
def test_processors_and_forks():
    """Its threads use the processors of the thread that has it. A fork has threads of its own, whoever forks."""
    code = """
import os, signal, torch
torch.set_num_threads(1)
from fastgen.ops import runtime
from fastgen.ops import rms_norm
x, weight = torch.randn(2000, 64), torch.ones(64)
expected = rms_norm.rms_norm(x, weight, 1e-6)
before = {int(name) for name in os.listdir("/proc/self/task")}
assert torch.ops.fastgen.take_team(3)
workers = {int(name) for name in os.listdir("/proc/self/task")} - before
assert len(workers) == 2
for processors in ({min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)):
    torch.ops.fastgen.give_team_back()
    os.sched_setaffinity(0, processors)
    assert torch.ops.fastgen.take_team(2)
    assert all(os.sched_getaffinity(worker) == processors for worker in workers)
assert torch.equal(rms_norm.rms_norm(x, weight, 1e-6), expected)
for has_it in (True, False):  # the thread that forks
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # where it waits for threads that it does not have
        equal = torch.equal(rms_norm.rms_norm(x, weight, 1e-6), expected)
        taken = torch.ops.fastgen.take_team(2)
        os._exit(0 if equal and taken and torch.equal(rms_norm.rms_norm(x, weight, 1e-6), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    torch.ops.fastgen.give_team_back()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no threads that run when nothing else does")
def test_nobody_waits_for_a_thread_that_does_not_run():
    """Its part is run by the thread that asked for it, as where other processes have the processors."""
    code = """
import os, time, torch
torch.set_num_threads(1)
from fastgen.ops import rms_norm, runtime
x, weight = torch.randn(2000, 576), torch.ones(576)
expected = rms_norm.rms_norm(x, weight, 1e-6)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = {int(name) for name in os.listdir("/proc/self/task")}
assert torch.ops.fastgen.take_team(4)
for worker in {int(name) for name in os.listdir("/proc/self/task")} - before:
    os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
def run():
    for _ in range(300):
        assert torch.equal(rms_norm.rms_norm(x, weight, 1e-6), expected)
torch.ops.fastgen.give_team_back()
alone = time.thread_time()
run()
alone = time.thread_time() - alone
assert torch.ops.fastgen.take_team(4)
others = time.process_time() - time.thread_time()
run()
others = time.process_time() - time.thread_time() - others
assert others < alone / 4, (others, alone)  # three quarters of the work are theirs otherwise
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_kernel
@pytest.mark.skipif(runtime._OF_THREAD is None, reason="how often a thread sleeps is not known on this system")
def test_it_is_used_where_torchs_threads_sleep(monkeypatch, no_pool):
    sleeps, threads = 0, torch.get_num_threads()
    monkeypatch.setattr(runtime, "_switches", lambda: sleeps)
    monkeypatch.setattr(runtime, "REPLAYS", 3)
    monkeypatch.setattr(runtime, "_next", 3)
    monkeypatch.setattr(runtime, "MOST_REPLAYS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(threads, 2))
    monkeypatch.setattr(runtime, "processors", lambda: max(threads, 2))

    def has_pool() -> bool:
        taken = take(2)
        if taken:
            give_back()
        return not taken

    def replay(slept: int) -> bool:
        nonlocal sleeps
        with runtime.for_replay():
            sleeps += slept
            return has_pool()

    assert not replay(0)
    assert not replay(runtime._MOST_SWITCHES)
    assert not replay(runtime._MOST_SWITCHES + 1)
    assert [replay(0) for _ in range(4)] == [True, True, True, False]
    assert not replay(0)
    assert not has_pool()
    slept = runtime._MOST_SWITCHES + 1
    for count in (3, 6, 8, 8):  # torch's threads have a try behind more and more
        assert not replay(slept)
        assert [replay(0) for _ in range(count)] == [True] * count
    assert not replay(0)
    assert not replay(slept)
    assert [replay(0) for _ in range(4)] == [True, True, True, False]


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads to processors")
def test_it_has_a_processor_for_each_thread(monkeypatch, no_pool):
    """Otherwise they take turns, and each of them looks out for work first."""
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        runtime._left = 2
        with runtime.for_replay():
            assert take(2)  # it was free
    finally:
        os.sched_setaffinity(0, allowed)


@needs_kernel
def test_it_is_given_back_when_a_replay_fails(monkeypatch, no_pool):
    runtime._left = 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(runtime, "processors", lambda: 2)
    with pytest.raises(KeyError), runtime.for_replay():
        assert not take(2)  # it has it
        raise KeyError
    assert take(2)
