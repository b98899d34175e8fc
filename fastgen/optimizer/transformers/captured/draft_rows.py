"""Speculative decoding in slots: free rows verify drafts for the present inputs.

Each such row is a copy of an input, one drafted token longer than the one before, and shares the input's K and V. So it
is a row of the step like any other: its processors and its draw are those that the input would have after these tokens,
and it chooses what the input would choose. A drafted token is kept if the row before it has chosen the same token.
Greedy or drawn, the tokens are therefore those of a step without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fastgen.decoding.speculation.verify_rows import Chance, StepSeconds, counts
from fastgen.optimizer.transformers.captured.slot import Slot
from fastgen.optimizer.transformers.captured.step import DecodeStep

# The most rows of a step with drafts: beyond these, the time of a step grows in proportion to its rows.
MOST_ROWS = 16


class Draft(NamedTuple):
    """Tokens that may follow the sequence of an input, and the probability that each is right."""

    slot: Slot
    tokens: list[int]
    chance: Chance


class _Verified(NamedTuple):
    draft: Draft
    rows: range


class DraftRows:
    """The drafts of a step. Nothing of them remains between two steps.

    Args:
        seconds: times of the model's steps; None if nothing may depend on a clock.

    Attributes:
        drafted, accepted: numbers of tokens in the latest step.
    """

    def __init__(self, seconds: StepSeconds | None) -> None:
        self._is_timed, self._seconds = seconds is not None, StepSeconds() if seconds is None else seconds
        self._verified: list[_Verified] = []
        self._proposed: list[Draft] = []
        self.drafted = self.accepted = 0

    def note(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a replayed step of this many rows."""
        if self._is_timed:
            self._seconds.note(rows, seconds)

    def put(
        self, step: DecodeStep, slots: Iterable[Slot], taken: int, most: int | None, places: Callable[[], Sequence[int]]
    ) -> int:
        """Puts drafts for these inputs into the slots after those taken. Returns the number of slots in use then.

        Args:
            most: maximum number of drafted tokens; None for no limit.
            places: returns the numbers of slots that steps compute, in order.
        """
        room = min(step.key.batch, MOST_ROWS, MOST_ROWS if most is None else taken + most)
        if taken >= room:
            return taken
        proposed = (self._propose(step, slot) for slot in slots if slot.drafts is not None and slot.error is None)
        self._proposed = [draft for draft in proposed if draft.tokens]
        if not self._proposed:
            return taken
        chances = [[each.chance.value] * len(each.tokens) for each in self._proposed]
        chosen = counts(chances, taken, room, self._seconds, places())
        for draft, count in zip(self._proposed, chosen, strict=True):
            if count:
                taken += self._fork(step, draft._replace(tokens=draft.tokens[:count]), taken)
        return taken

    def _propose(self, step: DecodeStep, slot: Slot) -> Draft:
        assert slot.drafts is not None, "as who calls has made sure"
        tokens = None if slot.form is None else step.search.sequences_of(slot.place)[0]
        found, chance = slot.catch(partial(slot.drafts.propose, slot.form, tokens), ([], None))
        if found:  # the last row may choose the last token
            found = found[: int(step.search.limit[slot.place, 0]) - int(step.search.length[slot.place, 0]) - 1]
        return Draft(slot, found, chance)

    def _fork(self, step: DecodeStep, draft: Draft, first: int) -> int:
        """Has rows from `first` on verify a draft. Returns their number."""
        slot, tokens = draft.slot, draft.tokens
        if slot.form is not None:
            forms = slot.catch(partial(slot.form.drafted, step.search.sequences_of(slot.place)[0], tokens), [])
            tokens = tokens[: len(forms)]
        rows = range(first, first + len(tokens))
        if not rows:
            return 0
        where = slice(rows.start, rows.stop)
        step.search.fork(slot.place, where, torch.tensor(tokens))
        step.buffers.fork(slot.place, where)
        for processor in step.processors or ():
            for row in rows:
                processor.insert(processor, slot.place, row)
        if slot.form is not None:
            slot.mask(step.processors).block_behind(forms, first)
        for row in rows if slot.generator is not None else ():
            slot.draw(step.search.noise[row])
        self._verified.append(_Verified(draft._replace(tokens=tokens), rows))
        return len(rows)

    def take(self, step: DecodeStep) -> None:
        """Advances the inputs by the right tokens of their drafts, after the step. Adds the numbers of these tokens to
        the slots' `taken`.
        """
        if not self._proposed:
            return
        chosen = step.search.tokens.tolist()
        for each in self._verified:
            self._keep_right(step, each, chosen)
        if self._verified:
            forks = slice(self._verified[0].rows.start, self._verified[-1].rows.stop)
            step.search.leave(forks)
            step.buffers.empty(forks)
        verified = {each.draft.slot for each in self._verified}
        for draft in self._proposed:
            if draft.slot not in verified:  # learn from the draft that was not verified
                draft.chance.note(1, int(chosen[draft.slot.place] == draft.tokens[0]))
        self._verified, self._proposed = [], []

    def _keep_right(self, step: DecodeStep, verified: _Verified, chosen: list[int]) -> None:
        """Advances an input by those tokens of its draft that the rows before them have `chosen`."""
        draft, rows = verified
        slot, right = draft.slot, 0
        in_front = slot.place, *rows
        while right < len(rows) and chosen[in_front[right]] == draft.tokens[right]:
            right += 1
        if right:
            failed = step.search.nan_inputs[[*in_front[: right + 1]]].any()
            last, own = (slice(place, place + 1) for place in (rows[right - 1], slot.place))
            step.search.insert(step.search, last, own)
            step.search.nan_inputs[own] = failed
            step.buffers.join(last, own)
        if slot.generator is not None:
            slot.undrawn[:0] = [step.search.noise[row].clone() for row in rows[right:]]
        slot.taken += right
        draft.chance.note(len(rows), right)
        self.drafted += len(rows)
        self.accepted += right
