"""Times of draft-verify iterations, from timings of their parts: the basis of the draft-length policy."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence

from fastgen.decoding.retrying import BackOff

# Parts besides verifies, which are identified by their number of positions: a draft step, and the host's work.
DRAFT, HOST = 0, -100
# The latest timings of a part in a call, of which the median is taken; the number that is enough for one, because the
# first run of a part is slow; and calls whose medians are kept. The least median counts, as only disturbances add time.
_KEPT, _ENOUGH, _CALLS = 16, 2, 4
# Calls until a verify that was not chosen is timed again: at first, and at most.
_FIRST_CALLS, _MOST_CALLS = 2, 64
# The assumed acceptance rate of a draft of which nothing is known.
_ACCEPTANCE = 0.7


class _Timings:
    """Seconds of the last runs of a part."""

    def __init__(self) -> None:
        self._of_this_call: deque[float] = deque(maxlen=_KEPT)
        self._of_calls: deque[float] = deque(maxlen=_CALLS)  # medians
        self.has_run = self.is_old = False  # has run in this call; has not run for long
        self._back_off, self._was_old = BackOff(_FIRST_CALLS, _MOST_CALLS), False

    def add(self, seconds: float) -> None:
        self._of_this_call.append(seconds)
        self.has_run = True
        self.is_old &= len(self._of_this_call) < _ENOUGH

    def seconds(self) -> float | None:
        """Returns the least of the medians of some calls; None while there are too few timings."""
        return min([*self._of_calls, *self._medians()], default=None)

    def begin_call(self, other_parts_ran: bool) -> None:
        """Begins another call. Timings of a part that runs seldom are collected over several calls."""
        if self._medians():
            (self._back_off.fail if self._was_old else self._back_off.succeed)()
            self._of_calls.extend(self._medians())
            self._of_this_call.clear()
        elif other_parts_ran and not self.is_old:
            self.is_old = not self._back_off.waits()
        self._was_old, self.has_run = self.is_old, False

    def _medians(self) -> list[float]:
        found = sorted(self._of_this_call)
        return [found[(len(found) - 1) // 2]] if len(found) >= _ENOUGH else []


class Costs:
    """Times of a step's iterations, from the medians of their parts; and the acceptance rate of its drafts.

    The time of a verify that was never timed is interpolated from those of other numbers of tokens. So is that of a
    verify that calls have not used for long: it may have been timed on a busy machine, and would never run again.

    Attributes:
        plain: seconds of a plain call's step; None if it was not timed, and a verify of one position is used instead.
        acceptance: the probability that a drafted token is accepted if those before are, in the last iterations.
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
        self.only_timed = False
        self._larger: Costs | None = None
        self.forget()

    def forget(self) -> None:
        """Drops all timings, because the machine may have been busy."""
        self._parts: dict[int, _Timings] = {}
        self.short_calls = 0

    def add(self, part: int, seconds: float) -> None:
        """Notes the seconds of a part: a verify of this many positions, `DRAFT` or `HOST`."""
        self._parts.setdefault(part, _Timings()).add(seconds)

    def begin_call(self) -> None:
        """Begins another call. A verify of drafted tokens was missed if another one has run in the last call."""
        has_drafted = any(part > 1 and known.has_run for part, known in self._parts.items())
        # If no plain call times a step without a draft, a verify of one position can be missed, too.
        first = 1 if self.plain is None else 2
        for part, known in self._parts.items():
            known.begin_call(has_drafted and part >= first)

    def follow(self, larger: Costs) -> None:
        """Uses the costs of a larger step, which this step continues, for everything that is not known yet."""
        self._larger, self.acceptance = larger, larger.acceptance

    def seconds(self, part: int) -> float | None:
        """Returns the median of a part; None while there are too few timings."""
        return self._parts[part].seconds() if part in self._parts else None

    def allows(self, length: int) -> bool:
        """Whether iterations may draft this many tokens."""
        return not (length and self.only_timed) or self.seconds(length + 1) is not None

    def knows(self, has_model: bool) -> bool:
        """Whether the times of a draft and of its verify are known."""
        return max(self._verifies(), default=0) > self.rows and (not has_model or self._draft() is not None)

    def baseline(self) -> float | None:
        """Returns the seconds of an iteration without a draft, as in a plain call; None if they are not known."""
        return self._verifies().get(self.rows)

    def iterations(self) -> dict[int, float]:
        """Returns the seconds of iterations by the number of drafted tokens; empty while no verify was timed."""
        verifies = self._verifies()
        if not verifies:
            return {}
        draft, host, own = self._draft() or 0.0, self.seconds(HOST) or 0.0, self.seconds(1)
        found = {k: _interpolated(verifies, self._positions(k)) + k * draft + host for k in self.lengths}
        # An iteration without a draft and a plain step differ only by the host's work. Any other difference is noise.
        found[0] -= host if self.plain is None or own is None else min(max(self.plain - own, 0.0), host)
        return found

    def estimate(self, rows: int, length: int) -> float:
        """Returns the estimated seconds of an iteration of a step with fewer rows."""
        verify, host = _interpolated(self._verifies(), self._positions(length, rows)), self.seconds(HOST) or 0.0
        return verify + length * (self._draft() or 0.0) + host

    def most_gain(self) -> float:
        """Returns the part of a plain call's time that drafts would save if all tokens were accepted."""
        of, each = self.iterations(), self.rows if self.is_ragged else 1
        return 1 - min(of[k] / (k / each + 1) for k in self.lengths[1:]) / self._verifies()[self.rows]

    def _positions(self, length: int, rows: int | None = None) -> int:
        rows = rows or self.rows
        return rows + length if self.is_ragged else rows * (length + 1)

    def _draft(self) -> float | None:
        own = self.seconds(DRAFT)
        return self._larger._draft() if own is None and self._larger is not None else own

    def _verifies(self) -> dict[int, float]:
        """Returns the seconds of verifies by their number of tokens."""
        found = {} if self._larger is None else self._larger._verifies()
        for part, known in self._parts.items():
            if part > 0 and not known.is_old and (seconds := known.seconds()) is not None:
                found[self.rows + part - 1 if self.is_ragged else self.rows * part] = seconds
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
