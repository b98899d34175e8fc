"""How many tokens the rounds of a call draft, by what the parts of its step are measured to take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fastgen.decoding.speculation.draft_length import Costs, DraftLength, Schedule, shares
from fastgen.optimizer.transformers.speculation.drafting import Drafting
from fastgen.optimizer.transformers.speculation.times import KEPT

# Which of a step's lengths is drafted as long as it is not known what a round takes.
AT_FIRST = 2
# Accepted at first, of a draft that nothing is known about.
_ACCEPTANCE = 0.7
# A call gains something if it takes less than rounds without drafts by this part: these take a little longer than the
# steps of a plain call.
LEAST_GAIN = 0.07


def costs_of(*steps: Drafting) -> Costs | None:
    """What rounds take, by what is known of these steps; None if that is nothing."""
    known = _tables(*steps)
    return Costs(*known, is_ragged=steps[0].key.draft.is_ragged) if known[0] else None


def most_gain(step: Drafting, plain: float) -> float:
    """`DraftLength.most_gain` by what is known of a step so far. What is not known of drafts takes no time.

    Args:
        plain: seconds of a step of a plain call.
    """
    return _beside_plain(step, plain).most_gain


def can_begin(step: Drafting, plain: float, tokens: int) -> bool:
    """`DraftLength.can_begin` in a call of at most so many tokens; where no check of a draft is known, it can."""
    is_known = any(count > step.key.rows for count in _tables(step)[0])
    return not is_known or _beside_plain(step, plain, tokens).can_begin


def _beside_plain(step: Drafting, plain: float, tokens: int = 1) -> DraftLength:
    """Of a call with all rows of the step that begins, by what is known of the step and of those of plain calls."""
    verify, draft = _tables(step)
    rows = step.key.rows
    costs = _StepCosts(step, {**verify, rows: plain}, draft, plain_is_given=True)
    return DraftLength(costs, rows, step.lengths, horizon=tokens)


def _tables(*steps: Drafting) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of checks by their number of tokens, and of a draft of one token by rows: the tables of `Costs`.

    Those of checks that have not run for long are left out: what they take follows from the others.
    """
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    for step in steps:
        for part in step.times:
            if (found := step.seconds(part)) is not None and not step.is_old(part):
                (verify if part else draft)[step.tokens_of(part - 1) if part else step.key.rows] = found
    return verify, draft


def _seconds_of_round(step: Drafting, length: int) -> float | None:
    """With what the host does between the parts: a plain call has no such rounds."""
    seconds = step.seconds_of_round(length)
    if seconds is None or step.is_old(length + 1):
        return None
    return seconds + (statistics.median(step.host_times) if step.host_times else 0.0)


class _StepCosts(Costs):
    """A step works on all of its rows, those that are finished too.

    Args:
        verify, draft: as of `Costs`.
        plain_is_given: by plain calls. A round without a draft would not say more about it.
    """

    def __init__(self, step: Drafting, verify: dict[int, float], draft: dict[int, float], plain_is_given: bool) -> None:
        super().__init__(verify, draft, is_ragged=step.key.draft.is_ragged)
        self._all_rows, self._plain_is_given = step.key.rows, plain_is_given

    @property
    def plain_is_old(self) -> bool:
        return not self._plain_is_given and super().plain_is_old

    def observe(self, rows: int, k: int, seconds: float) -> None:
        if k or not self._plain_is_given:  # or the shortest draft might count as corrected, too
            super().observe(rows, k, seconds)

    def _table(self, rows: int, most: int) -> list[float]:
        return super()._table(self._all_rows, most)

    def _correction(self, k: int) -> float:
        """What rounds with a draft are measured to take says nothing about plain calls."""
        return 1.0 if k == 0 and self._plain_is_given else super()._correction(k)


def _lengths_of(step: Drafting) -> list[int]:
    """Those that rounds of a step may draft now."""
    return [length for length in step.lengths if not length or step.serves(length)]


