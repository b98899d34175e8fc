"""An interrupt (Ctrl-C) leaves nothing taken and is never swallowed, wherever it comes.

Python raises a KeyboardInterrupt between two of its instructions: after a lock is got and before the `with` block that
would give it back, or at the first instruction of an `__exit__`, which then does nothing. So what FastGen takes or
changes for a while is noted first, with what undoes it (`undoing`). A call of the toolkit's that FastGen serves is
`guarded`: at its end, everything is undone that has not been.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

# What is undone is tried again where one comes; more than so many are none.
_MOST_INTERRUPTS = 1000


class _OfThread(threading.local):
    """What this thread has taken in its innermost guarded call, and the exception that was handled when it began."""

    def __init__(self) -> None:
        self.taken: list[undoing] = []
        self.handled: BaseException | None = None


_here = _OfThread()


def _nothing() -> None:
    """What is left to do."""


class undoing:
    """A context at whose end `undo()` has been called to its end, and not again later.

    What it undoes is done inside of the context. An interrupt may stop `undo` at any point, and then it is called once
    more, from its beginning.
    """

    __slots__ = ("_taken", "_undo")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo, self._taken = undo, _here.taken

    def __enter__(self) -> None:
        self._taken.append(self)

    def __exit__(self, *error: object) -> None:
        """What was taken inside of this context, and an interrupt has kept from being undone, is undone first.

        Without an exception it stays: contexts may overlap.
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
            self._undo = _nothing  # it belongs to what holds this


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which leaves nothing taken, whatever it raises."""

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
            while taken:  # only where an interrupt has come
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
    """Raises what is `behind` an error, if there is something."""
    interrupt = behind(error, handled)
    if interrupt is not None:
        raise interrupt


def behind(error: BaseException, handled: BaseException | None = None) -> BaseException | None:
    """What ends a program, a thread or a call, such as an interrupt, that `error` came of; None if it did not.

    It was on its way when other code raised something else, which could not do what it had to then. What was `handled`
    already when the code began is known of a guarded call.
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
    """Whether this ends what runs, wherever it comes: no `Exception`, or one that a handler of signals has raised.

    A time limit by SIGALRM is such a handler.
    """
    if not isinstance(error, Exception):
        return True
    handlers = _codes_of_handlers()
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _codes_of_handlers() -> set[CodeType]:
    """Code of the handlers in Python that signals have now."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not callable(handler):
            continue
        handler = inspect.unwrap(handler)  # a decorator's code is that of many functions
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found
