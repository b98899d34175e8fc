"""What the parts of a step of speculative decoding are measured to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

# Timings of each part that are kept.
KEPT = 16
# Those that are enough, and calls whose times are kept, as of plain steps.
_ENOUGH, _CALLS = 2, 4
# A check that calls have done without: after so many of them it is tried again, at first and at most.
_FIRST_TRIAL, _LAST_TRIAL = 2, 64


class Times(deque[float]):
    """Seconds of the last runs of a part in this call, and what it has taken in the last calls that ran it."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)
        self._of_calls: deque[float] = deque(maxlen=_CALLS)
        self._left = 0  # timings of the calls before, which were too few
        self._without, self._patience = 0, _FIRST_TRIAL  # calls that have done without it, and until it is old

    @property
    def seconds(self) -> float | None:
        """None as long as there are too few timings.

        A part does the same each time, and what makes it longer is from outside, or that it ran for the first time.
        So it is the lower quartile of a call, and the least one of some calls. A plain step is told from as many: else
        drafts might be given up for what else the machine did in one call, and their parts would not run again.
        """
        known = [*self._of_calls, *self._of_this_call()]
        return min(known, default=None)

    @property
    def is_old(self) -> bool:
        """Whether calls have done without the part for long.

        What was measured last may be why: other work on the machine makes a part seem several times as slow as it is,
        and one that is not chosen is not measured. So it counts as unknown until it has run again. One that is
        slow indeed has its next trial after twice as many calls.
        """
        return self._without >= self._patience and not self._of_this_call()

    def begin_call(self, was_missed: bool = False) -> None:
        """Another call begins. Of a part that runs seldom, timings of several calls count as one.

        Args:
            was_missed: whether other parts have run in the last call that could stand for this one.
        """
        found = self._of_this_call()
        if found:
            was_old = self._without >= self._patience
            self._patience = min(2 * self._patience, _LAST_TRIAL) if was_old else _FIRST_TRIAL
            self._without = 0
            self._of_calls.extend(found)
            self.clear()
        elif was_missed:
            self._without += 1
        self._left = len(self)

    @property
    def has_run(self) -> bool:
        """Whether it has, in this call."""
        return len(self) > self._left

    def _of_this_call(self) -> list[float]:
        known = sorted(self)
        return known[(len(known) - 1) // 4 :][:1] if len(known) >= _ENOUGH else []


def begin_call(times: Mapping[int, Times]) -> None:
    """Another call begins. Checks of drafts, of two positions or more, are missed where another one has run."""
    has_drafted = any(part > 1 and known.has_run for part, known in times.items())
    for part, known in times.items():
        known.begin_call(has_drafted and part > 1)
