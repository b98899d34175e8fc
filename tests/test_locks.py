"""Locks that do not stop a forked process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from fastgen.locks import forkable_lock

pytestmark = pytest.mark.sampled(2)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
IN_A_FORK = """
import os, signal, threading, torch
{imports}
held, done = threading.Event(), threading.Event()

def hold():
    with {lock}:
        held.set()
        done.wait()

other = threading.Thread(target=hold, daemon=True)
other.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # where it waits for a thread that it does not have
    for _ in range(2):
        with {lock}:
            pass
    {checks}
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
# Here the other thread still has it.
assert not ({free})
done.set()
other.join()
"""


def in_a_fork(imports: str, lock: str, free: str, checks: str = "pass") -> None:
    code = IN_A_FORK.format(imports=imports, lock=lock, free=free, checks=checks)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_fork
@pytest.mark.parametrize(
    ("imports", "lock", "tried"),
    [
        ("from fastgen.locks import forkable_lock\nlock = forkable_lock()", "lock", "lock"),
        (
            "from fastgen.decoding.captured import graph\ncpu = torch.device('cpu')",
            "graph.taken(cpu)",
            "graph._turn_of(cpu)",
        ),
        (
            "from fastgen.decoding.captured import recording",
            "recording._captures()",
            "recording._one_capture",
        ),
        (
            "from fastgen.optimizer.transformers.captured import graph_cache",
            "graph_cache._lock",
            "graph_cache._lock",
        ),
        ("from fastgen.decoding.captured import program", "program.memory._lock", "program.memory._lock"),
        ("from fastgen.decoding.layers import FastLayers", "FastLayers._lock", "FastLayers._lock"),
    ],
    ids=["a lock", "the turn", "a recording", "what is kept", "the arena", "layers"],
)
def test_a_fork_finds_it_free_whichever_thread_had_it(imports: str, lock: str, tried: str) -> None:
    in_a_fork(imports, lock, f"{tried}.acquire(blocking=False)")


@needs_fork
def test_the_thread_that_forks_keeps_it() -> None:
    code = """
import os, threading
from fastgen.locks import forkable_lock
lock = forkable_lock()
with lock:
    child = os.fork()
    if child == 0:
        found = []
        other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
if child == 0:
    os._exit(0 if found == [False] else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_fork
def test_a_recording_of_another_thread_ends_in_a_fork() -> None:
    checks = """
    from fastgen.decoding.captured.recording import is_capturing
    found = []
    new = threading.Thread(target=lambda: found.append(is_capturing()))
    new.start()
    new.join()
    assert found == [False] and torch.cuda.is_current_stream_capturing is of_torch"""
    imports = "from fastgen.decoding.captured import recording\nof_torch = torch.cuda.is_current_stream_capturing"
    in_a_fork(imports, "recording._captures()", "recording._one_capture.acquire(blocking=False)", checks)


@needs_fork
def test_layers_that_another_thread_uses_are_free_in_a_fork() -> None:
    imports = """
import fastgen
from fastgen.decoding.layers import FastLayers
model = torch.nn.Sequential(torch.nn.Linear(512, 512)).eval()
"""
    checks = """
    assert "forward" not in vars(model[0])
    with fastgen.settings.changed(weight_dtype="int8"), FastLayers.of(model):
        assert "forward" in vars(model[0])"""
    in_a_fork(imports, "FastLayers.of(model)", "FastLayers.of(model)._users == []", checks)


def test_one_thread_has_it_as_often_as_it_likes() -> None:
    lock, found = forkable_lock(), []
    with lock, lock:
        other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
    assert found == [False]
    assert lock.acquire(blocking=False)
    lock.release()
