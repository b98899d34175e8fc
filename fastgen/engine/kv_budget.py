"""Limits the K and V, and states, that the requests in slots store together, and selects requests that still fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.key import Prompt
from fastgen.optimizer.transformers.captured.slot import Slot

# A request enters if its prompt and this many tokens of each row fit: most requests end before their limit.
RESERVED = 32


class ExceedsBudget(MemoryError):
    """A request may need more than the whole budget."""


class KVBudget:
    """A byte budget, and the bytes that positions and rows take. Without a limit, everything fits.

    Args:
        most_bytes: limit for K and V, and states, of all requests in slots.
        has_encoder: inputs are those of cross-attention.

    Attributes:
        peak: the most bytes stored so far.
    """

    def __init__(self, most_bytes: int | None, has_encoder: bool) -> None:
        self.most_bytes, self.peak, self._has_encoder = most_bytes, 0, has_encoder
        self._is_known = False
        self._own = self._cross = self._states = 0  # bytes of a position, and of a row
        self._before = 0  # the most positions of pictures before the tokens so far
        self._source = self._beside = 0  # the most positions of a source without tokens, and of one besides its tokens

    def note(self, prompt: Prompt, request: Request) -> None:
        """Records the bytes of a position in self- and cross-attention, the bytes of a row's states, and the positions
        of images and audio. `request`: the longest of those that have been prefilled together.
        """
        if request.has_other_inputs and not self._has_encoder:
            self._before = max(self._before, prompt.cached - request.prompt_positions)
        source = prompt.sizes.source
        if request.tokens is None:
            self._source = max(self._source, source)
        elif request.has_other_inputs:
            self._beside = max(self._beside, source - request.length)
        self._own, self._cross = prompt.bytes_per_position
        self._states = prompt.bytes_of_states
        self._is_known = True

    def has_room(self, stored: int) -> bool:
        """Whether this many bytes may be stored."""
        return self.most_bytes is None or stored <= self.most_bytes

    def stored(self, slots: Iterable[Slot]) -> int:
        """Returns the bytes that these slots store."""
        found = sum(map(self._stored, slots))
        self.peak = max(self.peak, found)
        return found

    def of_a_step(self, slots: Iterable[Slot]) -> int:
        """Returns the bytes that the next decode step adds for these slots."""
        return sum(slot.owner.rows for slot in slots) * self._own

    def drafted(self, slots: Collection[Slot]) -> int | None:
        """Returns how many draft tokens the next decode step of these slots may store besides; None for no limit. A
        draft never preempts a request.
        """
        if self.most_bytes is None or not self._own:
            return None
        return max(self.most_bytes - self.stored(slots) - self.of_a_step(slots), 0) // self._own

    def needed(self, request: Request, new_tokens: int, prompt: Prompt | None = None) -> int:
        """Returns the bytes of a request with `new_tokens` in each row, or fewer if it allows fewer. The sizes of its
        images and audio are estimated from those of others before a prefill has made its `prompt`.
        """
        own, source = request.prompt_positions, 0
        if self._has_encoder:
            own, source = request.start_positions, request.length
        if prompt is not None and prompt.inputs == 1:
            own, source = prompt.cached, prompt.sizes.source
        elif request.tokens is None:
            own, source = own + self._before, self._source
        elif request.has_other_inputs:
            own, source = own + self._before, source + self._beside
        most = new_tokens if request.new_tokens is None else min(new_tokens, request.new_tokens)
        return (own + request.rows * most) * self._own + source * self._cross + request.rows * self._states

    def fitting(self, batch: Iterable[Request], oldest: Request, others: Collection[Slot]) -> list[Request]:
        """Returns the requests of a batch that fit beside others, oldest first; at least that one if it is alone."""
        stored, chosen = self.stored(others), list[Request]()
        for slot in others:  # what requests that cannot be preempted may yet store
            if not slot.owner.may_begin_again:
                stored += max(slot.most_bytes - self._stored(slot), 0)
        for request in sorted(batch, key=lambda each: each is not oldest):
            # A request that cannot be preempted gets all of its room at once.
            most = RESERVED if request.may_begin_again else request.new_tokens
            stored += self.needed(request, RESERVED if most is None else most)
            if not self.has_room(stored) and (chosen or others):
                break
            chosen.append(request)
            if self.most_bytes is not None and not self._is_known:
                break
        return chosen

    def to_begin_again(self, running: Sequence[Slot]) -> Slot | None:
        """Returns the latest preemptible request if the next step would exceed the budget; otherwise None."""
        if self.has_room(self.stored(running) + self.of_a_step(running)) or len(running) == 1:
            return None
        return next((slot for slot in reversed(running) if slot.owner.may_begin_again), None)

    def _stored(self, slot: Slot) -> int:
        return slot.positions * self._own + slot.source * self._cross + slot.owner.rows * self._states
