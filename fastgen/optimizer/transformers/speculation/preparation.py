"""What drafts need is made little by little, in calls that draft nothing yet.

Recording a part of a step takes as long as some twenty steps, and a step with drafts has five parts; the weights are
copied, too. A call that did it all would take twice as long as a plain one. So one thing is made in a call at the most,
and all of them together take a tenth of the time of the tokens that calls have asked for (64 of each at the most,
where it may end earlier).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from fastgen import caches
from fastgen.decoding.speculation.costs import DRAFT
from fastgen.decoding.speculation.draft_length import AT_FIRST
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.speculation.drafting import Drafting
from fastgen.optimizer.transformers.speculation.drafts import Draft

# This part of the time of plain calls goes into what drafts need.
SHARE = 0.1
# What one thing takes as long as nobody knows, in plain steps.
_STEPS_OF_ONE = 20


class Preparation:
    """What has been made for the drafts of the calls of one key.

    Attributes:
        steps: that the calls so far have asked for.
        seconds: that have gone into it.
    """

    _of: weakref.WeakKeyDictionary[Any, dict[Key, Preparation]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.steps, self.seconds, self._last = 0, 0.0, 0.0

    @classmethod
    def of(cls, model: Any, key: Key) -> Preparation:
        """That of a model and a key."""
        kept = cls._of.setdefault(model, {})
        caches.limit(kept)
        return kept.setdefault(key, cls())

    @classmethod
    def drop_all(cls) -> bool:
        """To be called when the steps are dropped: what was made has to be made again. There is nothing to free."""
        cls._of.clear()
        return False

    def make_next(self, drafting: Drafting, model: Any, draft: Draft, plain: float, begin: Callable[[], None]) -> bool:
        """Makes one more thing, if there is one and time for it; says whether there is enough for calls to draft.

        Args:
            plain: seconds of a plain step.
            begin: begins a call in the step, of which nothing is kept.
        """
        needed, more = _parts_of(drafting)
        missing = [part for part in (*needed, *more) if drafting.costs.seconds(part) is None]
        expected = self._last or _STEPS_OF_ONE * plain
        if missing and self.seconds + expected <= SHARE * self.steps * plain:
            start = time.perf_counter()
            is_recorded = missing[0] != DRAFT or draft.make(0.0)
            if is_recorded:
                begin()
                _measure(drafting, model, draft, missing[0])
            else:
                draft.make(expected)
            took = time.perf_counter() - start
            self.seconds += took
            self._last = took if is_recorded else self._last
        return all(drafting.costs.seconds(part) is not None for part in needed)


def _parts_of(drafting: Drafting) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parts by the positions that they check; 0 is a step of the draft. Calls draft once they have the first ones."""
    lengths = drafting.lengths
    return (lengths[AT_FIRST] + 1, DRAFT, 1), (lengths[-1] + 1, lengths[1] + 1)


def _measure(drafting: Drafting, model: Any, draft: Draft, part: int) -> None:
    if part == DRAFT:
        drafting.measure(part, lambda: draft.propose(drafting, model, 1))
    else:
        drafting.measure(part, lambda: drafting.verify(model, part - 1))


caches.register(Preparation.drop_all, captured_steps=True)
