"""The stages of a run and their threads.

    plan -> [ready] -> model -> [generated] -> post -> [writing] -> record
    (a thread)       (this thread)         (a thread)            (a thread)
                                           worker processes

The model runs in the calling thread, where Ctrl-C arrives. A few planned batches are kept ready for it. The queues
after it are long: finished batches are small, and the model must not wait for their processing. The stages know the
order of the items and what happens after a failure; the caller decides what the items are.
"""

from __future__ import annotations

import contextlib
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
