"""The two ways in which requests come to an executor.

`Waiting` has the waiting and the running requests of an engine: the state that users' threads share with the engine's
thread. `turns` runs a list of requests in the calling thread: all exist at the beginning, and no others come.
"""

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
from typing import Any, NamedTuple

from fastgen import openmp
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import EngineFull, Request
from fastgen.interrupts import forkable_lock

# Seconds that the interpreter's exit waits for the running step.
_SECONDS_AT_EXIT = 60
_all: weakref.WeakSet[Waiting] = weakref.WeakSet()


@contextlib.contextmanager
def cancelled_together(requests: Sequence[Request]) -> Iterator[None]:
    """Cancels the requests if this context raises."""
    try:
        yield
    except BaseException:
        for request in requests:
            request.future.cancel()
        raise


def _is_for_nobody(request: Request) -> bool:
    """Whether the event loop whose tasks wait for the request has been closed."""
    return request.loop is not None and request.loop.is_closed()


class Waiting:
    """Requests in order of arrival, up to `most`, and the thread that runs them.

    Requests without room wait outside, together with their submitter, and enter in turn as soon as there is room.

    Attributes:
        failure: what the engine's own code has raised; None if nothing.
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
        self._changed = threading.Condition(forkable_lock())  # the engine's thread and pauses wait for it
        self._outside: OrderedDict[Future[None], deque[Request]] = OrderedDict()  # by the future that tells who submits
        self._lets_in = False  # set while `_let_in` runs
        self._loops: set[Any] = set()  # event loops whose tasks have submitted requests
        _all.add(self)

    # ---- for the threads of the users

    @property
    def is_served_here(self) -> bool:
        """Whether requests run in the calling thread. It must not wait, because it makes room and finishes them."""
        here = threading.current_thread()
        return here is self.thread or self._executor.runs_in(here)

    def put(self, requests: Sequence[Request], timeout: float | None) -> None:
        """Adds requests, as many at a time as there is room for.

        Args:
            timeout: seconds to wait for room, for all requests together; None for no limit.

        Raises:
            EngineFull: there was no room; the requests that were added are cancelled.
            ValueError: the engine is closed.
        """
        with self._asking(requests) as told:
            concurrent.futures.wait([told], 0 if self.is_served_here else timeout)

    async def aput(self, requests: Sequence[Request], timeout: float | None) -> None:
        """As `put`, for an event loop. Blocks no other thread: a loop has only a few, which all tasks share."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._loops.add(loop)
        for request in requests:
            request.loop = loop
        with self._asking(requests) as told:
            if not told.done():  # not `wait_for`, which may lose the task's cancellation before Python 3.12
                await asyncio.wait([asyncio.wrap_future(told)], timeout=timeout)

    @contextlib.contextmanager
    def _asking(self, requests: Sequence[Request]) -> Iterator[Future[None]]:
        """Queues requests until the block ends. Yields a future: done when all are in, or the engine is closed."""
        if threading.current_thread() not in [each.thread for each in list(_all)]:
            openmp.end_team()  # of the caller, because the engine's thread computes
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
        """Adds requests from outside for which there is room now.

        Any line of it may trigger the collection of a stream or a task, whose requests then make room: the loop uses
        that, too.
        """
        if self._lets_in:
            return
        self._lets_in = True
        try:
            while len(self.requests) < self.most and self._outside:
                for told, left in self._outside.items():  # not `next(iter(...))`: the dict may change between the two
                    self._let_one_in(told, left)
                    break
        finally:
            self._lets_in = False

    def _let_one_in(self, told: Future[None], left: deque[Request]) -> None:
        """Adds the first of these requests from outside, unless nobody waits for them any more."""
        if _is_for_nobody(left[0]):
            self._outside.pop(told, None)
            for request in left:
                request.future.cancel()
            return
        request = left.popleft()
        self.requests.append(request)
        self.counts["submitted"] += 1
        if not left and self._outside.pop(told, None) is not None:  # unless the submitter has been collected
            told.set_result(None)
        request.future.add_done_callback(partial(self._over, request))
        if self.thread is None:
            thread = threading.Thread(target=self._serve, name="fastgen-engine", daemon=True)
            thread.start()
            self.thread = thread
        self._changed.notify_all()

    def _over(self, request: Request, future: Any) -> None:
        """Handles a request that has its result, or was cancelled."""
        is_cancelled = future.cancelled()
        with self._changed:
            for those in (self.running, self.requests):
                if request in those:
                    those.remove(request)
            if is_cancelled:
                future.set_running_or_notify_cancel()  # only this notifies waiters for several futures
            kind = "cancelled" if is_cancelled else "finished" if future.exception() is None else "failed"
            self.counts[kind] += 1
            self._let_in()
            self._changed.notify_all()

    def _shut(self) -> None:
        """Lets no more requests in."""
        self._is_closed = True
        for told in self._outside:
            told.set_result(None)
        self._outside.clear()
        self._changed.notify_all()

    def close(self, cancel: bool = False, seconds: float | None = 0.0) -> None:
        """Stops accepting requests. Waiting ones still run.

        Args:
            cancel: cancel the waiting and the running requests.
            seconds: how long to wait for the thread to end; None for no limit.
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
        """Keeps requests from running inside this block; waits for the running ones first."""
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_idle)
            yield
        finally:
            with self._changed:
                self._pauses = max(self._pauses - 1, 0)  # 0 in a process that was forked in the block
                self._changed.notify_all()

    # ---- for the thread of the engine

    def _serve(self) -> None:
        """Runs the engine's thread. Holds no reference to the engine, which may be collected while requests run."""
        try:
            while self._has_some():
                for _ in self._executor.steps(self.take):
                    pass
                for request in list(self.running):  # nobody must wait forever
                    request.future.settle(RuntimeError("the engine has lost the request: please report this"))
        except BaseException as error:
            with self._changed:
                self._is_idle, self.failure = True, error
                self._shut()
                left = [*self.requests, *self.running]
            self._executor.reset()
            for request in left:  # nobody is left to run them
                request.future.settle(error)
            raise

    def _has_some(self) -> bool:
        """Waits for requests that may run; returns False if the engine is closed and none are left."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses if self.requests else self._is_closed)
            self._is_idle = not self.requests
            return bool(self.requests)

    def take(self) -> list[Request]:
        """Takes the requests that run next, beside the running ones: none if none fits, or the engine is paused."""
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
        """Fails the requests in a forked process: they belong to the parent, whose thread does not exist here."""
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
    """Stops the threads at exit: none may be in the model's code when the interpreter goes away."""
    for waiting in list(_all):
        waiting.close(cancel=True, seconds=_SECONDS_AT_EXIT)


