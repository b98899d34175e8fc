"""The draft-length policy: how many tokens a draft-verify iteration drafts.

`Chance` is the acceptance of drafted tokens, a moving average. `Costs` has the times of iterations, from the medians of
their parts. `DraftLength` chooses the lengths of a call by both, within a budget of time that calls may lose. In
float32, no token depends on the lengths. All of it is arithmetic on the host, of a few microseconds per iteration.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from fastgen.decoding.retrying import BackOff

# Index of the length that is drafted while nothing is known: it tells something about shorter and longer drafts.
AT_FIRST = 2

# The assumed acceptance of a draft of which nothing is known, and the number of trials of each row that it counts for,
# like the acceptance of the last call. Then each trial has at least this weight.
_ACCEPTANCE, _TRIALS_BEFORE, _WEIGHT = 0.7, 2.0, 0.1

# The part of the time of plain calls that calls may lose.
_TOLERANCE = 0.02
# The tokens that a row has more than the slowest row, with which the call ends, count less and less: together as much
# as this part of the call. If drafts are found in a text, each row has them at another time.
_MOST_AHEAD = 0.05
# A call pays if it saves at least this part of a plain call's time.
LEAST_GAIN = 0.07

# Back-off, at first and at most: iterations without a draft before a short one is tried. The most plain calls after
# calls that have not paid.
_ITERATIONS = (8, 128)
MOST_CALLS = 64

# Parts besides verifies, which are identified by their number of positions: a draft step, and the host's work.
DRAFT, HOST = 0, -100
# The latest timings of a part in a call, of which the median is taken; the number that is enough for one, because the
# first run of a part is slow; and calls whose medians are kept. The least median counts, as only disturbances add time.
_KEPT, _ENOUGH, _MEDIANS = 16, 2, 4
# Calls that draft after which a verify that none of them has used is timed again.
_CALLS_UNTIMED = 16


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
    return costs.iterations()[costs.lengths[1]] - plain <= plain * (costs.credit_of(tokens) + _TOLERANCE * tokens)


# ---- acceptance


class Chance:
    """The probability that a drafted token is right if those before it are: a moving average.

    Args:
        first: the initial value.
        weight: the least weight of a trial.
        trials: how many trials the initial value counts for; None if all trials have the same weight.
        of_all: notes the same trials for all inputs.
    """

    def __init__(self, first: float, weight: float, trials: float | None = None, of_all: Chance | None = None) -> None:
        self.value, self._most, self._of_all = first, 1 / weight, of_all
        self._trials = self._most if trials is None else trials

    def note(self, verified: int, right: int) -> None:
        """Notes how many of the first tokens of a draft were right. Nothing is known after the first wrong one."""
        for number in range(min(verified, right + 1)):
            self._note(number < right)
            if self._of_all is not None:
                self._of_all._note(number < right)

    def _note(self, is_right: bool) -> None:
        self._trials = min(self._trials + 1, self._most)
        self.value += (is_right - self.value) / self._trials

    def fade(self) -> None:
        """Lets earlier trials count as one, because they are old, so that new ones decide."""
        self._trials = 1.0


def by_gain(drafts: Iterable[tuple[float, float, int]]) -> list[tuple[float, int]]:
    """Returns each token's expected gain and the index of its draft, best first; tokens of a draft stay in order.

    Args:
        drafts: the weight of each draft, the chance of its tokens, and their number.
    """
    found = [(weight * chance**k, at) for at, (weight, chance, count) in enumerate(drafts) for k in range(1, count + 1)]
    return sorted(found, key=lambda gain: -gain[0])


# ---- costs


class Timings:
    """Seconds of the last runs of a part."""

    def __init__(self) -> None:
        self._of_this_call: deque[float] = deque(maxlen=_KEPT)
        self._medians: deque[float] = deque(maxlen=_MEDIANS)  # of earlier calls
        self._missed = 0  # calls that could have run the part, but did not
        self.has_run = False  # in this call

    def add(self, seconds: float) -> None:
        """Notes the seconds of a run."""
        self._of_this_call.append(seconds)
        self.has_run = True

    def seconds(self) -> float | None:
        """Returns the least of the medians of some calls; None while there are too few timings."""
        return min([*self._medians, *self._median()], default=None)

    @property
    def is_old(self) -> bool:
        """Whether calls have missed the part for long, after timings that may be those of a busy machine."""
        return self._missed >= _CALLS_UNTIMED and not self._median()

    def begin_call(self, was_missed: bool) -> None:
        """Begins another call. Timings of a part that runs seldom are collected over several calls."""
        if self._median():
            self._medians.extend(self._median())
            self._of_this_call.clear()
            self._missed = 0
        else:
            self._missed += was_missed
        self.has_run = False

    def _median(self) -> list[float]:
        found = sorted(self._of_this_call)
        return [found[(len(found) - 1) // 2]] if len(found) >= _ENOUGH else []


class Costs:
    """Times of a step's iterations, from the medians of their parts; and what its calls leave to the next one.

    The time of a verify that was not timed is interpolated from those of other numbers of tokens. So is that of a
    verify that calls have missed for long, which would never run again if it had been timed on a busy machine.

    Attributes:
        plain: seconds of a plain call's step; None if it was not timed, and a verify of one position is used instead.
        acceptance: the probability that a drafted token is accepted if those before are, in the last iterations.
        credit: the time that earlier calls could have lost, but did not, in plain steps.
        only_timed: only lengths whose verify was timed may be drafted, because calls must not record anything.
        short_calls: number of calls that had too few tokens for a draft, since the parts were timed.

    Args:
        rows: rows of the step. A verify computes all of them, finished or not.
        lengths: numbers of tokens that an iteration may draft, 0 first: per row, or for all together if `is_ragged`.
    """

    def __init__(self, rows: int, lengths: Sequence[int], is_ragged: bool = False) -> None:
        self.rows, self.lengths, self.is_ragged = rows, lengths, is_ragged
        self.plain: float | None = None
        self.acceptance = _ACCEPTANCE
        self.credit = 0.0
        self.only_timed = False
        self.forget()

    def forget(self) -> None:
        """Drops all timings, because the machine may have been busy."""
        self._parts: dict[int, Timings] = {}
        self.short_calls = 0

    def add(self, part: int, seconds: float) -> None:
        """Notes the seconds of a part: a verify of this many positions, `DRAFT` or `HOST`."""
        self._parts.setdefault(part, Timings()).add(seconds)

    def begin_call(self) -> None:
        """Begins another call. A verify of drafted tokens was missed if another one has run in the last call."""
        has_drafted = any(part > 1 and known.has_run for part, known in self._parts.items())
        # If no plain call times a step without a draft, a verify of one position can be missed, too.
        first = 1 if self.plain is None else 2
        for part, known in self._parts.items():
            known.begin_call(has_drafted and part >= first)

    def credit_of(self, tokens: int) -> float:
        """Returns how much of the credit a call of this many tokens may use: as much as it may lose by itself."""
        return min(self.credit, _TOLERANCE * tokens)

    def seconds(self, part: int) -> float | None:
        """Returns the median of a part; None while there are too few timings."""
        return self._parts[part].seconds() if part in self._parts else None

    def allows(self, length: int) -> bool:
        """Whether iterations may draft this many tokens."""
        return not (length and self.only_timed) or self.seconds(length + 1) is not None

    def knows(self, has_model: bool) -> bool:
        """Whether the times of a draft and of its verify are known."""
        return max(self._verifies(), default=0) > self.rows and (not has_model or self.seconds(DRAFT) is not None)

    def baseline(self) -> float | None:
        """Returns the seconds of an iteration without a draft, as in a plain call; None if they are not known."""
        return self._verifies().get(self.rows)

    def iterations(self) -> dict[int, float]:
        """Returns the seconds of iterations by the number of drafted tokens; empty while no verify was timed."""
        verifies = self._verifies()
        if not verifies:
            return {}
        draft, host, own = self.seconds(DRAFT) or 0.0, self.seconds(HOST) or 0.0, self.seconds(1)
        found = {k: _interpolated(verifies, self._positions(k)) + k * draft + host for k in self.lengths}
        # An iteration without a draft and a plain step differ only by the host's work. Any other difference is noise.
        plain = found[0] - host
        found[0] = plain if self.plain is None or own is None else min(max(own + host, plain), found[0])
        return found

    @property
    def cannot_pay(self) -> bool:
        """Whether drafts would save too little of a plain call's time even if all tokens were accepted."""
        plain = self.baseline()
        if plain is None or not self.knows(has_model=False):
            return False
        of = self.iterations()
        return min(of[k] * self.rows / self._positions(k) for k in self.lengths[1:]) > (1 - LEAST_GAIN) * plain

    def _positions(self, length: int) -> int:
        return self.rows + length if self.is_ragged else self.rows * (length + 1)

    def _verifies(self) -> dict[int, float]:
        """Returns the seconds of verifies by their number of tokens."""
        found = {}
        for part, known in self._parts.items():
            if part > 0 and not known.is_old and (seconds := known.seconds()) is not None:
                found[self._positions(part - 1)] = seconds
        return found if self.plain is None else {**found, self.rows: self.plain}


