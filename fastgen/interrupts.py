"""Interrupts and forks: neither leaves anything taken or locked.

An interrupt (Ctrl-C) releases everything taken, and is never swallowed, wherever it comes.

Python raises a KeyboardInterrupt between two of its instructions: after a lock is acquired and before the `with` block
that would release it, or at the first instruction of an `__exit__`, which then does nothing. So FastGen records what it
takes or changes for a while beforehand, with a function that undoes it (`undoing`). A call of the toolkit's that
FastGen serves is `guarded`: at its end, everything is undone that has not been.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

# An undo that is interrupted is tried again, up to this many times.
_MOST_INTERRUPTS = 1000


class _OfThread(threading.local):
    """What this thread has taken in its innermost guarded call, and the exception in handling when that began."""

    def __init__(self) -> None:
        self.taken: list[undoing] = []
        self.handled: BaseException | None = None


_here = _OfThread()


def _nothing() -> None:
    """Does nothing; replaces an undo function that has run."""


class undoing:
    """A context at whose end `undo()` has run to completion, and will not run again.

    The action that it undoes happens inside the context. An interrupt may stop `undo` at any point; it is then called
    again, from its beginning.
    """

    __slots__ = ("_taken", "_undo")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo, self._taken = undo, _here.taken

    def __enter__(self) -> None:
        self._taken.append(self)

    def __exit__(self, *error: object) -> None:
        """First undoes what was taken inside this context if an interrupt has kept it from being undone.

        Without an exception such entries stay, because contexts may overlap.
        """
        taken = self._taken
        if error and error[0] is not None and taken is _here.taken and self in taken:
            while taken[-1] is not self:
                taken[-1].close()
        self.close()

    def close(self) -> None:
        if self in self._taken:
            self._undo()
            self._taken.remove(self)
            self._undo = _nothing  # it refers to the owner of this object


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function so that everything it has taken is undone, whatever it raises."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        outer, handled, taken = _here.taken, _here.handled, list[undoing]()
        try:
            _here.taken, _here.handled = taken, sys.exc_info()[1]
            return function(*args, **kwargs)
        finally:
            _here.taken, _here.handled = outer, handled
            raised: BaseException | None = None
            left = _MOST_INTERRUPTS
            while taken:  # not empty only after an interrupt
                try:
                    last = taken[-1]
                    last.close()
                except BaseException as error:
                    left -= 1
                    if _ends(error) and left > 0:
                        raised = error
                    else:
                        raised = raised or error
                        taken.remove(last)
            if raised is not None:
                raise raised

    return run


def pass_on(error: BaseException, handled: BaseException | None = None) -> None:
    """Raises the interrupt `behind` an error, if there is one."""
    interrupt = behind(error, handled)
    if interrupt is not None:
        raise interrupt


def behind(error: BaseException, handled: BaseException | None = None) -> BaseException | None:
    """Returns the interrupt, or another exception that ends a program, a thread or a call, that led to `error`; or
    None.

    Such an exception may be raised while other code runs, which then fails with another error. Excludes exceptions that
    were already being `handled` when the code began; a guarded call records them itself.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or found is handled or found is _here.handled or id(found) in seen:
            continue
        if _ends(found):
            return found
        seen.add(id(found))
        left += [found.__cause__, found.__context__]
    return None


def _ends(error: BaseException) -> bool:
    """Whether an exception ends what runs, wherever it comes: not an `Exception`, or raised by a signal handler.

    A time limit by SIGALRM is such a handler.
    """
    if not isinstance(error, Exception):
        return True
    handlers = _codes_of_handlers()
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _codes_of_handlers() -> set[CodeType]:
    """Returns the code objects of the present signal handlers in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not callable(handler):
            continue
        handler = inspect.unwrap(handler)  # many functions share a decorator's code
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


# ---- forks

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
