"""The requests that wait, and those that run: what the threads of the users and that of the engine share."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastgen import openmp
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import EngineFull, Request
from fastgen.locks import forkable_lock

# How long the end of a program waits for the step that runs.
_SECONDS_AT_EXIT = 60
_all: weakref.WeakSet[Waiting] = weakref.WeakSet()


@contextlib.contextmanager
def cancelled_together(requests: Sequence[Request]) -> Iterator[None]:
    """What is raised in this context cancels the requests."""
    try:
        yield
    except BaseException:
        for request in requests:
            request.future.cancel()
        raise


def _is_for_nobody(request: Request) -> bool:
    """Whether the event loop whose tasks wait for a request has been closed."""
    return request.loop is not None and request.loop.is_closed()


class Waiting:
    """Requests in the order in which they came, up to `most`, and the thread that runs them.

    Those that there is no room for stay outside, with who submits them, and come in as soon as there is: in their turn.

    Attributes:
        failure: what the engine's own code has raised; None as long as it has not.
        counts: requests "submitted", "finished", "failed" and "cancelled".
    """

    def __init__(self, most: int, executor: ContinuousBatches) -> None:
        self.most = most
        self.requests: list[Request] = []
        self.running: list[Request] = []
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.counts = Counter(submitted=0, finished=0, failed=0, cancelled=0)
        self._executor = executor
        self._is_closed, self._is_idle, self._pauses = False, True, 0
        self._changed = threading.Condition(forkable_lock())  # the thread of the engine waits for it, and pauses do
        self._outside: OrderedDict[Future[None], deque[Request]] = OrderedDict()  # by who is told when all are in
        self._lets_in = False  # at this moment
        self._loops: set[Any] = set()  # event loops whose tasks have asked
        _all.add(self)

    # ---- for the threads of the users

    @property
    def is_served_here(self) -> bool:
        """Whether requests run in the thread that asks: it is for this one to make room, and to finish them."""
        here = threading.current_thread()
        return here is self.thread or self._executor.runs_in(here)

    def put(self, requests: Sequence[Request], timeout: float | None) -> None:
        """Adds requests, as many at a time as there is room for.

        Args:
            timeout: seconds to wait for room, all together; None for as long as it takes.

        Raises:
            EngineFull: there was none; those that were added are cancelled.
            ValueError: it is closed.
        """
        with self._asking(requests) as told:
            concurrent.futures.wait([told], 0 if self.is_served_here else timeout)

    async def aput(self, requests: Sequence[Request], timeout: float | None) -> None:
        """As `put`, for the thread of an event loop. No other thread waits meanwhile: a loop has few that all share."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._loops.add(loop)
        for request in requests:
            request.loop = loop
        with self._asking(requests) as told:
            if not told.done():  # not `wait_for`, which before Python 3.12 may lose the cancellation of the task
                await asyncio.wait([asyncio.wrap_future(told)], timeout=timeout)

    @contextlib.contextmanager
    def _asking(self, requests: Sequence[Request]) -> Iterator[Future[None]]:
        """What is done when all of these are in, or the engine is closed. They have this block to come in."""
        if threading.current_thread() not in [each.thread for each in list(_all)]:
            openmp.end_team()  # of the caller: the work is that of the engine's thread
        told, left = Future[None](), deque(requests)
        with cancelled_together(requests):
            try:
                with self._changed:
                    if self._is_closed or not left:
                        told.set_result(None)
                    else:
                        self._outside[told] = left
                        self._let_in()
                yield told
            finally:
                with self._changed:
                    self._outside.pop(told, None)
            if left and told.done():
                raise ValueError("the engine is closed")
            if left:
                raise EngineFull(f"{self.most} requests wait already")

    def _let_in(self) -> None:
        """Adds those from outside that there is room for now.

        Any line of it may collect a stream, or a task, whose requests make room: that is seen here, too.
        """
        if self._lets_in:
            return
        self._lets_in = True
        try:
            while len(self.requests) < self.most and self._outside:
                for told, left in self._outside.items():  # not `next`, between which and `iter` they may change
                    self._let_one_in(told, left)
                    break
        finally:
            self._lets_in = False

    def _let_one_in(self, told: Future[None], left: deque[Request]) -> None:
        """Adds the first of these from outside, unless nobody waits for them any more."""
        if _is_for_nobody(left[0]):
            self._outside.pop(told, None)
            for request in left:
                request.future.cancel()
            return
        request = left.popleft()
        self.requests.append(request)
        self.counts["submitted"] += 1
        if not left and self._outside.pop(told, None) is not None:  # or who asks has been collected
            told.set_result(None)
        request.future.add_done_callback(partial(self._over, request))
        if self.thread is None:
            thread = threading.Thread(target=self._serve, name="fastgen-engine", daemon=True)
            thread.start()
            self.thread = thread
        self._changed.notify_all()

    def _over(self, request: Request, future: Any) -> None:
        """A request has its result, or was cancelled."""
        is_cancelled = future.cancelled()
        with self._changed:
            for those in (self.running, self.requests):
                if request in those:
                    those.remove(request)
            if is_cancelled:
                future.set_running_or_notify_cancel()  # what waits for several futures is told only by this
            kind = "cancelled" if is_cancelled else "finished" if future.exception() is None else "failed"
            self.counts[kind] += 1
            self._let_in()
            self._changed.notify_all()

    def _shut(self) -> None:
        """Nobody comes in any more."""
        self._is_closed = True
        for told in self._outside:
            told.set_result(None)
        self._outside.clear()
        self._changed.notify_all()

    def close(self, cancel: bool = False, seconds: float | None = 0.0) -> None:
        """Nothing can be added any more. What waits is run.

        Args:
            cancel: cancel what waits and what runs.
            seconds: to wait for the thread to end; None for as long as it takes.
        """
        with self._changed:
            self._shut()
            left = [*self.requests, *self.running] if cancel else []
        for request in left:
            request.future.cancel()
        if self.thread is not None and not self.is_served_here and seconds != 0:
            self.thread.join(seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this block nothing runs: what does is waited for."""
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_idle)
            yield
        finally:
            with self._changed:
                self._pauses = max(self._pauses - 1, 0)  # none is left in a process that was forked in the block
                self._changed.notify_all()

    # ---- for the thread of the engine

    def _serve(self) -> None:
        """What the thread does. It does not hold the engine, which may go while requests run."""
        try:
            while self._has_some():
                for _ in self._executor.steps(self.take):
                    pass
                for request in list(self.running):  # nobody is to wait in vain
                    request.future.settle(RuntimeError("the engine has lost the request: please report this"))
        except BaseException as error:
            with self._changed:
                self._is_idle, self.failure = True, error
                self._shut()
                left = [*self.requests, *self.running]
            self._executor.reset()
            for request in left:  # nobody is left to run anything
                request.future.settle(error)
            raise

    def _has_some(self) -> bool:
        """Waits for requests that may run; False when it is closed, and none are left."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses if self.requests else self._is_closed)
            self._is_idle = not self.requests
            return bool(self.requests)

    def take(self) -> list[Request]:
        """Those that run next, beside what runs already: none where none fits, or it is paused."""
        with self._changed:
            self._cancel_for_nobody()
            chosen = self._executor.choose(self.requests) if self.requests and not self._pauses else []
            self.running += [request for request in chosen if not request.future.done()]
            self._let_in()
            return chosen

    def _cancel_for_nobody(self) -> None:
        """Cancels the requests of event loops that have been closed since the last time."""
        for loop in [each for each in self._loops if each.is_closed()]:
            self._loops.discard(loop)
            for request in [*self.requests, *self.running]:
                if request.loop is loop:
                    request.future.cancel()

    def _forked(self) -> None:
        """In a forked process: the requests are those of the other one, whose thread is not here."""
        for request in (*self.requests, *self.running):
            request.future.give_up(RuntimeError("the process was forked: the request runs in the one it came from"))
        self.requests, self.running, self.thread, self._pauses, self._is_idle = [], [], None, 0, True
        self._outside.clear()
        self._lets_in = False
        self._executor.reset()


def _forked() -> None:
    for waiting in list(_all):
        waiting._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    """At the end of the program: a thread must not be in the model's code when the interpreter goes."""
    for waiting in list(_all):
        waiting.close(cancel=True, seconds=_SECONDS_AT_EXIT)
