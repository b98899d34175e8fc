"""Bounded queues between the stages. They measure how long each side waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Cancelled(Exception):
    """The run ends early. The stage that gets this stops."""


class Channel(Generic[Item]):
    """A queue from one thread to another.

    After `finish` the receiver still gets the items in the queue. `cancel` stops both sides at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._cancelled = False
        self.seconds_full = 0.0
        """Seconds that the sender waited, because the queue was full."""
        self.seconds_empty = 0.0
        """Seconds that the receiver waited, because the queue was empty."""

    def put(self, item: Item) -> None:
        """Add an item. Waits while the queue is full; raises `Cancelled` after `cancel`."""
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
        """Items until the sender has finished and the queue is empty. Raises `Cancelled` after `cancel`."""
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
        """Raise `Cancelled` on both sides. The items in the queue are dropped."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()


class Direct(Generic[Item]):
    """The receiving side of a `Channel` for items that the receiver reads itself, in its own thread."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._cancelled = False
        self.seconds_empty = 0.0
        """Seconds that reading the items took."""

    def __iter__(self) -> Iterator[Item]:
        """All items. Raises `Cancelled` after `cancel`."""
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
        """Raise `Cancelled` in place of the next item."""
        self._cancelled = True