class Pace:
    """Chooses how many tokens to draft.

    At first a few rounds measure what the parts of the step take. From then on `DraftLength` chooses.

    Args:
        tokens: that each row may get, at the most.
        has_model: the draft takes time.
        schedule: chooses instead, where the user has set one.
        plain: seconds of a step of a plain call; None where nobody has measured it. A round without a draft counts for
            it then, which takes a little longer.
    """

    def __init__(
        self,
        step: Drafting,
        rows: int,
        tokens: int,
        has_model: bool,
        schedule: Schedule | None = None,
        plain: float | None = None,
    ) -> None:
        self._rows, self._tokens, self._has_model, self._plain = rows, tokens, has_model, plain
        self._chooser: DraftLength | Schedule | None = schedule
        self._costs: Costs | None = None  # that it began with
        self._early: list[tuple[Sequence[int], int, Sequence[int], Sequence[int]]] = []  # rounds before there was one
        self._has_measured = self._was_hopeless = False
        self._rounds_without = 0  # since there are costs
        self._steps = [step]  # of the call so far
        self._lengths = _lengths_of(step)
        self._set_up(step)

    def choose(self, step: Drafting, rows: Sequence[int], most: int, available: Sequence[int] | None = None) -> int:
        """Tokens to draft for the rows that are not finished: one of the step's lengths.

        Args:
            most: no more than this.
            available: how many there are for each of the rows, where they are there already. Then the next larger
                length serves, and the places that are left over are not looked at.
        """
        if self._chooser is None:
            self._set_up(step)
        if available is not None and not any(available):
            return 0
        if self._chooser is None:
            chosen = 0 if self._is_known(step) else step.lengths[AT_FIRST]
        else:
            at_most = None if step.key.draft.is_ragged else most
            chosen = self._chooser.choose(rows, at_most, available, idle=step.key.rows - len(rows))
        if step.key.draft.is_ragged:
            return chosen
        lengths = [length for length in self._lengths if length <= most]
        if available is None:
            found = max((length for length in lengths if length <= chosen), default=0)
            return found or max(lengths[:2], default=0) * (chosen > 0)  # a schedule may say fewer
        chosen = min(chosen, max(available, default=0))
        return min((length for length in lengths if length >= chosen), default=max(lengths, default=0))

    def shares(self, step: Drafting, rows: Sequence[int], available: Sequence[int], length: int) -> list[int]:
        """How many tokens of each row are drafted in a ragged check of `length` drafted tokens."""
        places = step.tokens_of(length) - len(rows)
        if isinstance(self._chooser, DraftLength):
            return self._chooser.shares(rows, available, places)
        return shares([_ACCEPTANCE] * len(rows), available, places)

    def observe(
        self, step: Drafting, rows: Sequence[int], length: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What came of a round that drafted `length` tokens, of single rows maybe fewer."""
        if self._chooser is None:
            self._early.append((rows, length, drafted, accepted))
            self._has_measured = True
            return
        if not length and self._costs is not None:
            if self._rounds_without % KEPT == 0:  # the median of the last KEPT rounds, asked for once in as many
                self._costs.idle = self._idle(step)
            self._rounds_without += 1
        # Not what this round took: something else may have run on the machine meanwhile.
        self._chooser.observe(rows, length, drafted, accepted, self._seconds(step, length))
        if isinstance(self._chooser, DraftLength):
            step.acceptance = self._chooser.acceptance

    def learn(self, step: Drafting, rows: Sequence[int], hits: Sequence[bool | None]) -> None:
        """As `DraftLength.learn`, of a round that has drafted nothing."""
        if isinstance(self._chooser, DraftLength):
            self._chooser.learn(rows, hits)
            step.acceptance = self._chooser.acceptance

    def keep(self, step: Drafting, rows: Sequence[int]) -> None:
        """These rows go on in `step`, which has no others. What is not known of it follows from those before.

        In a plain call all rows would have gone on. But what to draft is compared with a round of this step without it.
        """
        self._was_hopeless = self.is_hopeless  # of the whole batch, which calls are paused for
        self._rows, self._plain, self._early, self._costs = len(rows), None, [], None
        self._steps.append(step)
        self._lengths = _lengths_of(step)
        if isinstance(self._chooser, DraftLength):
            self._chooser.keep(rows, _StepCosts(step, *_tables(*self._steps), plain_is_given=False), self._lengths)

    @property
    def is_hopeless(self) -> bool:
        """Whether calls would not take less time than plain ones if all that is drafted were accepted."""
        if len(self._steps) > 1:
            return self._was_hopeless
        # With all lengths: those that cannot be drafted yet will be in later calls.
        if self._costs is None:
            return False
        return DraftLength(self._costs, self._rows, self._steps[0].lengths).most_gain < LEAST_GAIN

    def gains(self) -> bool | None:
        """Whether the call has taken less time than a plain one; None if nobody knows, as in one that has measured."""
        if not isinstance(self._chooser, DraftLength) or self._has_measured:
            return None
        return self._chooser.gain >= LEAST_GAIN

    def _is_known(self, step: Drafting) -> bool:
        """Whether it is known what a round of the first kind takes."""
        check = step.lengths[AT_FIRST] + 1
        parts = (check, 0) if self._has_model else (check,)
        return all(step.seconds(part) is not None for part in parts)

    def _seconds(self, step: Drafting, length: int) -> float | None:
        """What a round takes that drafts `length` tokens; without a draft, a step of a plain call."""
        if not length:
            return step.seconds(1) if self._plain is None else self._plain
        return _seconds_of_round(step, length)

    def _idle(self, step: Drafting) -> float:
        """What a round without a draft takes longer than a step of a plain call: no more than what the host does.

        The check itself takes as long as the step. Measured in other calls, the two may differ by more, which is not
        counted.
        """
        check = step.seconds(1)
        if check is None or self._plain is None or not step.host_times:
            return 0.0
        host = statistics.median(step.host_times)
        return min(host, max(check + host - self._plain, 0.0))

    def _set_up(self, step: Drafting) -> None:
        plain = self._seconds(step, 0)
        if self._chooser is not None or not self._is_known(step) or plain is None:
            return
        verify, draft = _tables(step)
        verify[step.key.rows] = plain
        acceptance = _ACCEPTANCE if step.acceptance is None else step.acceptance
        self._costs = _StepCosts(step, verify, draft, self._plain is not None)
        self._chooser = DraftLength(self._costs, self._rows, self._lengths, acceptance, horizon=self._tokens)
        for early in self._early:
            self._chooser.observe(*early)
