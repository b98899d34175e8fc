"""How much K and V the requests in slots may have stored together."""

from __future__ import annotations

from collections.abc import Iterable

from fastgen.optimizer.transformers.captured.slot import Slot

# A request enters where there is room for its prompt and so many tokens of each row: most end before their limit.
RESERVED = 32


class ExceedsBudget(MemoryError):
    """A request alone may need more than there may be."""


class KVBudget:
    """A number of bytes, and what positions take. Without a number, there is room for everything.

    Args:
        most_bytes: of K and V of all requests in slots.

    Attributes:
        peak: the most bytes that were stored so far.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes, self.peak = most_bytes, 0
        self._own = self._cross = 0  # bytes of a position, once they are known

    @property
    def is_known(self) -> bool:
        """Whether it is known what a position takes, or does not matter."""
        return self.most_bytes is None or bool(self._own)

    def note(self, own: int, cross: int) -> None:
        """What a position of self- and of cross-attention takes, in bytes."""
        self._own, self._cross = own, cross

    def stored(self, slots: Iterable[Slot]) -> int:
        """Bytes of K and V that these have stored."""
        found = sum(map(self.stored_by, slots))
        self.peak = max(self.peak, found)
        return found

    def stored_by(self, slot: Slot) -> int:
        """Bytes of K and V that one has stored."""
        return slot.positions * self._own + slot.source * self._cross

    def needed(self, prompt: int, source: int, rows: int, new_tokens: int) -> int:
        """Bytes of a request with so many new tokens."""
        return (prompt + rows * new_tokens) * self._own + source * self._cross

    def has_room(self, stored: int, more: int) -> bool:
        """Whether so many bytes may be stored beside those that are."""
        return self.most_bytes is None or stored + more <= self.most_bytes
