"""Which waiting requests run together: those whose lengths make a call cheap, the oldest among them.

Requests of a group are sorted by length and cut into the batches that cost least, by the costs of whole calls
(Algorithm 2 of Fang et al., "TurboTransformers", PPoPP 2021). The batch with the oldest request runs; the others are
planned again, with what has come meanwhile. Those that enter slots wait until enough are free. Costs decide which
requests share a batch, never what a request gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import accumulate

from fastgen import caches
from fastgen.engine.requests import Request
from fastgen.partition import cheapest

# What a decode step costs beside its rows, in positions of a prefill: it reads all weights for a few tokens.
STEP = 16
# What a call costs beside that, in positions.
CALL = 256
# So many batches of waiting requests are looked at: planning takes time, too.
WINDOW = 16
# What a prefill takes beside computing, and a decode step beside its weights, in seconds; and bytes of weights in one.
# No clock says so: which requests run next may depend on nothing else than requests.
_PREFILL_SECONDS, _STEP_SECONDS, _BYTES_PER_SECOND = 0.025, 0.001, 1.5e10
# New tokens of a request, as far as this is concerned.
_NEW_TOKENS = 64
# This part of the slots is enough for a prefill of few requests.
_FEW = 0.25
# A request waits for others for so many steps at the most; where enough of them wait, for so many prefills.
_LONGEST_WAIT, _PREFILLS_TO_WAIT = 8, 4
# So many requests of a prefill group have to be declined until others are not tried: it may be a matter of one request,
# as its length.
_MOST_DECLINED = 3
# The part of the latest call in the mean of those like it.
_LATEST = 0.25


class Costs:
    """What a call costs, by its longest input, its rows, and the new tokens that it may have.

    A table of seconds that calls have taken; for those like none of them, a model of a call, in the same unit.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, ...], float] = {}
        self._of_model: float | None = None  # seconds of a unit of the model, on average

    def of(self, length: int, rows: int, new_tokens: int) -> float:
        """The cost of such a call, in seconds once there has been a call."""
        measured = self._seconds.get(_like(length, rows, new_tokens))
        return _modelled(length, rows, new_tokens) * (self._of_model or 1.0) if measured is None else measured

    def note(self, length: int, rows: int, new_tokens: int, seconds: float) -> None:
        """Such a call took so long."""
        shape = _like(length, rows, new_tokens)
        self._seconds[shape] = mean(self._seconds.get(shape), seconds)
        self._of_model = mean(self._of_model, seconds / _modelled(length, rows, new_tokens))

    def note_call(self, batch: Sequence[Request], seconds: float) -> None:
        """A call for these requests took so long."""
        rows, most = sum(each.rows for each in batch), max(each.new_tokens or 0 for each in batch)
        self.note(max(each.length for each in batch), rows, most, seconds)


class Arrivals:
    """When requests enter that wait for slots: a prefill takes about as long for a few of them as for one.

    Args:
        slots: rows of a step.
        weight_bytes: of the model.
    """

    def __init__(self, slots: int, weight_bytes: int) -> None:
        prefill = 1 + _PREFILL_SECONDS / (_STEP_SECONDS + weight_bytes / _BYTES_PER_SECOND)  # in steps
        # Of n slots, k are waited for. Where requests take t steps, half of each for no row, a request takes
        # t / (n - k / 2) / 2 for that, and p / k for its prefill: least at k = n r / (1 + r / 2), r = 2 sqrt(p / t).
        ratio = 2 * math.sqrt(prefill / _NEW_TOKENS)
        self._enough = slots * min(ratio / (1 + ratio / 2), 1.0)  # free slots
        self._enough_for_few = min(self._enough, _FEW * slots)
        self._longest = max(_LONGEST_WAIT, _PREFILLS_TO_WAIT * prefill)
        self._waited = math.inf  # steps since the last prefill, while others waited

    def has_come(self, free: int, rows: int, runs: bool) -> bool:
        """Whether requests enter now. Asked behind each step while some wait.

        Args:
            free: slots.
            rows: that requests wait for.
            runs: there are others in slots.
        """
        self._waited = self._waited + 1 if runs else math.inf
        is_backlog = rows >= self._enough  # or there are none to wait with
        enough = self._enough if is_backlog else self._enough_for_few
        return free >= enough or self._waited >= (self._longest if is_backlog else _LONGEST_WAIT)

    def note(self, has_all: bool) -> None:
        """Requests enter; not `has_all` of those that were to: the others are not to wait."""
        self._waited = 0 if has_all else math.inf


