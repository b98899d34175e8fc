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
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastgen.pipeline.channel import Cancelled, Channel, Direct

BATCHES_AHEAD = 16
BATCHES_BEHIND = 512

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


class Stages(Generic[Planned, Generated, Pending]):
    """One run of the pipeline. Every planned item goes through `model`, `post` and `record`, in order.

    Args:
        plan: the items.
        model: runs in the thread that calls `run`.
        post: runs in a thread. It may start work in other processes and return a future.
        record: runs in another thread, waits for that work and writes the result.
        handed_on: called with each result of the model that is sure to be recorded. It may raise to end the run.
        read_ahead: read the plan in a thread. Otherwise the calling thread reads it between two batches.
    """

    def __init__(
        self,
        plan: Iterator[Planned],
        model: Callable[[Planned], Generated],
        post: Callable[[Generated], Pending],
        record: Callable[[Pending], None],
        handed_on: Callable[[Generated], None] = lambda generated: None,
        *,
        read_ahead: bool = True,
    ) -> None:
        self._plan = plan
        self._model = model
        self._post = post
        self._record = record
        self._handed_on = handed_on
        self._failure: BaseException | None = None
        self._ahead: Channel[Planned] | None = Channel(BATCHES_AHEAD) if read_ahead else None
        self._ready: Channel[Planned] | Direct[Planned] = self._ahead or Direct(plan)
        self._generated: Channel[Generated] = Channel(BATCHES_BEHIND)
        self._writing: Channel[Pending] = Channel(BATCHES_BEHIND)
        self.timing = Timing()

    def run(self) -> Timing:
        """Run the whole plan. An interrupt or a failure is raised after all finished batches are recorded."""
        stages = [("post", self._post_processing), ("record", self._recording)]
        if self._ahead is not None:
            stages.insert(0, ("plan", self._planning))
        threads = [
            # With the settings that count for this thread.
            threading.Thread(
                target=copy_context().run, args=(self._guarded, stage), name=f"fastgen-{name}", daemon=True
            )
            for name, stage in stages
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            try:
                self._modelling()
            finally:
                # After a failure too: stop reading, and record all that the model has finished.
                self._ready.cancel()
                self._generated.finish()
                self.timing.wall = time.perf_counter() - start
                self.timing.waiting_for_input = self._ready.seconds_empty
                self.timing.waiting_for_output = self._generated.seconds_full
                for thread in threads:
                    thread.join()
                self.timing.draining = time.perf_counter() - start - self.timing.wall
        except Cancelled:
            pass
        except BaseException:
            # This includes a second interrupt, during `join`.
            self._cancel()
            raise
        if self._failure is not None:
            raise self._failure
        return self.timing

    def _guarded(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except Cancelled:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop the run at the first failure in a thread. If it is the planner's, the stages behind the model finish."""
        self._failure = self._failure or error
        self._ready.cancel()
        if threading.current_thread().name != "fastgen-plan":
            self._cancel()

    def _cancel(self) -> None:
        for channel in (self._ready, self._generated, self._writing):
            channel.cancel()

    def _planning(self) -> None:
        assert self._ahead is not None
        for item in self._plan:
            self._ahead.put(item)
        self._ahead.finish()

    def _modelling(self) -> None:
        for item in self._ready:
            generated = self._model(item)
            self._generated.put(generated)
            self._handed_on(generated)

    def _post_processing(self) -> None:
        for item in self._generated:
            self._writing.put(self._post(item))
        self._writing.finish()

    def _recording(self) -> None:
        for item in self._writing:
            self._record(item)
