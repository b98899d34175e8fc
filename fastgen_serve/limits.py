"""How much a server takes: of a request, and of requests."""

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

# Requests whose ends say how fast the others will get their turn.
_LAST = 64
# Seconds after which a client may try again, at the most.
_LONGEST_RETRY = 60


def bounded(job: Generate, info: ModelInfo, settings: ServeSettings) -> Generate:
    """The job, with no more new tokens than the server gives where it leaves their number to the model.

    Raises:
        BadRequest: it asks for more than the server gives, or the model's files do.
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
    if info.kind == "decoder-only" and info.defaults.get("max_new_tokens") is None:  # a length with the prompt
        own -= len(job.tokens)
    if tokens is not None or own <= settings.max_tokens:
        return job
    return replace(job, options={**job.options, "max_new_tokens": settings.max_tokens})


class Held:
    """Counts what requests have in memory.

    Args:
        most: bytes that all of them may have. One that is there alone may have more.
        what: these bytes are, for those who are refused.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self.bytes = most, what, 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """The block of a request that has so many bytes. Raises Busy where others leave no room for them."""
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
    """Says whether one more request of a model may wait.

    Args:
        slots: rows that run at a time.
        most: rows that may wait.
        budget: seconds in which one must be answered, once all slots are taken; None for any number.
        now: the clock.
    """

    def __init__(
        self, slots: int, most: int, budget: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots, self._most, self._budget, self._now = slots, most, budget, now
        self.rows = 0  # of requests that wait or run
        # Seconds in which all slots were taken, as only these say how fast it goes then; and when rows left in them.
        self._full, self._last = 0.0, now()
        self._ends: deque[float] = deque(maxlen=_LAST)
        self._makes_batches = False

    def batch_all(self) -> None:
        """The model has no slots: one request keeps it busy, and it makes batches of all that wait. How fast it goes,
        `note` is told: a scheduler may have requests wait for others, while the model has nothing to do.
        """
        self._slots, self._makes_batches = 1, True

    def note(self, seconds: float) -> None:
        """A row has taken so much of the time of a model that makes batches."""
        self._full += seconds
        self._ends.append(self._full)

    @property
    def waiting(self) -> int:
        """Rows that wait for a slot."""
        return max(self.rows - self._slots, 0)

    def enter(self, rows: int = 1) -> None:
        """A request comes.

        Raises:
            Busy: it may not wait.
        """
        self._tick()
        waiting, pace = self.rows + rows - self._slots, self._pace()
        # Where all share what there is, whoever comes is answered behind all that are there.
        is_late = self._budget is not None and pace is not None and (self.rows + rows) * pace > self._budget
        # A request that finds nobody runs, whatever it asks for.
        if self.rows and waiting > 0 and (waiting > self._most or is_late):
            wait = self.wait(rows)
            seconds = 1 if wait is None else min(max(math.ceil(wait), 1), _LONGEST_RETRY)
            raise Busy(f"{self.waiting} sequences wait already: try again in {seconds} s", retry_after=seconds)
        self.rows += rows

    def leave(self, rows: int = 1) -> None:
        """A request has its result, or has gone."""
        self._tick()
        if self.rows >= self._slots and not self._makes_batches:
            self._ends.extend([self._full] * rows)
        self.rows -= rows

    @contextmanager
    def reserve(self, rows: int) -> Iterator[None]:
        """The block in which a request is prepared: it waits, as others do, and says nothing of how fast these leave.

        Raises:
            Busy: it may not wait.
        """
        self.enter(rows)
        try:
            yield
        finally:
            self._tick()
            self.rows -= rows

    def wait(self, rows: int = 1) -> float | None:
        """Seconds until such a request would run, by how fast the last ones have left; None where that is not known."""
        pace = self._pace()
        return None if pace is None else max(self.rows + rows - self._slots, 0) * pace

    def _pace(self) -> float | None:
        """Seconds from the end of one row to that of the next, while all slots are taken; None if that is not known."""
        if len(self._ends) < 2:
            return None
        return (self._full - self._ends[0]) / (len(self._ends) - 1)

    def _tick(self) -> None:
        now = self._now()
        if self.rows >= self._slots and not self._makes_batches:
            self._full += now - self._last
        self._last = now
