"""Locks that do not stop a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class ForkableLock:
    """A re-entrant lock of a module. In a forked process no thread has it but the one that has forked, if that had it.

    Other threads do not come along, so nobody would ever give back what they had.

    Args:
        undo: takes back, in the forked process, what another thread has done that had the lock.
    """

    def __init__(self, undo: Callable[[], object] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._undo = undo
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._take_from_others)

    def _take_from_others(self) -> None:
        if self.acquire(blocking=False):
            self.release()
        else:
            self._lock = threading.RLock()
            self._undo()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()