def _interpolated(table: dict[int, float], at: int) -> float:
    """Interpolates linearly, and extrapolates at both ends, but never below proportion, nor the cheapest entry."""
    entries = sorted(table.items())
    if len(entries) == 1 or at in table:
        return table.get(at, entries[0][1])
    right = min(max(bisect.bisect_left(entries, (at,)), 1), len(entries) - 1)
    (x0, y0), (x1, y1) = entries[right - 1 : right + 1]
    least = y0 * at / x0 if at < x0 else min(table.values())
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), least)


# ---- lengths


class DraftLength:
    """Chooses how many tokens the iterations of one call draft, to maximize the expected tokens per second.

    A draft of k tokens, each accepted with probability a if those before are, gives 1 + a + ... + a^k tokens
    (Leviathan, Kalman and Matias, ICML 2023, arXiv 2211.17192, section 3.1). As in their section 3.3, this is divided
    by the time of the iteration, but with sums over rows and measured times. The acceptance of a row begins with that
    of all rows, and that with the last call's.

    Calls may lose a fiftieth of plain calls' time, counted for the row with the fewest tokens, with which a call ends.
    What drafts have lost so far, and what the next one loses if all is rejected, must be less. What a call leaves is
    the credit of the next one, which may lose at most twice its own part.

    After an iteration without a draft, a short one is tried after intervals that double until one pays. Drafts that are
    found in a text need no trial, because it is known what they would have gained.

    Args:
        costs: of the step, kept for the next call.
        rows: number of rows of the call.
        tokens: the most tokens that each row may get.
        has_model: a model drafts, which takes time.
    """

    def __init__(self, costs: Costs, rows: int, tokens: int, has_model: bool) -> None:
        self.costs = costs
        self._most_tokens, self._has_model = tokens, has_model
        self._credit, self._most_ahead = costs.credit_of(tokens), max(_MOST_AHEAD * tokens, 1.0)
        self._all = Chance(costs.acceptance, _WEIGHT / rows, _TRIALS_BEFORE * rows)
        self._chances: dict[int, Chance] = {}  # of rows that have had a draft
        self._tokens, self._slowest = [0] * rows, 0  # number of each row's tokens, and the least of them
        self._iterations: Counter[int] = Counter()  # by length
        self._trials = BackOff(*_ITERATIONS)
        self._of = costs.iterations()  # seconds of iterations, by length

    def choose(self, rows: Sequence[int], most: int, available: Sequence[int] | None = None) -> int:
        """Returns the number of tokens to draft for these unfinished rows: one of the step's lengths.

        Args:
            most: the most tokens of each row.
            available: how many tokens there are for each of these rows, if drafts exist already. Then the next larger
                length is used, and its surplus places are ignored.
        """
        counts = [most] * len(rows) if available is None else available
        if max(counts, default=0) <= 0:
            return 0
        costs = self.costs
        lengths = [k for k in costs.lengths if costs.allows(k) and (k <= most or costs.is_ragged)]
        wanted = self._to_be_timed()
        if wanted is None:
            return self._best(rows, lengths, counts, are_found=available is not None)
        return wanted if wanted in lengths else lengths[-1]

    def counts(self, rows: Sequence[int], available: Sequence[int], length: int) -> list[int]:
        """Returns how many of the available tokens of each row an iteration of this length drafts.

        If rows share the tokens of a verify, those most likely to be accepted are drafted, also in the places of
        finished rows.
        """
        if not (length and self.costs.is_ragged):
            return [min(count, length) for count in available]
        counts = [0] * len(rows)
        drafts = zip(self._weights(rows), map(self._chance, rows), available, strict=True)
        for _, row in by_gain(drafts)[: self.costs.rows + length - len(rows)]:
            counts[row] += 1
        return counts

    def observe(self, rows: Sequence[int], length: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes the result of an iteration, after the times of its parts were added to the costs.

        Args:
            rows: those of `choose`.
            length: the length that it was run for; 0 without a draft.
            drafted, accepted: numbers of tokens of each of these rows. Without a draft, what one would have gained: for
                each row whether a first token was found, and whether it was right.
        """
        self._of = self.costs.iterations()
        for row, count, kept in zip(rows, drafted, accepted, strict=True):
            self._tokens[row] += 1 + kept * (length > 0)
            if count:
                if row not in self._chances:
                    self._chances[row] = Chance(self._all.value, _WEIGHT, _TRIALS_BEFORE, self._all)
                self._chances[row].note(count, kept)
        self.costs.acceptance = self._all.value
        self._slowest = min(self._tokens[row] for row in rows)
        self._iterations[length] += 1
        plain = self.costs.baseline()
        if plain:
            self.costs.credit = max(self._budget(plain, self._slowest) / plain, 0.0)
            if length and (1 + sum(accepted) / len(rows)) * plain > self._of[length]:
                self._trials.succeed()

    def pays(self) -> bool | None:
        """Whether the call has taken less time than a plain one; None if that is not known."""
        plain = self.costs.baseline()
        return (1 - LEAST_GAIN) * self._slowest * plain >= self._seconds() if plain else None

    def _to_be_timed(self) -> int | None:
        """Returns the length of an iteration to time first, while times are unknown; None once they are known."""
        if not self.costs.knows(self._has_model):
            return self.costs.lengths[AT_FIRST]
        return None if self.costs.baseline() else 0

    def _best(self, rows: Sequence[int], lengths: Sequence[int], available: Sequence[int], are_found: bool) -> int:
        plain = self.costs.baseline() or 0.0
        budget = self._budget(plain, self._most_tokens)
        if are_found:
            budget += plain * self._most_ahead * (1 - sum(self._weights(rows)) / len(rows))
        lengths = [k for k in lengths if not k or self._of[k] - plain <= budget]
        best = max(lengths, key=lambda k: self._expected(rows, self.counts(rows, available, k)) / self._of[k])
        if best or are_found or len(lengths) < 2 or self._trials.waits():
            return best
        self._trials.fail()
        for known in (self._all, *self._chances.values()):
            known.fade()
        return lengths[1]

    def _expected(self, rows: Sequence[int], counts: Sequence[int]) -> float:
        """Returns the expected value of the tokens of an iteration that drafts so many tokens of each row."""
        by_row = zip(self._weights(rows), map(self._chance, rows), counts, strict=True)
        return sum(weight * sum(chance**k for k in range(count + 1)) for weight, chance, count in by_row)

    def _chance(self, row: int) -> float:
        return self._chances.get(row, self._all).value

    def _weights(self, rows: Sequence[int]) -> list[float]:
        """Returns the value of the next token of each row: the values of all tokens ahead sum up to `_most_ahead`."""
        slowest = min(self._tokens[row] for row in rows)  # of those that have not ended
        return [(1 - 1 / self._most_ahead) ** (self._tokens[row] - slowest) for row in rows]

    def _budget(self, plain: float, tokens: int) -> float:
        """Returns the seconds that the call may still lose if it gets this many tokens."""
        return plain * (self._slowest + self._credit + _TOLERANCE * tokens) - self._seconds()

    def _seconds(self) -> float:
        return sum(count * self._of[k] for k, count in self._iterations.items())
