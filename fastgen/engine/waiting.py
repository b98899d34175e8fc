"""The requests that wait, and those that run: what the threads of the users and that of the engine share."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fastgen.engine.requests import EngineFull, Request
from fastgen.locks import forkable_lock

# How long the end of a program waits for the step that runs.
_SECONDS_AT_EXIT = 60
_all: weakref.WeakSet[Waiting] = weakref.WeakSet()


class Waiting:
    """Requests in the order in which they came, up to `most`.

    Args:
        choose: which of those that wait run next, together; the first one is among them.
        stop: ends the call that runs, if none of its requests is wanted any more.
        reset: nothing runs any more: this process was forked.

    Attributes:
        failure: what the engine's own code has raised; None as long as it has not.
    """

    def __init__(
        self,
        most: int,
        choose: Callable[[Sequence[Request]], list[Request]],
        stop: Callable[[], object],
        reset: Callable[[], object],
    ) -> None:
        self.most = most
        self.requests: list[Request] = []
        self.running: list[Request] = []
        self.thread: threading.Thread | None = None  # that takes the requests
        self.is_closed = False
        self.failure: BaseException | None = None
        self.submitted = self.cancelled = 0  # so many, so far
        self._choose, self._stop, self._reset = choose, stop, reset
        self._pauses = 0
        self._changed = threading.Condition(forkable_lock())
        _all.add(self)

    def start(self, serve: Callable[[], object]) -> None:
        """Starts the thread that takes the requests, unless it has begun."""
        with self._changed:
            if self.thread is None and not self.is_closed:
                self.thread = threading.Thread(target=serve, name="fastgen-engine", daemon=True)
                self.thread.start()

    # ---- for the threads of the users

    def put(self, requests: Sequence[Request], timeout: float | None) -> None:
        """Adds requests, as many at a time as there is room for.

        Args:
            timeout: seconds to wait for room, all together; None for as long as it takes.

        Raises:
            EngineFull: there was none; those that were added are cancelled.
            ValueError: it is closed.
        """
        for request in requests:
            request.future.on_cancel = partial(self._drop, request)
        left = list(requests)
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with self._changed:
                while left := [request for request in left if not request.future.done()]:
                    if self.is_closed:
                        raise ValueError("the engine is closed")
                    room = self.most - len(self.requests)
                    if room > 0:
                        for request in left[:room]:
                            request.is_submitted = True
                        self.requests += left[:room]
                        self.submitted += len(left[:room])
                        del left[:room]
                        self._changed.notify_all()
                    elif not self._waits(until):
                        raise EngineFull(f"{self.most} requests wait already")
        except BaseException:
            for request in requests:
                request.future.cancel()
            raise

    def _waits(self, until: float | None) -> bool:
        """Waits for a change; False where the time is over, or where it is for this thread to make room."""
        if threading.current_thread() is self.thread:
            return False
        left = None if until is None else until - time.monotonic()
        return (left is None or left > 0) and self._changed.wait(left)

    def _drop(self, request: Request) -> None:
        """A request has been cancelled."""
        with self._changed:
            self.cancelled += request.is_submitted
            if request in self.requests:
                self.requests.remove(request)
            elif request in self.running:
                self._stop()
            self._changed.notify_all()  # there is room; and who waits to add this one need not

    def cancel_all(self) -> None:
        """Cancels what waits and what runs."""
        with self._changed:
            found = [*self.requests, *self.running]
        for request in found:
            request.future.cancel()

    def close(self) -> None:
        """Nothing can be added any more. What waits is run."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this block nothing runs: what does is waited for."""
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self.running)
            yield
        finally:
            with self._changed:
                self._pauses = max(self._pauses - 1, 0)  # none is left in a process that was forked in the block
                self._changed.notify_all()

    # ---- for the thread of the engine

    def take(self) -> list[Request] | None:
        """The requests that run next, once there are some; None when it is closed, and none are left."""
        with self._changed:
            self.running = []
            self._changed.notify_all()
            self._changed.wait_for(self._may_take)
            if not self.requests:
                return None
            self.running = self._choose(self.requests)
            self._remove(self.running)
            return self.running

    def take_more(self) -> list[Request]:
        """Those that run beside what runs already: none where none fits, or it is paused."""
        if not self.requests:
            return []
        with self._changed:
            self.running = [request for request in self.running if not request.future.done()]
            chosen = [] if self._pauses or not self.requests else self._choose(self.requests)
            if chosen:
                self._remove(chosen)
                self.running += chosen
            return chosen

    def settle_running(self) -> None:
        """Nothing runs any more: nobody is left to wait in vain."""
        for request in self.running:
            request.future.settle(RuntimeError("the engine has lost the request: please report this"))

    def _remove(self, chosen: list[Request]) -> None:
        found = set(map(id, chosen))
        self.requests = [request for request in self.requests if id(request) not in found]
        self._changed.notify_all()

    def _may_take(self) -> bool:
        return not self._pauses if self.requests else self.is_closed

    def fail(self, error: BaseException) -> None:
        """The engine's own code has failed: nobody is left to run anything."""
        with self._changed:
            self.is_closed, self.failure = True, error
            found = [*self.requests, *self.running]
            self.requests, self.running = [], []
            self._changed.notify_all()
        for request in found:
            request.future.settle(error)

    def _forked(self) -> None:
        """In a forked process: the requests are those of the other one, whose thread is not here."""
        for request in (*self.requests, *self.running):
            request.future.give_up(RuntimeError("the process was forked: the request runs in the one it came from"))
        self.requests, self.running, self.thread, self._pauses = [], [], None, 0
        self._reset()


def _forked() -> None:
    for waiting in list(_all):
        waiting._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    """At the end of the program: a thread must not be in the model's code when the interpreter goes."""
    for waiting in list(_all):
        waiting.close()
        waiting.cancel_all()
        if waiting.thread is not None:
            waiting.thread.join(_SECONDS_AT_EXIT)
