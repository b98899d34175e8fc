"""Requests of a model with a `generate` of its own, such as Whisper's: what that asks the library's for runs in slots.

Such a `generate` prepares inputs, calls the library's, once or for each window of a recording, and makes its result of
what that returns. It runs in a thread of its own, but never beside the engine's: it stands still from where it calls
the library's until there is the result. Meanwhile the inner call is a request like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastgen import openmp
from fastgen.engine.adapters import model_inside
from fastgen.engine.calls import by_itself, drawing
from fastgen.engine.options import make_inner
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.entering import Elsewhere, running_elsewhere


class _Abandoned(BaseException):
    """Nobody wants the result of a call any more: it ends where it stands."""


class OwnGenerate:
    """One request, run by the model's own `generate`.

    Args:
        model: whose `generate` runs.
        request: of the model.
        most_rows: of an inner request.
        changes: how often the model has changed so far.

    Attributes:
        outcome: what it returns or raises, once it is over.
        changes: as given.
        thread: in which it runs.
    """

    def __init__(self, model: Any, request: Request, most_rows: int, changes: int) -> None:
        self.request, self.changes = request, changes
        self.outcome: Any = None
        self._model, self._most_rows = model, most_rows
        self._inner: Request | None = None
        self._is_over, self._is_abandoned = False, False
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(self._ask,), name="fastgen-generate", daemon=True)
        request.future.add_done_callback(lambda done: self._end_inner())  # it has been cancelled

    @property
    def why_alone(self) -> list[str]:
        """Why it ran alone, if it did."""
        return [self.request.alone] if self._inner is None and self.request.alone is not None else []

    @property
    def may_go_on(self) -> bool:
        """Whether nothing that it waits for is missing."""
        return self._inner is None or self._inner.future.done()

    def go_on(self) -> Request | None:
        """Runs it to its next inner request, which is returned; None when it is over. The caller waits meanwhile."""
        openmp.end_team()  # of this thread, as the other one computes
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
        """It is not to go on: its thread ends."""
        self._is_abandoned = True
        self._may_run.release()

    def _start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError:  # there are as many threads as there may be: it runs to its end here
            self._run(self._as_ever)

    # ---- in the thread of the call

    def _run(self, how: Elsewhere) -> None:
        try:
            with running_elsewhere(how):
                self.outcome = by_itself(self._model, self.request, self.request.options)
        except BaseException as error:  # whatever the user's code raises
            self.outcome = error
        self._is_over = True
        self._stop()

    def _stop(self) -> None:
        openmp.end_team()
        self._stands.release()

    def _ask(self, model: Any, arguments: dict[str, Any], as_ever: Callable[[], Any]) -> Any:
        """What a call of the library's `generate` gives, from a request to the engine."""
        self._end_if_abandoned()
        is_own = model is model_inside(self._model)  # code of the user's may call others
        made = make_inner(model, arguments, self._most_rows) if is_own else None
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
        """The same from the call itself."""
        with running_elsewhere(None), drawing([self.request]):
            return as_ever()

    def _end_inner(self) -> None:
        if self._inner is not None:
            self._inner.future.cancel()

    def _end_if_abandoned(self) -> None:
        if self._is_abandoned:
            raise _Abandoned


class OwnCalls:
    """The calls of a model's own `generate` that have begun, and are not over: they may go on inside of its context.

    Args:
        model: whose `generate` runs.
        most_rows: of an inner request.
    """

    def __init__(self, model: Any, most_rows: int) -> None:
        self._model, self._most_rows = model, most_rows
        self._calls: list[OwnGenerate] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def some_may_go_on(self) -> bool:
        """Whether there are some for which nothing is missing that they wait for."""
        return any(each.may_go_on for each in self._calls)

    def run_in(self, thread: threading.Thread) -> bool:
        """Whether one of them runs in this thread."""
        return any(each.thread is thread for each in list(self._calls))

    def begin(self, request: Request, changes: int) -> None:
        """A request begins, with the next `go_on`."""
        self._calls.append(OwnGenerate(self._model, request, self._most_rows, changes))

    def go_on(self) -> Iterator[tuple[OwnGenerate, Request | None]]:
        """Runs those that may go on, each to its next inner request, which is given with it; None for one that is
        over.
        """
        for each in [each for each in self._calls if each.may_go_on]:
            inner = each.go_on()
            if inner is None:
                self._calls.remove(each)
            yield each, inner

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """None of them goes on."""
        while self._calls:
            self._calls.pop().abandon()
