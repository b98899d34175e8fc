"""How much K and V, and states, the requests in slots may have stored together, and which others have room beside
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.key import Prompt
from fastgen.optimizer.transformers.captured.slot import Slot

# A request enters where there is room for its prompt and so many tokens of each row: most end before their limit.
RESERVED = 32


class ExceedsBudget(MemoryError):
    """A request alone may need more than there may be."""


class KVBudget:
    """A number of bytes, and what positions and rows take. Without a number, there is room for everything.

    Args:
        most_bytes: of K and V, and states, of all requests in slots.
        has_encoder: inputs are those of cross-attention.

    Attributes:
        peak: the most bytes that were stored so far.
    """

    def __init__(self, most_bytes: int | None, has_encoder: bool) -> None:
        self.most_bytes, self.peak, self._has_encoder = most_bytes, 0, has_encoder
        self._is_known = False
        self._own = self._cross = self._states = 0  # bytes of a position, and of a row
        self._source = 0  # positions of the longest so far

    def note(self, prompt: Prompt) -> None:
        """What a position of self- and of cross-attention takes, in bytes, and the states of a row; and how many
        positions of cross-attention an input has.
        """
        self._own, self._cross = prompt.bytes_per_position
        self._states, self._source = prompt.bytes_of_states, max(self._source, prompt.sizes.source)
        self._is_known = True

    def has_room(self, stored: int) -> bool:
        """Whether so many bytes may be stored."""
        return self.most_bytes is None or stored <= self.most_bytes

    def stored(self, slots: Iterable[Slot]) -> int:
        """Bytes that these have stored."""
        found = sum(map(self._stored, slots))
        self.peak = max(self.peak, found)
        return found

    def of_a_step(self, slots: Iterable[Slot]) -> int:
        """Bytes that the next decode step stores of these."""
        return sum(slot.owner.rows for slot in slots) * self._own

    def drafted(self, slots: Collection[Slot]) -> int | None:
        """Tokens of drafts that the next decode step of these may store besides: no request leaves for a draft. None
        for any number.
        """
        if self.most_bytes is None or not self._own:
            return None
        return max(self.most_bytes - self.stored(slots) - self.of_a_step(slots), 0) // self._own

    def needed(self, request: Request, new_tokens: int) -> int:
        """Bytes with so many new tokens of each row, or as many as it may have."""
        prompt, source = request.prompt_positions, 0
        if self._has_encoder:  # of sounds and pictures, it is not known before they are encoded
            prompt, source = request.start_positions, self._source if request.tokens is None else request.length
        most = new_tokens if request.new_tokens is None else min(new_tokens, request.new_tokens)
        return (prompt + request.rows * most) * self._own + source * self._cross + request.rows * self._states

    def fitting(self, batch: Iterable[Request], oldest: Request, others: Collection[Slot]) -> list[Request]:
        """Those of a batch that have room beside others, the oldest first; that one at least, if it is the only one."""
        stored, chosen = self.stored(others), list[Request]()
        for slot in others:  # what those may yet store that do not leave
            if not slot.owner.may_begin_again:
                stored += max(self.needed(slot.owner, slot.new_tokens) - self._stored(slot), 0)
        for request in sorted(batch, key=lambda each: each is not oldest):
            # What does not leave where room gets short has all of its room from the beginning.
            most = RESERVED if request.may_begin_again else request.new_tokens
            stored += self.needed(request, RESERVED if most is None else most)
            if not self.has_room(stored) and (chosen or others):
                break
            chosen.append(request)
            if self.most_bytes is not None and not self._is_known:
                break
        return chosen

    def to_begin_again(self, running: Sequence[Slot]) -> Slot | None:
        """The one that leaves as the next step would store more than may be: the last that may. None with room."""
        if self.has_room(self.stored(running) + self.of_a_step(running)) or len(running) == 1:
            return None
        return next((slot for slot in reversed(running) if slot.owner.may_begin_again), None)

    def _stored(self, slot: Slot) -> int:
        return slot.positions * self._own + slot.source * self._cross + slot.owner.rows * self._states
