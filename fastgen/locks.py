"""Locks that do not stop a forked process, nor stay taken after an interrupt."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_made: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()


def forkable_lock(undo: Callable[[], object] = lambda: None) -> Any:
    """A re-entrant lock of a module. In a forked process no thread has it but the one that has forked, if that had it.

    Other threads do not come along, so nobody would ever give back what they had. It is Python's own, in C: with the
    methods of a class in Python, an interrupt could come between getting it and the block that gives it back.

    Args:
        undo: takes back, in the forked process, what another thread has done that had the lock.
    """
    lock = threading.RLock()
    _made[lock] = undo
    return lock


def _take_from_others() -> None:
    """In a forked process."""
    for lock, undo in list(_made.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()
            undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_take_from_others)
