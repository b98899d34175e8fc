"""Locks that do not stop a forked process, and cached properties that stop nobody."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from fastgen.interrupts import cached_property, forkable_lock
from tests.conftest import ROOT

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
IN_A_FORK = """
import os, signal, threading, torch

def held_by_another_thread(lock, is_free, check=lambda: None):
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock():
            held.set()
            done.wait()

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # where it waits for a thread that it does not have
        for _ in range(2):
            with lock():
                pass
        check()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    # Here the other thread still has it.
    assert not is_free()
    done.set()
    other.join()

"""


@needs_fork
def test_a_fork_finds_it_free_whichever_thread_had_it(programs: Path) -> None:
    """Every lock of FastGen's: all in one process."""
    code = """
import fastgen
from fastgen.decoding.captured import graph, program, recording
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.layers import FastLayers
from fastgen.interrupts import forkable_lock
from fastgen.optimizer.transformers.captured import graph_cache

own = forkable_lock()
locks = [lambda: own, lambda: graph_cache._lock, lambda: program.memory._lock, lambda: FastLayers._lock]
for lock in locks:
    held_by_another_thread(lock, lambda: lock().acquire(blocking=False))

cpu = torch.device("cpu")
held_by_another_thread(lambda: graph.taken(cpu), lambda: graph._turn_of(cpu).acquire(blocking=False))

of_torch = torch.cuda.is_current_stream_capturing

def no_recording_is_left():
    found = []
    new = threading.Thread(target=lambda: found.append(is_capturing()))
    new.start()
    new.join()
    assert found == [False] and torch.cuda.is_current_stream_capturing is of_torch

is_free = lambda: recording._one_capture.acquire(blocking=False)
held_by_another_thread(recording._captures, is_free, no_recording_is_left)

model = torch.nn.Sequential(torch.nn.Linear(512, 512)).eval()

def layers_are_free():
    assert "forward" not in vars(model[0])
    with fastgen.settings.changed(weight_dtype="int8"), FastLayers.of(model):
        assert "forward" in vars(model[0])

held_by_another_thread(lambda: FastLayers.of(model), lambda: FastLayers.of(model)._users == [], layers_are_free)
"""
    subprocess.run([programs / "python", "-c", IN_A_FORK + code], check=True, timeout=240)


@needs_fork
def test_the_thread_that_forks_keeps_it() -> None:
    lock = forkable_lock()
    with lock:
        child = os.fork()
        if child == 0:
            found: list[bool] = []
            other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
            other.start()
            other.join()
            os._exit(0 if found == [False] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_one_thread_has_it_as_often_as_it_likes() -> None:
    lock, found = forkable_lock(), []
    with lock, lock:
        other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
    assert found == [False]
    assert lock.acquire(blocking=False)
    lock.release()


def test_a_property_that_another_thread_computes_is_not_waited_for() -> None:
    """By other instances, also in a forked process, which does not have that thread."""
    is_inside, may_leave = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, waits: bool) -> None:
            self.waits = waits

        @cached_property
        def value(self) -> object:
            if self.waits:
                is_inside.set()
                may_leave.wait(60)
            return object()

    slow, quick = Slow(True), Slow(False)
    other = threading.Thread(target=lambda: slow.value)
    other.start()
    is_inside.wait(60)
    reader = threading.Thread(target=lambda: quick.value)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and other.is_alive()
    assert quick.value is quick.value
    may_leave.set()
    other.join()
    assert slow.value is slow.value is not quick.value


def test_no_other_cached_properties() -> None:
    """Python's own have a lock before 3.12."""
    users = [path for path in (ROOT / "fastgen").rglob("*.py") if "cached_property" in path.read_text()]
    kept = {"interrupts.py", "library_code.py"}
    assert len(users) > 5
    for path in users:
        assert "from fastgen.interrupts import cached_property" in path.read_text() or path.name in kept, path
