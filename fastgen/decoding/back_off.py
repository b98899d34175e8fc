"""Decides when to retry what did not pay."""

from __future__ import annotations


class BackOff:
    """Waits `first` times, and twice as often after each failure, up to `most`. Less than once means not at all."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.succeed()

    def waits(self) -> bool:
        """Whether to wait once more. To be called once each time."""
        self._left -= 1
        return self._left >= 0

    def succeed(self) -> None:
        self._interval = self._left = self._first

    def fail(self) -> None:
        self._interval = self._left = min(2 * self._interval, self._most)

    def give_up(self) -> None:
        """Waits as long as possible: whatever the next trial brings, it cannot pay."""
        self._interval = self._left = self._most
