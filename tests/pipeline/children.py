"""Runs that end before their time: interrupted, or in forks of the test's process, which may be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from tqdm.std import tqdm

from fastgen.pipeline.generation.model import ModelStage


def in_child(run: Callable[[], object]) -> int:
    """Begins `run` in a process of its own, which ends with 0 if it returns and with 1 if it raises; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(120)  # one that hangs ends
        _take_own_locks()
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextlib.contextmanager
def interrupted_after(
    batches: int, stage: type = ModelStage, method: str = "run", error: Any = KeyboardInterrupt
) -> Iterator[None]:
    """Runs in this block meet Ctrl-C, or another error, in the middle of a batch, once so many have been done."""
    run, begun = getattr(stage, method), itertools.count()

    def interrupted(self: Any, batch: Any) -> Any:
        if next(begun) >= batches:
            raise error
        return run(self, batch)

    with mock.patch.object(stage, method, interrupted):
        yield


@contextlib.contextmanager
def ended_at(owner: object, name: str, error: type[BaseException]) -> Iterator[None]:
    """The run in this block ends with this error where it calls this function."""
    with mock.patch.object(owner, name, side_effect=error), pytest.raises(error):
        yield


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does: a write that would make a file larger than this fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def finished(child: int) -> int:
    """Its exit status; the negative number of the signal that has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _take_own_locks() -> None:
    """A process shares tqdm's lock with its forks: if one is killed while it holds it, all others wait forever."""
    classes = [tqdm]
    while classes:
        found = classes.pop()
        classes += found.__subclasses__()
        if found is tqdm or "_lock" in vars(found):
            found.set_lock(threading.RLock())