class Turn(NamedTuple):
    """What has happened since the previous turn.

    Attributes:
        finished: requests that have got a result.
        busy: rows that were in use meanwhile.
        waiting: requests that have not begun.
    """

    finished: list[Request]
    busy: int
    waiting: int


def turns(executor: ContinuousBatches, requests: Sequence[Request]) -> Iterator[Turn]:
    """Runs requests, and yields after each turn in which some began or finished. They may begin in the given order.

    Raises:
        BaseException: one that is not a request's failure, such as an interrupt. The remaining requests get no result.
    """
    left, finished = list(requests), list[Request]()
    rows, told = 0, len(left)  # rows of requests that run; requests that waited at the last turn

    def pass_on_interrupts() -> None:
        for error in (request.future.exception() for request in finished):
            if error is not None and not isinstance(error, Exception):
                raise error

    def more() -> list[Request]:
        nonlocal rows
        pass_on_interrupts()  # before others begin
        chosen = executor.choose(left) if left else []
        rows += sum(request.rows for request in chosen)
        return chosen

    for request in requests:
        request.future.add_done_callback(lambda done, request=request: finished.append(request))  # type: ignore[misc]
    for _ in executor.steps(more):
        pass_on_interrupts()
        if finished or len(left) < told:
            yield Turn([*finished], min(rows, executor.most_rows), len(left))
        told = len(left)
        rows -= sum(request.rows for request in finished)
        finished.clear()