class Entered:
    """Whether requests enter slots, by what has come of others of their prefill group."""

    def __init__(self) -> None:
        self._may: dict[Hashable, bool] = {}
        self._declined: dict[Hashable, int] = {}

    def may(self, prefill_group: Hashable) -> bool:
        """Whether one may enter, as far as is known."""
        return self._may.get(prefill_group, True)

    def has(self, prefill_group: Hashable) -> bool:
        """Whether one has entered."""
        return self._may.get(prefill_group, False)

    def note(self, prefill_group: Hashable, may_enter: bool) -> None:
        """One has entered, or others cannot."""
        if prefill_group is not None:
            caches.limit(self._may)
            self._may[prefill_group] = may_enter

    def note_declined(self, prefill_group: Hashable) -> None:
        """The call of one that was to enter has run to its end."""
        if prefill_group is None:
            return
        caches.limit(self._declined)
        self._declined[prefill_group] = self._declined.get(prefill_group, 0) + 1
        if self._declined[prefill_group] >= _MOST_DECLINED and prefill_group not in self._may:
            self.note(prefill_group, False)


def _modelled(length: int, rows: int, new_tokens: int) -> float:
    return CALL + rows * length + new_tokens * (STEP + rows)


def _like(*numbers: int) -> tuple[int, ...]:
    """The same for numbers that differ by less than about a fifth: rounded up to three bits."""
    steps = [1 << max(number.bit_length() - 3, 0) for number in numbers]
    return tuple(-(-number // step) * step for number, step in zip(numbers, steps, strict=True))


def mean(before: float | None, now: float) -> float:
    """The moving average of costs, with the latest one."""
    return now if before is None else (1 - _LATEST) * before + _LATEST * now


def batches(
    lengths: Sequence[int], most: Callable[[int], int], cost: Callable[[int, int, int], float]
) -> list[list[int]]:
    """Inputs of these lengths, cut into the batches that cost least together: indices into `lengths`, shortest first.

    Args:
        most: inputs of a batch, by its longest one.
        cost: of a batch, by its longest input, its number of inputs, and the tokens of all of them.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    rising = [lengths[index] for index in order]
    before = [0, *accumulate(rising)]  # tokens of all inputs before
    groups = cheapest(
        range(1, len(order) + 1),
        lambda end: range(max(0, end - most(rising[end - 1])), end),
        lambda start, end: cost(rising[end - 1], end - start, before[end] - before[start]),
    )[1]
    return [order[start:end] for start, end in groups]


def oldest_batch(
    lengths: Sequence[int], most: Callable[[int], int], cost: Callable[[int, int, int], float]
) -> list[int]:
    """That of `batches` with the first input, which has waited the longest."""
    return next(batch for batch in batches(lengths, most, cost) if 0 in batch)


def next_batch(waiting: Sequence[Request], most_rows: int, costs: Costs) -> list[Request]:
    """The requests to run now, of those that may share a batch with the first one; that is among them.

    Args:
        waiting: in the order in which they came.
        most_rows: rows of a batch.
    """
    rows, new_tokens = waiting[0].rows, waiting[0].new_tokens or 0
    most = most_rows // rows
    window = waiting[: WINDOW * most]
    cost = cache(lambda length, inputs: costs.of(length, inputs * rows, new_tokens))
    lengths = [request.length for request in window]
    chosen = oldest_batch(lengths, lambda length: most, lambda length, inputs, _: cost(length, inputs))
    return [window[index] for index in chosen]
