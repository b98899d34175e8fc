"""Runs in forks of the test's process, which may be killed at any moment."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable

from tqdm.std import tqdm


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
