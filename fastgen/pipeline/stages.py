"""The stages of a run and their threads.

    plan -> [ready] -> model -> [generated] -> post -> [writing] -> record
    (a thread)       (this thread)         (a thread)            (a thread)
                                           worker processes

The model runs in the calling thread, where Ctrl-C arrives. A few planned batches are kept ready for it. The queues
behind it are long: finished batches are small, and the model must not wait for their processing. The stages know the
order of the items and what happens after a failure; the caller decides what the items are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

BATCHES_AHEAD = 16
BATCHES_BEHIND = 512

Item = TypeVar("Item")
Planned = TypeVar("Planned")
Generated = TypeVar("Generated")
Pending = TypeVar("Pending")


class Cancelled(Exception):
    """The run ends early. The stage that gets this stops."""


class Channel(Generic[Item]):
    """A bounded queue from one thread to another.

    After `finish` the receiver still gets the items in the queue. After `cancel` both sides get `Cancelled`, those that
    are waiting as well.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._cancelled = False

    def put(self, item: Item) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._capacity or self._cancelled)
            if self._cancelled:
                raise Cancelled
            self._items.append(item)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._finished)
                if self._cancelled:
                    raise Cancelled
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item

    def finish(self, *, cancelled: bool = False) -> None:
        with self._changed:
            self._finished, self._cancelled = True, self._cancelled or cancelled
            self._changed.notify_all()

    def cancel(self) -> None:
        self.finish(cancelled=True)


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
    handed_on: Callable[[Generated], None] = lambda generated: None,
    *,
    read_ahead: bool = True,
) -> Timing:
    """Every planned item goes through `model`, `post` and `record`, in order.

    An interrupt or a failure is raised after all that the model has finished is recorded.

    Args:
        plan: the items.
        model: runs in the thread that calls this.
        post: runs in a thread. It may start work in other processes and return a future.
        record: runs in another thread, waits for that work and writes the result.
        handed_on: called with each result of the model that is sure to be recorded. It may raise to end the run.
        read_ahead: read the plan in a thread. Otherwise the calling thread reads it between two batches.
    """
    ready: Channel[Planned] = Channel(BATCHES_AHEAD)
    generated: Channel[Generated] = Channel(BATCHES_BEHIND)
    writing: Channel[Pending] = Channel(BATCHES_BEHIND)
    timing = Timing()
    failures: list[BaseException] = []

    def planning() -> None:
        for item in plan:
            ready.put(item)
        ready.finish()

    def modelling() -> None:
        end: Any = object()
        items = iter(ready) if read_ahead else plan
        while True:
            start = time.perf_counter()
            item = next(items, end)
            timing.waiting_for_input += time.perf_counter() - start
            if item is end or failures:
                return
            result = model(item)
            start = time.perf_counter()
            generated.put(result)
            timing.waiting_for_output += time.perf_counter() - start
            handed_on(result)

    def post_processing() -> None:
        for item in generated:
            writing.put(post(item))
        writing.finish()

    def recording() -> None:
        for item in writing:
            record(item)

    def cancel() -> None:
        for channel in (ready, generated, writing):
            channel.cancel()

    def guarded(stage: Callable[[], None]) -> None:
        """Stops the run at the first failure in a thread. After one of the planner's, the other stages finish."""
        try:
            stage()
        except Cancelled:
            pass
        except BaseException as error:
            failures.append(error)
            ready.cancel() if stage is planning else cancel()

    stages = {"post": post_processing, "record": recording} | ({"plan": planning} if read_ahead else {})
    threads = [
        # With the settings that count for this thread.
        threading.Thread(target=copy_context().run, args=(guarded, stage), name=f"fastgen-{name}", daemon=True)
        for name, stage in stages.items()
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    try:
        try:
            modelling()
        finally:
            # After a failure too: stop reading, and record all that the model has finished.
            ready.cancel()
            generated.finish()
            timing.wall = time.perf_counter() - begin
            for thread in threads:
                thread.join()
            timing.draining = time.perf_counter() - begin - timing.wall
    except Cancelled:
        pass
    except BaseException:
        # This includes a second interrupt, during `join`.
        cancel()
        raise
    if failures:
        raise failures[0]
    return timing
