"""Locks that neither block a forked process nor stay locked after an interrupt, and cached properties without one."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

_made: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()


def forkable_lock(undo: Callable[[], object] = lambda: None) -> Any:
    """Returns a re-entrant lock for a module. In a forked process, only the forking thread may still hold it.

    Other threads do not exist there, so nobody would release their locks. This is Python's own lock, in C: in the
    methods of a Python class, an interrupt could come between acquiring it and the block that releases it.

    Args:
        undo: undoes, in the forked process, what another thread has done while it held the lock.
    """
    lock = threading.RLock()
    _made[lock] = undo
    return lock


def _take_from_others() -> None:
    """Releases other threads' locks in a forked process."""
    for lock, undo in list(_made.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()
            undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_take_from_others)


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """A cached property without the lock that all instances share before Python 3.12.

        Other threads would wait for it, and a process that is forked while a thread holds it would wait for ever.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return vars(instance).setdefault(self.attrname, self.func(instance))
