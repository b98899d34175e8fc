"""How many drafted tokens a step with free rows verifies: as many as maximize the tokens per second.

A verified token takes a row. Its value is the probability that it is right, and its cost is the additional time of the
step. So a step that serves many inputs verifies few drafts, or none.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

# Weight of a verified token in the average of its input, and in that of all inputs.
_WEIGHT, _WEIGHT_FOR_ALL = 0.2, 0.02
# Less likely tokens are not verified: their gain is smaller than the error of the costs.
_LEAST_CHANCE = 0.05
# The assumed part of a step's time that another row adds, and the number of measurements of a step that replace it.
_SHARE, _MEASURED = 0.08, 3
# Drafts are verified if the rate of tokens grows at least by this factor.
_LEAST_GAIN = 1.05
# Number of latest measurements that count. Other processes may disturb each of them.
_LATEST = 16


class Chance:
    """The probability that a drafted token is right if those before it are: a moving average.

    Args:
        first: the initial value.
    """

    def __init__(self, first: float) -> None:
        self.value = first
        self._all: Chance | None = None

    def of_input(self) -> Chance:
        """Returns the chance of another input, which begins with this value. What it notes is noted here, too."""
        made = Chance(self.value)
        made._all = self
        return made

    def note(self, verified: int, right: int) -> None:
        """Notes how many of the first tokens of a draft were right. Nothing is known after the first wrong one."""
        for number in range(min(verified, right + 1)):
            self._note(number < right, _WEIGHT)
            if self._all is not None:
                self._all._note(number < right, _WEIGHT_FOR_ALL)

    def _note(self, is_right: bool, weight: float) -> None:
        self.value += weight * (is_right - self.value)


class StepSeconds:
    """Times of steps by their number of rows. If nothing may depend on the clock, no measurement is noted."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a step of this many rows."""
        self._measured.setdefault(rows, deque(maxlen=_LATEST)).append(seconds)

    def ratio(self, rows: int, to: int) -> float:
        """Returns the time of a step of `rows` rows relative to one of `to` rows, which is at least 1 if measured."""
        guess = 1 + _SHARE * (rows - to)
        known = [self._measured.get(each, ()) for each in (rows, to)]
        if min(map(len, known)) < _MEASURED:
            return guess
        return max(min(known[0]) / min(known[1]), 1.0)


def counts(
    chances: Sequence[Sequence[float]], inputs: int, room: int, seconds: StepSeconds, sizes: Sequence[int]
) -> list[int]:
    """Returns how many tokens of each draft to verify.

    Args:
        chances: for each draft, the probability of each of its tokens to be right if those before it are.
        inputs: number of other rows of the step.
        room: the most rows that the step may have in total.
        sizes: numbers of rows that steps have, in order.
    """
    found = [0] * len(chances)
    # A token is at most as likely to be kept as the one before it in its draft, which therefore sorts first.
    kept = [list(itertools.accumulate(each, float.__mul__)) for each in chances]
    ranked = [(-chance, at, draft) for draft, each in enumerate(kept) for at, chance in enumerate(each)]
    ranked = sorted(each for each in ranked if -each[0] >= _LEAST_CHANCE)
    plain = next(size for size in sizes if size >= inputs)
    gains = [0.0, *itertools.accumulate(-each[0] for each in ranked)]
    best, most = 0, inputs * _LEAST_GAIN
    for size in sizes:
        count = min(size - inputs, len(ranked))
        if count > 0 and size <= room:
            rate = (inputs + gains[count]) / seconds.ratio(size, plain)
            best, most = (count, rate) if rate > most else (best, most)
    for _, _, draft in ranked[:best]:
        found[draft] += 1
    return found
