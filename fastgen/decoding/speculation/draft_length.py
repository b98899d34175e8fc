"""The draft-length policy: how many tokens a draft-verify iteration drafts.

It chooses lengths: in float32, no token depends on it. What iterations take, `Costs` says; what to draft in a call,
`DraftLength`. All of it is arithmetic on the host, of a few microseconds an iteration.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from fastgen.decoding.back_off import BackOff
from fastgen.decoding.speculation.costs import Costs

# Which of the lengths is drafted as long as nothing is known: it says something about shorter and longer ones.
AT_FIRST = 2

# How many trials the acceptance rate of all rows, or of the last call, counts for in the rate of a row.
_WEIGHT = 2.0
# With more, no draft would be too long.
_MOST_RATE = 0.995
# Of what is known about acceptance, this much is left after each iteration that drafts: about ten of them count.
_DECAY = 0.9

# The part of a plain call's time that a call may lose. A draft that is accepted as a whole with this probability may
# lose as much once more: where a step of the draft takes half a plain one, none would be tried in a call of 64 tokens.
_TOLERANCE, _CONFIDENT = 0.02, 0.85
# What may be lost besides, of the time of the tokens so far: an unlucky beginning does not end drafts.
_REPAID = 0.008
# Where drafts are found, rows have theirs at different times. What they have more than the slowest one counts as
# gained, up to this part of the call; and where they share a verify, each such token lessens what another one counts.
_MOST_AHEAD, _AHEAD_COUNTS = 0.08, 0.8
# A call pays if it takes less time than a plain one by this part.
LEAST_GAIN = 0.07

# Back-off: iterations without a draft until a short one is tried, and plain calls after one that has not paid.
_FIRST_ITERATIONS, _MOST_ITERATIONS = 8, 128
MOST_CALLS = 64


def of_calls() -> BackOff:
    """The back-off of calls after those whose drafts did not pay. The first of those may have been disturbed."""
    return BackOff(0.25, MOST_CALLS)


def can_begin(costs: Costs, tokens: int) -> bool:
    """Whether the shortest draft may begin a call of so many tokens: it might lose too much of a short one.

    Where nothing was timed, it may.
    """
    plain = costs.baseline()
    if plain is None or not costs.knows(has_model=False):
        return True
    return costs.iterations()[costs.lengths[1]] - plain <= _TOLERANCE * tokens * plain


class DraftLength:
    """Chooses how many tokens the iterations of one call draft: of which most tokens per second are expected.

    A draft of k tokens, each of which is accepted with probability a if those before are, gives 1 + a + ... + a^k
    tokens (Leviathan, Kalman and Matias, ICML 2023, arXiv 2211.17192, section 3.1). As their section 3.3 does, this
    divides it by what the iteration takes, with the sums over rows and measured times. The acceptance of a row is a
    moving average, drawn to that of all rows, and begins with what the last call has found.

    A call may lose a fiftieth of a plain call's time, counted for the row with fewest tokens, because the call ends
    with it: what drafts have lost so far, and what the next one loses if all is rejected, must be less (`_budget`).

    After an iteration without a draft, a short one is tried after intervals that double until one pays. Drafts that are
    found in a text need no trial: what they would have come to is known (`learn`).

    Args:
        costs: of the step, kept for the next call.
        rows: of the call.
        tokens: that each row may get, at the most.
        has_model: the draft takes time.
        schedule: says how many tokens to draft instead.
    """

    def __init__(self, costs: Costs, rows: int, tokens: int, has_model: bool, schedule: Schedule | None = None) -> None:
        self.costs = self._first = costs  # of the step that the call is in, and of that it began in
        self._most_tokens, self._has_model, self._schedule = tokens, has_model, schedule
        self._all = _Acceptance(costs.acceptance)
        self._rows = [_Acceptance() for _ in range(rows)]
        self._tokens, self._slowest = [0] * rows, 0  # of each row, and of that which has fewest
        self._iterations: Counter[int] = Counter()  # with this step, by length
        # Of the steps before: seconds, and the tokens that were there when it became known what iterations take.
        self._spent, self._uncounted = 0.0, 0
        self._has_measured = False
        self._trials = BackOff(_FIRST_ITERATIONS, _MOST_ITERATIONS)
        self._of = costs.iterations()  # seconds by length

    def choose(self, rows: Sequence[int], most: int, available: Sequence[int] | None = None) -> int:
        """Tokens to draft for these rows, the unfinished ones: one of the step's lengths.

        Args:
            most: of each row, at the most.
            available: how many there are for each of these rows, where they are there already. Then the next larger
                length serves, and the places that are left over are not looked at.
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
        # A schedule may say fewer than the shortest draft has.
        return max((k for k in lengths if k <= wanted), default=0) or max(lengths[:2]) * (wanted > 0)

    def shares(self, rows: Sequence[int], available: Sequence[int], length: int) -> list[int]:
        """How many tokens of each of these rows are drafted where rows share a verify of `length` drafted tokens.

        Those that are most likely accepted are drafted, and places of finished rows are used, too.
        """
        counts = [0] * len(rows)
        for _, row in self._by_chance(rows, available)[: self.costs.rows + length - len(rows)]:
            counts[row] += 1
        return counts

    def observe(self, rows: Sequence[int], length: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What came of an iteration, whose parts the costs have been told.

        Args:
            rows: those of `choose`.
            length: what it was made for; 0 without a draft.
            drafted, accepted: tokens of each of these rows.
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
        # A trial is a token that all before were accepted.
        self._learn(rows, [kept + (kept < count) for count, kept in zip(drafted, accepted, strict=True)], accepted)
        plain = self._plain()
        if plain and (1 + sum(accepted) / len(rows)) * plain > self._of[length]:
            self._trials.succeed()

    def learn(self, rows: Sequence[int], hits: Sequence[bool | None]) -> None:
        """What drafts would have come to in an iteration without one.

        Args:
            hits: of each row: whether the first token that was found for it was right; None where none was found.
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
        """These rows, in this order, go on in a step that has no others.

        What is gained is still told from a plain call, in which all rows would have gone on.
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
        """Whether the call would not pay if all that is drafted were accepted, with any of the first step's lengths."""
        first = self._first
        return (
            self._schedule is None
            and first.baseline() is not None
            and first.knows(self._has_model)
            and first.most_gain() < LEAST_GAIN
        )

    def pays(self) -> bool | None:
        """Whether the call has taken less time than a plain one; None where nobody knows."""
        plain = self._plain()
        if self._schedule is not None or self._has_measured or not plain:
            return None
        return self._gained(plain) >= LEAST_GAIN * plain * self._slowest

    def _to_be_timed(self) -> int | None:
        """The length of an iteration that says what has to be known first; None where that is known."""
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
                break  # a shorter one is more than enough
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
        """What each drafted token adds to the tokens that are expected of an iteration, from the first on."""
        if self.costs.is_ragged and available is not None:
            chances = [chance for chance, _ in self._by_chance(rows, available)]
            unused = self.costs.rows - len(rows)
            return [sum(chances[: unused + 1]), *chances[unused + 1 :]]
        longest = self.costs.lengths[-1]
        by_row = [(self._rate(row), longest if available is None else available[at]) for at, row in enumerate(rows)]
        most = max(count for _, count in by_row)
        return [sum(rate**k for rate, count in by_row if count >= k) for k in range(1, most + 1)]

    def _by_chance(self, rows: Sequence[int], available: Sequence[int]) -> list[tuple[float, int]]:
        """What each token is expected to add, and whose it is, by place: best first, and those of a row in order."""
        found = [
            (weight * self._rate(row) ** k, at)
            for at, (row, count, weight) in enumerate(zip(rows, available, self._weights(rows), strict=True))
            for k in range(1, count + 1)
        ]
        return sorted(found, key=lambda chance: -chance[0])

    def _weights(self, rows: Sequence[int]) -> list[float]:
        """What a token of each row counts. The call ends with the row that has fewest: others can wait for it."""
        fewest = min(self._tokens[row] for row in rows)
        return [_AHEAD_COUNTS ** (self._tokens[row] - fewest) if self.costs.is_ragged else 1.0 for row in rows]

    def _rate(self, row: int) -> float:
        known = self._rows[row]
        return min((known.kept + _WEIGHT * self._all.rate()) / (known.trials + _WEIGHT), _MOST_RATE)

    def _budget(self, rows: Sequence[int], are_found: bool) -> float:
        """Seconds that the call may still lose."""
        plain, most = self._plain(), self._most_tokens
        tokens = _TOLERANCE * most + _REPAID * min(self._slowest, most)
        if are_found:
            mean = sum(self._tokens[row] for row in rows) / len(rows)
            tokens += min(mean - self._slowest, _MOST_AHEAD * most)
        return self._gained(plain) + plain * tokens

    def _plain(self) -> float:
        """Seconds of a step of a plain call with all rows; 0 where nobody knows."""
        return self._first.baseline() or self.costs.baseline() or 0.0

    def _gained(self, plain: float) -> float:
        return (self._slowest - self._uncounted) * plain - self._seconds()

    def _seconds(self) -> float:
        return self._spent + sum(count * self._of[k] for k, count in self._iterations.items())


class _Acceptance:
    """Accepted tokens and trials, as a moving average."""

    def __init__(self, rate: float | None = None) -> None:
        self.trials = 0.0 if rate is None else _WEIGHT
        self.kept = (rate or 0.0) * self.trials

    def rate(self) -> float:
        return self.kept / self.trials

    def add(self, trials: float, kept: float) -> None:
        self.kept = _DECAY * self.kept + kept
        self.trials = _DECAY * self.trials + trials

    def fade(self) -> None:
        """What is known is old, and counts as one trial, so that what is found now decides."""
        if self.trials > 1:
            self.kept, self.trials = self.kept / self.trials, 1.0


class Schedule:
    """Transformers' `num_assistant_tokens_schedule`.

    "heuristic" and "heuristic_transient" add two tokens after an iteration in which all were accepted, by every row
    that had any, and take one away after any other. All others leave the number as it is, "constant" among them. After
    a "heuristic" call the library writes `length` back for the next one.

    Args:
        length: tokens to draft: `num_assistant_tokens`. These are the library's defaults.
    """

    def __init__(self, length: int = 20, name: str = "constant") -> None:
        self.length, self._adapts = length, name in ("heuristic", "heuristic_transient")

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What came of an iteration, by rows."""
        if self._adapts and any(drafted):
            all_accepted = all(kept == count for count, kept in zip(drafted, accepted, strict=True))
            self.length = self.length + 2 if all_accepted else max(1, self.length - 1)
