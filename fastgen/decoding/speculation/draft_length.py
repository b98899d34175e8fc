"""The draft-length policy: how many tokens a draft-verify iteration drafts.

In float32, no token depends on the lengths that it chooses. `Costs` knows the times of iterations, and `DraftLength`
chooses the lengths of a call. All of it is arithmetic on the host, of a few microseconds per iteration.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from fastgen.decoding.retrying import BackOff
from fastgen.decoding.speculation.costs import Costs

# Index of the length that is drafted while nothing is known: it tells something about shorter and longer drafts.
AT_FIRST = 2

# Trials that the acceptance rate of all rows, or of the last call, counts for in the rate of a row.
_WEIGHT = 2.0
# With a higher rate, no draft would be too long.
_MOST_RATE = 0.995
# Decay of earlier observations of acceptance with each iteration that drafts: about ten iterations count.
_DECAY = 0.9

# The part of a plain call's time that a call may lose. A draft that is accepted completely with this probability may
# lose as much again: if a draft step takes half of a plain step, a call of 64 tokens would not try any otherwise.
_TOLERANCE, _CONFIDENT = 0.02, 0.85
# The part of the time of the tokens so far that may be lost besides, so that bad luck at first does not end drafting.
_REPAID = 0.008
# If drafts are found in a text, rows have them at different times. The tokens that rows have more than the slowest row
# count as gained, up to this part of the call. If rows share a verify, each such token lowers the value of another one.
_MOST_AHEAD, _AHEAD_COUNTS = 0.08, 0.8
# A call pays if it saves at least this part of a plain call's time.
LEAST_GAIN = 0.07

# Back-off: iterations without a draft before a short one is tried, and plain calls after a call that has not paid.
_FIRST_ITERATIONS, _MOST_ITERATIONS = 8, 128
MOST_CALLS = 64


def of_calls() -> BackOff:
    """Returns the back-off of calls after those whose drafts did not pay. The first may have been disturbed."""
    return BackOff(0.25, MOST_CALLS)


def can_begin(costs: Costs, tokens: int) -> bool:
    """Whether a call of this many tokens may begin with the shortest draft, which could cost a short call too much.

    It may if nothing was timed.
    """
    plain = costs.baseline()
    if plain is None or not costs.knows(has_model=False):
        return True
    return costs.iterations()[costs.lengths[1]] - plain <= _TOLERANCE * tokens * plain


class DraftLength:
    """Chooses how many tokens the iterations of one call draft, to maximize the expected tokens per second.

    A draft of k tokens, each accepted with probability a if those before are, gives 1 + a + ... + a^k tokens
    (Leviathan, Kalman and Matias, ICML 2023, arXiv 2211.17192, section 3.1). As in their section 3.3, this is divided
    by the time of the iteration, but with sums over rows and measured times. The acceptance of a row is a moving
    average, drawn to that of all rows, and begins with that of the last call.

    A call may lose a fiftieth of a plain call's time, counted for the row with the fewest tokens, with which the call
    ends. What drafts have lost so far, and what the next one loses if all is rejected, must be less (`_budget`).

    After an iteration without a draft, a short one is tried after intervals that double until one pays. Drafts that are
    found in a text need no trial, because it is known what they would have gained (`learn`).

    Args:
        costs: of the step, kept for the next call.
        rows: number of rows of the call.
        tokens: the most tokens that each row may get.
        has_model: a model drafts, which takes time.
        schedule: determines the number of tokens to draft instead.
    """

    def __init__(self, costs: Costs, rows: int, tokens: int, has_model: bool, schedule: Schedule | None = None) -> None:
        self.costs = self._first = costs  # of the step that the call runs on now, and of its first step
        self._most_tokens, self._has_model, self._schedule = tokens, has_model, schedule
        self._all = _Acceptance(costs.acceptance)
        self._rows = [_Acceptance() for _ in range(rows)]
        self._tokens, self._slowest = [0] * rows, 0  # number of each row's tokens, and the least of them
        self._iterations: Counter[int] = Counter()  # iterations of this step, by length
        # Of earlier steps: seconds, and the number of tokens when the times of iterations became known.
        self._spent, self._uncounted = 0.0, 0
        self._has_measured = False
        self._trials = BackOff(_FIRST_ITERATIONS, _MOST_ITERATIONS)
        self._of = costs.iterations()  # seconds of iterations, by length

    def choose(self, rows: Sequence[int], most: int, available: Sequence[int] | None = None) -> int:
        """Returns the number of tokens to draft for these unfinished rows: one of the step's lengths.

        Args:
            most: the most tokens of each row.
            available: how many tokens there are for each of these rows, if drafts exist already. Then the next larger
                length is used, and its surplus places are ignored.
        """
        there = most if available is None else max(available, default=0)
        if not rows or there <= 0:
            return 0
        costs = self.costs
        lengths = [k for k in costs.lengths if costs.allows(k) and (k <= most or costs.is_ragged)]
        wanted = self._schedule.length if self._schedule is not None else self._to_be_timed()
        if wanted is None:
            return self._best(rows, lengths, available)
        if costs.is_ragged:
            return wanted
        if available is not None:
            return min((k for k in lengths if k >= min(wanted, there)), default=lengths[-1])
        # A schedule may ask for fewer tokens than the shortest draft has.
        return max((k for k in lengths if k <= wanted), default=0) or max(lengths[:2]) * (wanted > 0)

    def shares(self, rows: Sequence[int], available: Sequence[int], length: int) -> list[int]:
        """Returns how many tokens of each row are drafted if rows share a verify of `length` drafted tokens.

        The tokens most likely to be accepted are drafted, also in the places of finished rows.
        """
        counts = [0] * len(rows)
        for _, row in self._by_chance(rows, available)[: self.costs.rows + length - len(rows)]:
            counts[row] += 1
        return counts

    def observe(self, rows: Sequence[int], length: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes the result of an iteration, after the times of its parts were added to the costs.

        Args:
            rows: those of `choose`.
            length: the length that it was run for; 0 without a draft.
            drafted, accepted: numbers of tokens of each of these rows.
        """
        self._of = self.costs.iterations()
        for row, kept in zip(rows, accepted, strict=True):
            self._tokens[row] += 1 + kept
        self._slowest = min(self._tokens[row] for row in rows)
        self._iterations[length] += 1
        if self._schedule is not None:
            self._schedule.observe(drafted, accepted)
        if not any(drafted):
            return
        # A trial is a token before which all tokens were accepted.
        self._learn(rows, [kept + (kept < count) for count, kept in zip(drafted, accepted, strict=True)], accepted)
        plain = self._plain()
        if plain and (1 + sum(accepted) / len(rows)) * plain > self._of[length]:
            self._trials.succeed()

    def learn(self, rows: Sequence[int], hits: Sequence[bool | None]) -> None:
        """Notes what drafts would have gained in an iteration without one.

        Args:
            hits: for each row, whether the first token found for it was right; None if none was found.
        """
        self._learn(rows, [hit is not None for hit in hits], [hit or False for hit in hits])

    def _learn(self, rows: Sequence[int], trials: Sequence[int], kept: Sequence[int]) -> None:
        if not any(trials):
            return
        self._all.add(sum(trials) / len(rows), sum(kept) / len(rows))
        for row, *found in zip(rows, trials, kept, strict=True):
            if found[0]:
                self._rows[row].add(*found)
        self._first.acceptance = self.costs.acceptance = self._all.rate()

    def keep(self, costs: Costs, rows: Sequence[int]) -> None:
        """Continues with these rows, in this order, on a step that has no others.

        The gain is still relative to a plain call, in which all rows would have continued.
        """
        if self._to_be_timed() is None:
            self._spent = self._seconds()
        else:
            self._uncounted = self._slowest
        self._iterations.clear()
        costs.follow(self.costs)
        self.costs, self._of = costs, costs.iterations()
        self._rows = [self._rows[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]

    @property
    def cannot_pay(self) -> bool:
        """Whether the call could not pay with any of the first step's lengths, even if all tokens were accepted."""
        first = self._first
        return (
            self._schedule is None
            and first.baseline() is not None
            and first.knows(self._has_model)
            and first.most_gain() < LEAST_GAIN
        )

    def pays(self) -> bool | None:
        """Whether the call has taken less time than a plain one; None if that is not known."""
        plain = self._plain()
        if self._schedule is not None or self._has_measured or not plain:
            return None
        return self._gained(plain) >= LEAST_GAIN * plain * self._slowest

    def _to_be_timed(self) -> int | None:
        """Returns the length of an iteration to time first, while times are unknown; None once they are known."""
        wanted = None
        if not self.costs.knows(self._has_model):
            wanted = self.costs.lengths[AT_FIRST]
        elif not self._plain():
            wanted = 0
        self._has_measured |= wanted is not None
        return wanted

    def _best(self, rows: Sequence[int], lengths: Sequence[int], available: Sequence[int] | None) -> int:
        plain, budget = self._plain(), self._budget(rows, available is not None)
        more = _TOLERANCE * plain * self._most_tokens
        confidence = math.prod(self._rate(row) for row in rows) if available is None else 0.0
        gains = self._gains(rows, available)
        expected = sum(self._weights(rows))
        best, fastest = 0, expected / self._of[0]
        for before, k in itertools.pairwise(lengths):
            if before >= len(gains):
                break  # a shorter draft holds all tokens
            expected += sum(gains[before:k])
            seconds = self._of[k]
            is_affordable = seconds - plain <= budget + more * (confidence**k >= _CONFIDENT)
            if is_affordable and expected > fastest * seconds:
                best, fastest = k, expected / seconds
        if best or available is not None or len(lengths) < 2 or self._trials.waits():
            return best
        if self._of[lengths[1]] - plain > budget:
            return 0
        self._trials.fail()
        for known in (self._all, *self._rows):
            known.fade()
        return lengths[1]

    def _gains(self, rows: Sequence[int], available: Sequence[int] | None) -> list[float]:
        """Returns what each drafted token adds to the expected tokens of an iteration, from the first on."""
        if self.costs.is_ragged and available is not None:
            chances = [chance for chance, _ in self._by_chance(rows, available)]
            unused = self.costs.rows - len(rows)
            return [sum(chances[: unused + 1]), *chances[unused + 1 :]]
        longest = self.costs.lengths[-1]
        by_row = [(self._rate(row), longest if available is None else available[at]) for at, row in enumerate(rows)]
        most = max(count for _, count in by_row)
        return [sum(rate**k for rate, count in by_row if count >= k) for k in range(1, most + 1)]

    def _by_chance(self, rows: Sequence[int], available: Sequence[int]) -> list[tuple[float, int]]:
        """Returns each token's expected gain and the index of its row, best first; tokens of a row stay in order."""
        found = [
            (weight * self._rate(row) ** k, at)
            for at, (row, count, weight) in enumerate(zip(rows, available, self._weights(rows), strict=True))
            for k in range(1, count + 1)
        ]
        return sorted(found, key=lambda chance: -chance[0])

    def _weights(self, rows: Sequence[int]) -> list[float]:
        """Returns the weight of a token of each row. The call ends with the slowest row, for which others can wait."""
        fewest = min(self._tokens[row] for row in rows)
        return [_AHEAD_COUNTS ** (self._tokens[row] - fewest) if self.costs.is_ragged else 1.0 for row in rows]

    def _rate(self, row: int) -> float:
        known = self._rows[row]
        return min((known.kept + _WEIGHT * self._all.rate()) / (known.trials + _WEIGHT), _MOST_RATE)

    def _budget(self, rows: Sequence[int], are_found: bool) -> float:
        """Returns the seconds that the call may still lose."""
        plain, most = self._plain(), self._most_tokens
        tokens = _TOLERANCE * most + _REPAID * min(self._slowest, most)
        if are_found:
            mean = sum(self._tokens[row] for row in rows) / len(rows)
            tokens += min(mean - self._slowest, _MOST_AHEAD * most)
        return self._gained(plain) + plain * tokens

    def _plain(self) -> float:
        """Returns the seconds of a plain call's step with all rows; 0 if they are not known."""
        return self._first.baseline() or self.costs.baseline() or 0.0

    def _gained(self, plain: float) -> float:
        return (self._slowest - self._uncounted) * plain - self._seconds()

    def _seconds(self) -> float:
        return self._spent + sum(count * self._of[k] for k, count in self._iterations.items())


class _Acceptance:
    """A moving average of accepted tokens and trials."""

    def __init__(self, rate: float | None = None) -> None:
        self.trials = 0.0 if rate is None else _WEIGHT
        self.kept = (rate or 0.0) * self.trials

    def rate(self) -> float:
        return self.kept / self.trials

    def add(self, trials: float, kept: float) -> None:
        self.kept = _DECAY * self.kept + kept
        self.trials = _DECAY * self.trials + trials

    def fade(self) -> None:
        """Lets earlier observations count as one trial, because they are old, so that new ones decide."""
        if self.trials > 1:
            self.kept, self.trials = self.kept / self.trials, 1.0


class Schedule:
    """Transformers' `num_assistant_tokens_schedule`.

    "heuristic" and "heuristic_transient" add two tokens after an iteration in which every row that had drafted tokens
    accepted all of them, and subtract one after any other. All others, such as "constant", keep the number. After a
    "heuristic" call the library writes `length` back for the next call.

    Args:
        length: number of tokens to draft: `num_assistant_tokens`. The defaults are the library's.
    """

    def __init__(self, length: int = 20, name: str = "constant") -> None:
        self.length, self._adapts = length, name in ("heuristic", "heuristic_transient")

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Adapts the length to the result of an iteration, by rows."""
        if self._adapts and any(drafted):
            all_accepted = all(kept == count for count, kept in zip(drafted, accepted, strict=True))
            self.length = self.length + 2 if all_accepted else max(1, self.length - 1)
