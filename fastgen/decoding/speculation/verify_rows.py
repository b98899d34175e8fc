"""How many drafted tokens a step verifies whose rows are free to: as many as give the most tokens a second.

A token that is verified takes a row. What it is worth is how likely it is to be right; what it costs is what the step
takes longer. So the rows that serve many inputs verify few drafts, or none.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

# How much a token that was verified counts in what is known of an input, and of all of them.
_WEIGHT, _WEIGHT_FOR_ALL = 0.2, 0.02
# Less likely tokens are not verified: what they would bring is less than what may be wrong about the costs.
_LEAST_CHANCE = 0.05
# A row more takes this part of a step longer, as long as none was measured, and a step is measured so often before that
# is believed.
_SHARE, _MEASURED = 0.08, 3
# Drafts are verified where they bring this much at the least.
_LEAST_GAIN = 1.05
# Measurements that count: the last ones. Others may have had the processors in each of them.
_LATEST = 16


class Chance:
    """How likely a drafted token is to be right, where those in front of it are: a moving average.

    Args:
        first: as long as nobody knows.
    """

    def __init__(self, first: float) -> None:
        self.value = first
        self._all: Chance | None = None

    def of_input(self) -> Chance:
        """That of one input more: as it is for others, to begin with. What is noted of it is noted here, too."""
        made = Chance(self.value)
        made._all = self
        return made

    def note(self, verified: int, right: int) -> None:
        """Of so many tokens of a draft the first ones were right. Nothing is known of those behind the first wrong."""
        for number in range(min(verified, right + 1)):
            self._note(number < right, _WEIGHT)
            if self._all is not None:
                self._all._note(number < right, _WEIGHT_FOR_ALL)

    def _note(self, is_right: bool, weight: float) -> None:
        self.value += weight * (is_right - self.value)


class StepSeconds:
    """What a step takes, by its rows. Where nothing may depend on the clock, no measurement is `noted`."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._measured.setdefault(rows, deque(maxlen=_LATEST)).append(seconds)

    def ratio(self, rows: int, to: int) -> float:
        """What a step of so many rows takes, by what one of `to` rows does: no less than that, where it has more."""
        guess = 1 + _SHARE * (rows - to)
        known = [self._measured.get(each, ()) for each in (rows, to)]
        if min(map(len, known)) < _MEASURED:
            return guess
        return max(min(known[0]) / min(known[1]), 1.0)


def counts(
    chances: Sequence[Sequence[float]], inputs: int, room: int, seconds: StepSeconds, sizes: Sequence[int]
) -> list[int]:
    """How many tokens of each draft to verify.

    Args:
        chances: of each draft, and each of its tokens: how likely it is to be right if those in front of it are.
        inputs: rows of the step besides.
        room: rows that it may have at the most, in all.
        sizes: rows that steps have, in order.
    """
    found = [0] * len(chances)
    # No token of a draft is more likely to be kept than the one in front of it, which therefore comes first here.
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
