"""Runs requests of a model with its own `generate`, such as Whisper's, so that its calls of the library's run in slots.

Such a `generate` prepares inputs, calls the library's `generate` once or for each window of a recording, and builds its
result from what that returns. It runs in a thread of its own, but never at the same time as the engine's thread: it
blocks from its call of the library's `generate` until the result is there. The inner call is an ordinary request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastgen import openmp
from fastgen.engine.calls import by_itself, drawing
from fastgen.engine.options import make_inner
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.entering import Elsewhere, running_elsewhere


class _Abandoned(BaseException):
    """Ends a call whose result nobody wants any more."""


class OwnGenerate:
    """One request, run by the model's own `generate`.

    Args:
        model: the model whose `generate` runs.
        inside: the model whose steps the engine runs; calls of any other one run as they are.
        request: a request of that model.
        most_rows: limit of rows of an inner request.
        changes: how often the model has changed so far.

    Attributes:
        outcome: what the call returns or raises, once it is over.
        changes: as given.
        thread: the thread in which it runs.
    """

    def __init__(self, model: Any, inside: Any, request: Request, most_rows: int, changes: int) -> None:
        self.request, self.changes = request, changes
        self.outcome: Any = None
        self._model, self._inside, self._most_rows = model, inside, most_rows
        self._inner: Request | None = None
        self._is_over, self._is_abandoned = False, False
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(self._ask,), name="fastgen-generate", daemon=True)
        request.future.add_done_callback(lambda done: self._end_inner())  # in case it is cancelled

    @property
    def why_alone(self) -> list[str]:
        """The reason for running alone, if the request did."""
        return [self.request.alone] if self._inner is None and self.request.alone is not None else []

    @property
    def may_go_on(self) -> bool:
        """Whether it is not waiting for an inner request."""
        return self._inner is None or self._inner.future.done()

    def go_on(self) -> Request | None:
        """Runs the call to its next inner request, and returns that; None if it is over. Blocks the caller."""
        openmp.end_team()  # of this thread, because the other one computes now
        if self.thread.ident is None:
            self._start()
        else:
            self._may_run.release()
        try:
            self._stands.acquire()
        except BaseException:  # an interrupt
            self.abandon()
            raise
        return None if self._is_over else self._inner

    def abandon(self) -> None:
        """Ends the call's thread instead of continuing it."""
        self._is_abandoned = True
        self._may_run.release()

    def _start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError:  # no more threads can start: the call runs to its end in this one
            self._run(self._as_ever)

    # ---- in the thread of the call

    def _run(self, how: Elsewhere) -> None:
        try:
            with running_elsewhere(how):
                self.outcome = by_itself(self._model, self.request, self.request.options)
        except BaseException as error:  # user code may raise anything
            self.outcome = error
        self._is_over = True
        self._stop()

    def _stop(self) -> None:
        openmp.end_team()
        self._stands.release()

    def _ask(self, model: Any, arguments: dict[str, Any], as_ever: Callable[[], Any]) -> Any:
        """Replaces a call of the library's `generate` by a request to the engine, and returns its result."""
        self._end_if_abandoned()
        is_own = model is self._inside  # user code may call other models, or exchange a part
        made = make_inner(model, arguments, self._most_rows, self.request.seed) if is_own else None
        if made is None:
            return self._as_ever(model, arguments, as_ever)
        self._inner = made
        if self.request.future.done():
            self._end_inner()
        self._stop()
        self._may_run.acquire()
        self._end_if_abandoned()
        return made.future.result()

    def _as_ever(self, model: Any, arguments: dict[str, Any], as_ever: Callable[[], Any]) -> Any:
        """Runs the call itself, without the engine."""
        with running_elsewhere(None), drawing([self.request], model.device):
            return as_ever()

    def _end_inner(self) -> None:
        if self._inner is not None:
            self._inner.future.cancel()

    def _end_if_abandoned(self) -> None:
        if self._is_abandoned:
            raise _Abandoned


class OwnCalls:
    """The unfinished calls of a model's own `generate`. They can continue only inside this object's context.

    Args:
        model: the model whose `generate` runs.
        inside: the model whose steps the engine runs.
        most_rows: limit of rows of an inner request.
    """

    def __init__(self, model: Any, inside: Any, most_rows: int) -> None:
        self._model, self._inside, self._most_rows = model, inside, most_rows
        self._calls: list[OwnGenerate] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def some_may_go_on(self) -> bool:
        """Whether some call is not waiting for an inner request."""
        return any(each.may_go_on for each in self._calls)

    def run_in(self, thread: threading.Thread) -> bool:
        """Whether one of the calls runs in this thread."""
        return any(each.thread is thread for each in list(self._calls))

    def begin(self, request: Request, changes: int) -> None:
        """Adds a request; it begins with the next `go_on`."""
        self._calls.append(OwnGenerate(self._model, self._inside, request, self._most_rows, changes))

    def go_on(self) -> Iterator[tuple[OwnGenerate, Request | None]]:
        """Runs each call that may continue to its next inner request. Yields the call and that request, or None if the
        call is over.
        """
        for each in [each for each in self._calls if each.may_go_on]:
            inner = each.go_on()
            if inner is None:
                self._calls.remove(each)
            yield each, inner

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """Abandons all calls that are left."""
        while self._calls:
            self._calls.pop().abandon()
