"""How many tokens to draft at the next step: chosen by what it gains, or as one of Transformers' schedules says.

All of this is arithmetic on the host, of a few microseconds a step.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

# Of what is known about a row, this much is left after each step that drafts: about ten steps count.
_DECAY = 0.9
# Trials as which the acceptance of all rows counts for one of them, and what is expected at the beginning for all.
_SHARED_WEIGHT = 2.0
_PRIOR_WEIGHT = 2.0
# An acceptance of one would mean that a draft cannot be too long.
_MOST_ACCEPTANCE = 0.995
# After drafting was given up: steps until it is tried again, at first and at most. Then as little as can be is drafted,
# and steps that give back what it may lose are enough (_RECOVERY).
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 128
# While tokens are drafted, what a plain step takes is measured again after this many steps.
_PLAIN_INTERVAL = 64
# Of what rows gain more than the one with fewest tokens, this part counts where drafts are found in a text.
_LEAD_COUNTS = 0.5
# Where rows share places, a row counts by this to the power of the tokens that it has more than the one with fewest.
_AHEAD_COUNTS = 0.8
# What rows gain may cost no more than this part of the time without drafts, besides the tolerance.
_MOST_LEAD = 0.08
# What may be lost grows by this part of the time that the tokens so far, up to the horizon, would take without drafts.
_RECOVERY = 0.008
# A draft that all rows are expected to accept with this probability may lose this part of the time, in place of the
# tolerance.
_SURE, _MOST_RISK = 0.85, 0.04
# How fast timings replace what was known. A single one may be wrong by any factor, and counts for this much at most.
_TIMING_RATE, _TIMING_LIMIT = 0.2, 2.0

# Calls without drafts after those that have gained nothing: none after the first, then 1, 3, 7 and so on, up to this.
MOST_PAUSES = 63


class Costs:
    """What a step takes: drafting k tokens of each row, and one pass that verifies them.

    Tables are interpolated, and go on at both ends as between the last two numbers; in front of the first one, they are
    never less than in proportion. Observed timings correct them, each k for itself, because context and other work on
    the machine change them.

    Attributes:
        idle: seconds that a step without a draft takes longer than one of a call that never drafts.

    Args:
        verify: seconds of a pass by its number of tokens, rows * (k + 1). A plain step is one of `rows` tokens.
        draft: seconds of drafting one token of each row, by the number of rows; none for a draft without a model.
        is_ragged: k is how many tokens are drafted of all rows together, and not of each.

    Raises:
        ValueError: a table is empty, or has a number that is not positive (`draft` may be 0).
    """

    def __init__(
        self, verify: Mapping[int, float], draft: Mapping[int, float] | None = None, is_ragged: bool = False
    ) -> None:
        self.is_ragged = is_ragged
        self._verify, self._draft = sorted(verify.items()), sorted((draft or {1: 0.0}).items())
        if not verify or self._verify[0][0] < 1 or min(verify.values()) <= 0 or min(v for _, v in self._draft) < 0:
            raise ValueError(f"seconds of a pass by its number of tokens are needed, all positive: {dict(verify)}")
        self._tables: dict[int, list[float]] = {}
        self._corrections: dict[int, float] = {}
        self._corrected: dict[tuple[int, int], list[float]] = {}
        self._since_plain = 0
        self.idle = 0.0

    @property
    def plain_is_old(self) -> bool:
        """Whether a plain step should be measured again: it is what all others are compared with."""
        return self._since_plain >= _PLAIN_INTERVAL

    def steps(self, rows: int, most: int) -> list[float]:
        """Seconds of a step, for k from 0 to `most`; not to be changed."""
        found = self._corrected.get((rows, most))
        if found is None:
            table = self._table(rows, most)[: most + 1]
            found = [seconds * self._correction(k) for k, seconds in enumerate(table)]
            self._corrected[rows, most] = found
        return found

    def observe(self, rows: int, k: int, seconds: float) -> None:
        """A step has taken so long."""
        ratio, known = seconds / self._table(rows, k)[k], self._correction(k)
        ratio = min(max(ratio, known / _TIMING_LIMIT), known * _TIMING_LIMIT)
        self._corrections[k] = known + _TIMING_RATE * (ratio - known)
        self._corrected.clear()
        self._since_plain = self._since_plain + 1 if k else 0

    def _table(self, rows: int, most: int) -> list[float]:
        table = self._tables.setdefault(rows, [])
        for k in range(len(table), most + 1):
            tokens = rows + k if self.is_ragged else rows * (k + 1)
            table.append(k * _interpolated(self._draft, rows) + _interpolated(self._verify, tokens))
        return table

    def _correction(self, k: int) -> float:
        """That of k, or of the nearest k that has one."""
        known = self._corrections
        return known[k] if k in known else known[min(known, key=lambda other: abs(other - k))] if known else 1.0


class DraftLength:
    """Chooses the k of which most tokens per second are expected, over all unfinished rows.

    A draft of k tokens, each of which is accepted with probability a if those before are, gives 1 + a + ... + a^k =
    (1 - a^(k + 1)) / (1 - a) tokens (Leviathan, Kalman and Matias, arXiv 2211.17192, section 3.1, equation 1). Their
    section 3.3 divides this by what the step takes; so does this class, with the sums over rows and measured times.

    The acceptance of a row is estimated from the last steps, and drawn to that of all rows. 0 is a choice. After it,
    drafting is tried again after intervals that double until it gains something, or are long enough for what it costs.
    Drafts that are found in a text need no trial: what they would have come to in a step without drafts is known
    (`learn`).

    A call may get slower by `tolerance` at most: what drafts have lost so far, and what the next ones lose if all are
    rejected, must be less. This is counted for the row that has fewest tokens, because the call ends with it. The
    first `horizon` tokens are taken as generated. So a draft may be shorter at the beginning than later, and in a
    very short call there may be none. Where a model drafts, one that is longer than the shortest leaves enough for the
    shortest: after an unlucky beginning, the call may try again.

    Where nearly all that a model has drafted was accepted, in this call or those before, a draft that is accepted as a
    whole with a probability of 0.85 may lose 4 % in place of the tolerance, and leaves nothing. If the first draft of a
    call is rejected, the acceptance is no longer that high, for the calls that follow, too.

    A beginning that was so unlucky that nothing is left does not end drafts, either: with each token that the row gets,
    another 0.8 % of a plain step may be lost, up to the horizon. Behind it, the tolerance itself grows with the tokens.

    Where drafts are found in a text, rows have theirs at different times, and the row with fewest tokens is another one
    each time. Then half of what rows on the average gain more than it counts, too, up to 8 % of the call. So a batch in
    which one row never has a draft may get slower by a tenth.

    Args:
        costs: of this machine, model and draft; may be kept for the next call.
        rows: of the batch.
        lengths: what k may be, in order, the first of them 0. With ragged costs, k is of all rows together, and the
            most probable tokens are drafted, whatever rows they are of (`shares`).
        acceptance: what is expected at first: `acceptance` of an earlier call, or a guess.
        horizon: how many tokens each row will have, as far as is known.
        tolerance: the part of the time without drafts that may be lost.
    """

    def __init__(
        self,
        costs: Costs,
        rows: int,
        lengths: Sequence[int],
        acceptance: float = 0.7,
        horizon: int = 64,
        tolerance: float = 0.02,
    ) -> None:
        self._costs, self._lengths, self._tolerance, self._horizon = costs, lengths, tolerance, horizon
        self._all = _Acceptance(acceptance * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._rows = [_Acceptance() for _ in range(rows)]
        self._tokens, self._slowest = [0] * rows, 0  # of each row, and of that which has fewest
        # Seconds that drafts have gained for the slowest row, and the part that counts of what others have gained more.
        self._ahead, self._lead = 0.0, 0.0
        self._without = 0.0  # seconds that the tokens of the slowest row would have taken without drafts
        self._plain: float | None = None  # of a step without drafts, where that is not one of the rows that are left
        self._interval, self._waited = _FIRST_INTERVAL, 0

    @property
    def acceptance(self) -> float:
        """Of the last steps and all rows: the probability that a drafted token is accepted if those before are."""
        return self._all.rate

    @property
    def most_gain(self) -> float:
        """What `gain` would be if all tokens were accepted."""
        rows = len(self._rows)
        costs, each = self._costs.steps(rows, self._lengths[-1]), rows if self._costs.is_ragged else 1
        return 1 - min(costs[k] / (k / each + 1) for k in self._lengths) / costs[0]

    @property
    def can_begin(self) -> bool:
        """Whether the shortest draft may be the first round: with few tokens to come, it might lose too much.

        In calls that are slightly too short for that, there would be drafts later on.
        """
        costs = self._costs.steps(len(self._rows), self._lengths[1])
        return costs[self._lengths[1]] - costs[0] <= self._spare(costs[0], are_found=False)

    @property
    def gain(self) -> float:
        """The seconds that drafts have gained so far, as a part of what the tokens would have taken without them."""
        return self._ahead / self._without if self._without else 0.0

    def choose(
        self, rows: Sequence[int], most: int | None = None, available: Sequence[int] | None = None, idle: int = 0
    ) -> int:
        """How many tokens to draft for each of these rows, the unfinished ones; or for all together.

        Args:
            most: no more than this, because the sequences may not become longer.
            available: how many tokens there are for each row, where drafts are made before. Then the next larger length
                serves, and the places that are left over are not looked at.
            idle: rows that need no token: as many more are drafted for all together.
        """
        lengths = [k for k in self._lengths if most is None or k <= most]
        is_nothing_there = available is not None and not any(available)
        if len(lengths) < 2 or not rows or is_nothing_there or self._costs.plain_is_old:
            return 0
        costs = self._costs.steps(len(rows), self._lengths[-1])
        spare = self._spare(costs[0], are_found=available is not None)
        shortest = costs[lengths[1]] - costs[0]
        sure = self._sure(rows) if available is None else 0
        more = self._risk(costs[0])
        if shortest > spare + more * (lengths[1] <= sure):
            return self._probe(lengths[1], costs, spare)
        gains = self._gains(rows, available, idle)
        # Of lengths that are more than enough the first one is.
        lengths = [k for number, k in enumerate(lengths) if number == 0 or lengths[number - 1] < len(gains)]
        expected = sum(self._weights(rows))
        best, fastest = 0, expected / costs[0]
        for before, k in itertools.pairwise(lengths):
            expected += sum(gains[before:k])
            # A longer draft leaves enough for the shortest: else a single unlucky one might be the call's last.
            reserve = shortest if k > lengths[1] and available is None else 0.0
            if costs[k] - costs[0] > (spare + more if k <= sure else spare - reserve):
                break
            if expected > fastest * costs[k]:
                best, fastest = k, expected / costs[k]
        return best if best or available is not None else self._probe(lengths[1], costs, spare)

    def observe(
        self, rows: Sequence[int], k: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float | None = None
    ) -> None:
        """What came of a step.

        Args:
            rows: those of `choose`.
            k: what the step was made for; 0 for a plain one.
            drafted, accepted: tokens of each of these rows.
            seconds: what the step has taken, drafting included; None where nobody has measured it.
        """
        if not rows:
            return
        if seconds is not None:
            self._costs.observe(len(rows), k, seconds)
        costs = self._costs.steps(len(rows), max(k, self._lengths[-1]))
        for row, kept in zip(rows, accepted, strict=True):
            self._tokens[row] += 1 + kept
        before, self._slowest = self._slowest, min(self._tokens[row] for row in rows)
        taken = self._slowest - before
        plain = self._plain or costs[0]
        self._ahead += taken * plain - costs[k] - (0.0 if k else self._costs.idle)
        self._without += taken * plain
        self._lead += _LEAD_COUNTS * (1 + sum(accepted) / len(rows) - taken) * plain
        if not any(drafted):
            return
        trials = [(kept + (kept < count), kept) for count, kept in zip(drafted, accepted, strict=True)]
        made = sum(count for count, _ in trials)
        if (1 + sum(accepted) / len(rows)) * costs[0] > costs[k]:
            self._interval = max(_FIRST_INTERVAL, self._interval // 2)
        self._all.add(made / len(rows), sum(kept for _, kept in trials) / len(rows))
        for row, (count, kept) in zip(rows, trials, strict=True):
            if count:
                self._rows[row].add(count, kept)

    def learn(self, rows: Sequence[int], hits: Sequence[bool | None]) -> None:
        """What drafts would have come to in a step without one.

        Args:
            hits: of each row: whether the first token that was found for it was right; None where none was found.
        """
        known = [(row, hit) for row, hit in zip(rows, hits, strict=True) if hit is not None]
        if known:
            self._all.add(len(known) / len(rows), sum(hit for _, hit in known) / len(rows))
        for row, hit in known:
            self._rows[row].add(1, hit)

    def keep(self, rows: Sequence[int], costs: Costs | None = None, lengths: Sequence[int] | None = None) -> None:
        """Leaves these rows, in this order; the others are forgotten.

        Args:
            costs: of steps from here on, where they are others. Without drafts, steps would have gone on as before.
            lengths: what k may be from here on.
        """
        self._lengths = lengths or self._lengths
        if costs is not None:
            self._plain = self._plain or self._costs.steps(len(self._rows), 0)[0]
            self._costs = costs
        self._rows = [self._rows[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]

    def shares(self, rows: Sequence[int], available: Sequence[int], places: int) -> list[int]:
        """How many tokens each of these rows drafts of those that are available, if they share so many places."""
        return shares([self._rate(row) for row in rows], available, places, self._weights(rows))

    def _rate(self, row: int) -> float:
        known = self._rows[row]
        rate = (known.kept + _SHARED_WEIGHT * self._all.rate) / (known.trials + _SHARED_WEIGHT)
        return min(rate, _MOST_ACCEPTANCE)

    def _weights(self, rows: Sequence[int]) -> list[float]:
        """What a token of each row counts. The call ends with the row that has fewest: others can wait for it."""
        fewest = min((self._tokens[row] for row in rows), default=0)
        return [_AHEAD_COUNTS ** (self._tokens[row] - fewest) if self._costs.is_ragged else 1.0 for row in rows]

    def _gains(self, rows: Sequence[int], available: Sequence[int] | None, idle: int) -> list[float]:
        """What each k adds to the tokens that are expected of a step, from 1 on."""
        rates, most = [self._rate(row) for row in rows], self._lengths[-1]
        if self._costs.is_ragged and available is not None:
            chances = [chance for chance, _ in _chances(rates, available, self._weights(rows))]
            return [sum(chances[: idle + 1]), *chances[idle + 1 :]] if chances else []
        there = [most] * len(rows) if available is None else available
        by_row = list(zip(rates, there, strict=True))
        return [sum(rate**k for rate, count in by_row if count >= k) for k in range(1, max(there, default=0) + 1)]

    def _spare(self, plain: float, are_found: bool) -> float:
        """Seconds that the call may still lose; `are_found`: by drafts that are found in a text."""
        plain = self._plain or plain
        whole, recovered = plain * max(self._slowest, self._horizon), plain * min(self._slowest, self._horizon)
        lead = min(self._lead, _MOST_LEAD * whole) if are_found else 0.0
        return self._ahead + lead + self._tolerance * whole + _RECOVERY * recovered

    def _sure(self, rows: Sequence[int]) -> int:
        """How long a draft may be that all of these rows are expected to accept."""
        rate = math.prod(self._rate(row) for row in rows)
        return int(math.log(_SURE) / math.log(rate)) if rate > _SURE else 0

    def _risk(self, plain: float) -> float:
        """Seconds that the call may lose besides the tolerance by a draft that is expected to be accepted."""
        return max(_MOST_RISK - self._tolerance, 0.0) * (self._plain or plain) * max(self._slowest, self._horizon)

    def _probe(self, k: int, costs: list[float], spare: float) -> int:
        """Steps without drafts: now and then a short one is tried."""
        self._waited += 1
        if self._waited <= self._interval or costs[k] - costs[0] > spare:
            return 0
        enough = max((costs[k] - costs[0]) / (_RECOVERY * (self._plain or costs[0])), _FIRST_INTERVAL)
        self._waited, self._interval = 0, min(2 * self._interval, int(enough), _LAST_INTERVAL)
        # What was known is old. It counts as one trial, so that what is found now decides.
        for known in (self._all, *self._rows):
            known.fade()
        return k


class _Acceptance:
    """Accepted tokens and trials, where the last ones count most. A trial is a token that all before were accepted."""

    def __init__(self, kept: float = 0.0, trials: float = 0.0) -> None:
        self.kept, self.trials = kept, trials

    @property
    def rate(self) -> float:
        return self.kept / self.trials

    def add(self, trials: float, kept: float) -> None:
        self.kept = _DECAY * self.kept + kept
        self.trials = _DECAY * self.trials + trials

    def fade(self) -> None:
        if self.trials > 1:
            self.kept, self.trials = self.kept / self.trials, 1.0


def shares(
    rates: Sequence[float], available: Sequence[int], places: int, weights: Sequence[float] | None = None
) -> list[int]:
    """How many tokens each row drafts, so that most are expected: `places` at the most of all rows together.

    Args:
        rates: of each row: the probability that a drafted token is accepted if those before are.
        available: how many tokens there are for each row.
        weights: what a token of each row counts; 1 by default.
    """
    counts = [0] * len(rates)
    for _, row in _chances(rates, available, weights or [1.0] * len(rates))[:places]:
        counts[row] += 1
    return counts


def _chances(rates: Sequence[float], available: Sequence[int], weights: Sequence[float]) -> list[tuple[float, int]]:
    """That each token is accepted, times what it counts, and whose it is: best first, and those of a row in order."""
    found = [
        (weight * rate ** (place + 1), row)
        for row, (rate, count, weight) in enumerate(zip(rates, available, weights, strict=True))
        for place in range(count)
    ]
    return sorted(found, key=lambda chance: -chance[0])


class Schedule:
    """Transformers' `num_assistant_tokens_schedule`; has the methods of `DraftLength`.

    "heuristic" and "heuristic_transient" add two tokens after a step in which all were accepted, by every row that had
    any, and take one away after any other. All others leave the number as it is, "constant" among them. After a
    "heuristic" call the library writes `length` back for the next one.

    Args:
        length: tokens to draft: `num_assistant_tokens`. These are the library's defaults.
    """

    def __init__(self, length: int = 20, name: str = "constant") -> None:
        self.length, self._adapts = length, name in ("heuristic", "heuristic_transient")

    def choose(
        self, rows: Sequence[int], most: int | None = None, available: Sequence[int] | None = None, idle: int = 0
    ) -> int:
        """As `DraftLength.choose`."""
        limit = self.length if most is None else min(self.length, most)
        if available is not None:
            limit = min(limit, max(available, default=0))
        return max(0, limit) if rows else 0

    def observe(
        self, rows: Sequence[int], k: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float | None = None
    ) -> None:
        """As `DraftLength.observe`."""
        if self._adapts and any(drafted):
            all_accepted = all(kept == count for count, kept in zip(drafted, accepted, strict=True))
            self.length = self.length + 2 if all_accepted else max(1, self.length - 1)


class Pauses:
    """Which calls draft nothing at all, because those before have gained nothing: they are plain calls.

    Within a call, `DraftLength` sees to it that little is lost. But the rounds of a small model take a little longer
    than its plain steps even where nothing is drafted.
    """

    def __init__(self) -> None:
        self._left, self._length = 0, -1

    def pauses(self) -> bool:
        """Whether the call that begins is one of them."""
        self._left -= 1
        return self._left >= 0

    def observe(self, gains: bool) -> None:
        """What came of a call that was none."""
        # The first one may have been disturbed.
        self._length = -1 if gains else min(2 * self._length + 1, MOST_PAUSES) if self._length >= 0 else 0
        self._left = max(self._length, 0)

    def give_up(self) -> None:
        """Drafts cannot gain anything, whatever comes of them: a trial has to wait as long as can be."""
        self._left = self._length = MOST_PAUSES


def _interpolated(table: list[tuple[int, float]], at: int) -> float:
    if len(table) == 1:
        return table[0][1]
    right = min(max(bisect.bisect_left(table, (at,)), 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1 : right + 1]
    # Behind the table it never becomes cheaper than its cheapest entry.
    least = y0 * at / x0 if at < x0 else min(y for _, y in table)
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), least)
