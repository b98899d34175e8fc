"""The stages of a run and their threads, and its progress on standard error.

    plan -> [ready] -> model -> [generated] -> post -> [writing] -> record
    (a thread)       (this thread)         (a thread)            (a thread)
                                           worker processes

The model runs in the calling thread, where Ctrl-C arrives. A few planned batches are kept ready for it. The queues
after it are long: finished batches are small, and the model must not wait for their processing. The stages know the
order of the items and what happens after a failure; the caller decides what the items are.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from queue import Full, Queue
from typing import Any, TypeVar

BATCHES_AHEAD = 16
BATCHES_BEHIND = 512
_END: Any = object()  # the last item of a queue

Planned = TypeVar("Planned")
Generated = TypeVar("Generated")
Pending = TypeVar("Pending")


@dataclass
class Timing:
    """Seconds of the model stage, by what they were spent on."""

    wall: float = 0.0
    """From the start of the stages to the last item leaving the model."""
    waiting_for_input: float = 0.0
    waiting_for_output: float = 0.0
    draining: float = 0.0
    """From the last item leaving the model to the last one being recorded."""


def run_stages(
    plan: Iterator[Planned],
    model: Callable[[Planned], Generated],
    post: Callable[[Generated], Pending],
    record: Callable[[Pending], None],
    *,
    read_ahead: bool = True,
) -> Timing:
    """Passes every planned item through `model`, `post` and `record`, in order.

    Raises an interrupt or a failure after everything that the model has finished is recorded. Does not wait for the
    thread of the plan, whose next item may never come.

    Args:
        model: runs in the calling thread.
        post: runs in a thread. It may start work in other processes and return a future.
        record: runs in another thread, waits for that work and writes the result.
        read_ahead: read the plan in a thread. Otherwise the calling thread reads it between two batches.
    """
    ready: Queue[Any] = Queue(BATCHES_AHEAD)
    generated: Queue[Any] = Queue(BATCHES_BEHIND)
    writing: Queue[Any] = Queue(BATCHES_BEHIND)
    planned = iter(ready.get, _END) if read_ahead else plan
    stopped = threading.Event()
    timing = Timing()
    unplanned: list[BaseException] = []  # failures of the plan, after which the other stages finish
    failed: list[BaseException] = []  # failures of the other stages, after which all stop

    def planning() -> None:
        try:
            for item in plan:
                ready.put(item)
                if stopped.is_set():
                    return
        except BaseException as error:
            unplanned.append(error)
        finally:
            ready.put(_END)

    def modelling() -> None:
        while True:
            start = time.perf_counter()
            item = next(planned, _END)
            timing.waiting_for_input += time.perf_counter() - start
            if item is _END or unplanned or failed:
                return
            result = model(item)
            start = time.perf_counter()
            generated.put(result)
            timing.waiting_for_output += time.perf_counter() - start

    def take(queue: Queue[Any], act: Callable[[Any], None]) -> None:
        """Consumes a queue. After a failure it drops further items, so that nobody waits at a full queue."""
        for item in iter(queue.get, _END):
            try:
                if not failed:
                    act(item)
            except BaseException as error:
                failed.append(error)
                # Wakes the model's stage if it waits for input. If the queue is full, it does not wait.
                with contextlib.suppress(Full):
                    ready.put_nowait(_END)

    def post_processing() -> None:
        take(generated, lambda item: writing.put(post(item)))
        writing.put(_END)

    stages = {"post": post_processing, "record": lambda: take(writing, record)}
    threads = {
        # With the settings of this thread.
        name: threading.Thread(target=copy_context().run, args=(stage,), name=f"fastgen-{name}", daemon=True)
        for name, stage in (stages | ({"plan": planning} if read_ahead else {})).items()
    }
    begin = time.perf_counter()
    for thread in threads.values():
        thread.start()
    try:
        try:
            modelling()
        finally:
            # Even after a failure: stop reading, and record everything that the model has finished.
            timing.wall = time.perf_counter() - begin
            stopped.set()
            generated.put(_END)
            while not ready.empty():
                ready.get_nowait()  # dropped, so that the planner need not wait at a full queue
            for name in stages:
                threads[name].join()
            timing.draining = time.perf_counter() - begin - timing.wall
    except BaseException as error:
        # This includes a second interrupt, during `join`.
        failed.append(error)
        raise
    for failure in (*failed, *unplanned):
        raise failure
    return timing


SECONDS_BETWEEN_LINES = 60.0
_SECONDS_BETWEEN_REFRESHES = 0.1


class Progress:
    """Counts finished items, and shows a rate given by the caller.

    Args:
        unit: what is counted, in the plural.
        total: the total number; None if unknown.
        already: how many were done before. They took no time, so the estimate of the remaining time ignores them.
    """

    def __init__(self, unit: str, total: int | None, already: int = 0, quiet: bool = False) -> None:
        self._unit, self._total, self._already, self._done = unit, total, already, already
        self._start = self._last = time.monotonic()
        shows = not quiet and sys.stderr is not None
        on_terminal = shows and sys.stderr.isatty()
        self._lines = shows and not on_terminal
        self._bar = _bar(unit, total, already) if on_terminal else None
        self._shared = threading.Lock()

    def add(self, count: int = 1, rate: str = "") -> None:
        """Adds finished items. Any thread may call it."""
        with self._shared:
            self._done += count
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done, rate=rate)
                if now - self._last >= _SECONDS_BETWEEN_REFRESHES:
                    self._last = now
                    self._bar.refresh()
            elif self._lines and now - self._last >= SECONDS_BETWEEN_LINES:
                self._last = now
                print(self._line(now - self._start, rate), file=sys.stderr)

    def close(self) -> None:
        """Stops the bar, which stays visible."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, seconds: float, rate: str) -> str:
        parts = [f"{self._done:,} {self._unit}"]
        if self._total is not None:
            parts[0] = f"{self._done:,} of {self._total:,} {self._unit} ({self._done / max(self._total, 1):.0%})"
        parts.append(f"{_duration(seconds)} so far")
        new = self._done - self._already
        if self._total is not None and new > 0:
            parts.append(f"about {_duration(seconds / new * (self._total - self._done))} left")
        return ", ".join([*parts, *filter(None, [rate])])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _bar(unit: str, total: int | None, already: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"), TimeElapsedColumn())
    more = (TextColumn("left"), TimeRemainingColumn(compact=True), TextColumn("{task.fields[rate]}"))
    # Without a thread that draws, because processes are forked during a run.
    console = Console(stderr=True)
    # The user's own output is not redirected.
    bar = Bar(*columns, *more, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=total, completed=already, unit=unit, rate="")
    bar.start()
    return bar
