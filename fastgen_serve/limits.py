"""Limits on each request, and on how many requests a server accepts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fastgen_serve.errors import BadRequest, Busy
from fastgen_serve.jobs import Generate, ModelInfo
from fastgen_serve.settings import ServeSettings

# The number of last finished rows that determine the throughput.
_LAST = 64
# The longest time in seconds after which a client is told to try again.
_LONGEST_RETRY = 60


def bounded(job: Generate, info: ModelInfo, settings: ServeSettings) -> Generate:
    """Returns the job, capped at the server's limit of new tokens if it leaves their number to the model.

    Raises:
        BadRequest: the job, or a default of the model's files, exceeds a limit of the server.
    """
    tokens = job.options.get("max_new_tokens")
    if tokens is not None and tokens > settings.max_tokens:
        raise BadRequest(
            f"{tokens} new tokens: this server gives {settings.max_tokens} at the most", param="max_new_tokens"
        )
    options, most = {**info.defaults, **job.options}, min(settings.max_beams, settings.slots)
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or 1) > most:
            raise BadRequest(f"{name} is {options[name]}: this server takes {most} at the most", param=name)
    own = info.max_new_tokens
    if info.kind == "decoder-only" and info.defaults.get("max_new_tokens") is None:  # includes the prompt
        own -= len(job.tokens)
    if tokens is not None or own <= settings.max_tokens:
        return job
    return replace(job, options={**job.options, "max_new_tokens": settings.max_tokens})


class Held:
    """Limits the memory that the inputs of requests hold.

    Args:
        most: the limit in bytes of all requests together. A single request may exceed it.
        what: names these bytes in the error of a refused request.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self.bytes = most, what, 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Counts these bytes for the duration of a block. Raises Busy if other requests leave no room for them."""
        if size and self.bytes and self.bytes + size > self._most:
            raise Busy(
                f"{self._what} of other requests take all the room that there is: try again in 1 s", retry_after=1
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size


class Admission:
    """Decides whether a model's queue accepts one more request.

    Args:
        slots: rows that run at a time.
        most: rows that may wait.
        budget: seconds in which a request must be answered, once all slots are taken; None for no limit.
        now: the clock.
    """

    def __init__(
        self, slots: int, most: int, budget: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots, self._most, self._budget, self._now = slots, most, budget, now
        self.rows = 0  # rows that wait or run
        # The time in seconds during which all slots were taken, which alone shows the throughput, and the times in it
        # at which rows finished.
        self._full, self._last = 0.0, now()
        self._ends: deque[float] = deque(maxlen=_LAST)
        self._makes_batches = False

    def batch_all(self) -> None:
        """Switches to a model without slots: one request keeps it busy, and it batches all that wait. `note` then
        reports the throughput, because a scheduler may make requests wait for others while the model is idle.
        """
        self._slots, self._makes_batches = 1, True

    def note(self, seconds: float) -> None:
        """Reports the model's time for one row, for a model that batches."""
        self._full += seconds
        self._ends.append(self._full)

    @property
    def waiting(self) -> int:
        """Rows that wait for a slot."""
        return max(self.rows - self._slots, 0)

    def enter(self, rows: int = 1) -> None:
        """Counts a new request.

        Raises:
            Busy: the queue does not accept it.
        """
        self._tick()
        waiting, pace = self.rows + rows - self._slots, self._pace()
        # All requests share the throughput: a new one is answered after all others.
        is_late = self._budget is not None and pace is not None and (self.rows + rows) * pace > self._budget
        # An idle model runs any request.
        if self.rows and waiting > 0 and (waiting > self._most or is_late):
            wait = self.wait(rows)
            seconds = 1 if wait is None else min(max(math.ceil(wait), 1), _LONGEST_RETRY)
            raise Busy(f"{self.waiting} sequences wait already: try again in {seconds} s", retry_after=seconds)
        self.rows += rows

    def leave(self, rows: int = 1) -> None:
        """Removes a request that has its result, or was cancelled."""
        self._tick()
        if self.rows >= self._slots and not self._makes_batches:
            self._ends.extend([self._full] * rows)
        self.rows -= rows

    @contextmanager
    def reserve(self, rows: int) -> Iterator[None]:
        """Counts a request while it is prepared: it waits as others do, but does not enter the measured throughput.

        Raises:
            Busy: the queue does not accept it.
        """
        self.enter(rows)
        try:
            yield
        finally:
            self._tick()
            self.rows -= rows

    def wait(self, rows: int = 1) -> float | None:
        """Returns the seconds until a new request would run, by the measured throughput; None while that is unknown."""
        pace = self._pace()
        return None if pace is None else max(self.rows + rows - self._slots, 0) * pace

    def _pace(self) -> float | None:
        """Returns the seconds per finished row while all slots are taken; None while that is unknown."""
        if len(self._ends) < 2:
            return None
        return (self._full - self._ends[0]) / (len(self._ends) - 1)

    def _tick(self) -> None:
        now = self._now()
        if self.rows >= self._slots and not self._makes_batches:
            self._full += now - self._last
        self._last = now
