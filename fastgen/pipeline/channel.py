"""Bounded queues between the stages, which know how long each side had to wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Cancelled(Exception):
    """The run is being given up; the stage that meets this has nothing left to do."""


class Channel(Generic[Item]):
    """A queue from one thread to another.

    The sender ends it with `finish`: the receiver still gets what is in it. `cancel` ends it for both at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._cancelled = False
        self.seconds_full = 0.0
        """How long the sender has waited for room."""
        self.seconds_empty = 0.0
        """How long the receiver has waited for an item."""

    def put(self, item: Item) -> None:
        """Add an item, once there is room."""
        with self._changed:
            start = time.perf_counter()
            while len(self._items) >= self._capacity and not self._cancelled:
                self._changed.wait()
            self.seconds_full += time.perf_counter() - start
            if self._cancelled:
                raise Cancelled
            self._items.append(item)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        """Items until the sender has finished and none is left."""
        while True:
            with self._changed:
                start = time.perf_counter()
                while not self._items and not self._finished and not self._cancelled:
                    self._changed.wait()
                self.seconds_empty += time.perf_counter() - start
                if self._cancelled:
                    raise Cancelled
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item

    def finish(self) -> None:
        """No more items will come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Wake both sides with `Cancelled`; what is in the queue is dropped."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()


class Direct(Generic[Item]):
    """What a receiver reads by itself, in its own thread: the receiving side of a `Channel` without a sender."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._cancelled = False
        self.seconds_empty = 0.0
        """How long getting the items has taken."""

    def __iter__(self) -> Iterator[Item]:
        """Items until there are no more."""
        while True:
            start = time.perf_counter()
            try:
                item = next(self._items)
            except StopIteration:
                return
            finally:
                self.seconds_empty += time.perf_counter() - start
            if self._cancelled:
                raise Cancelled
            yield item

    def cancel(self) -> None:
        """The next item is the receiver's last: it gets `Cancelled` instead."""
        self._cancelled = True
