"""Decides which waiting requests run together: the oldest and those whose lengths make a call with it cheap.

Requests of a group are sorted by length and cut into the batches of the least total cost, using costs of whole calls
(Algorithm 2 of Fang et al., "TurboTransformers", PPoPP 2021). The batch with the oldest request runs; the others are
planned again, together with new requests. Requests that enter slots wait until enough slots are free. Costs decide
which requests share a batch, never their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import accumulate

from fastgen import memory
from fastgen.engine.requests import Request
from fastgen.partition import cheapest

# Fixed cost of a decode step, in positions of a prefill: it reads all weights for a few tokens.
STEP = 16
# Fixed cost of a call, in positions.
CALL = 256
# Planning considers at most this many batches of waiting requests, because it takes time itself.
WINDOW = 16
# Fixed seconds of a prefill and of a decode step, and bytes of weights that a decode step reads in a second. They are
# not measured: which requests run next may depend on the requests only.
_PREFILL_SECONDS, _STEP_SECONDS, _BYTES_PER_SECOND = 0.025, 0.001, 1.5e10
# New tokens of a request that `Arrivals` assumes.
_NEW_TOKENS = 64
# This fraction of the slots is enough for the prefill of a few requests.
_FEW = 0.25
# A request waits for others at most this many steps; with a backlog, as long as this many prefills take, if that is
# more.
_LONGEST_WAIT, _PREFILLS_TO_WAIT = 8, 4
# A prefill group in which this many requests were declined, and none has entered, is not tried again. A single one may
# be declined for a reason of its own, such as its length.
_MOST_DECLINED = 3
# Weight of the latest call in the moving average of calls like it.
_LATEST = 0.25


class Costs:
    """The cost of a call, by its longest input, its rows, and its limit of new tokens.

    Keeps a table of measured seconds; for a call unlike all measured ones, uses a cost model, scaled to seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, ...], float] = {}
        self._of_model: float | None = None  # average seconds per unit of the cost model

    def of(self, length: int, rows: int, new_tokens: int) -> float:
        """Returns the cost of such a call: in seconds once a call has been measured."""
        measured = self._seconds.get(_like(length, rows, new_tokens))
        return _modelled(length, rows, new_tokens) * (self._of_model or 1.0) if measured is None else measured

    def note(self, length: int, rows: int, new_tokens: int, seconds: float) -> None:
        """Records that such a call took this long."""
        shape = _like(length, rows, new_tokens)
        self._seconds[shape] = mean(self._seconds.get(shape), seconds)
        self._of_model = mean(self._of_model, seconds / _modelled(length, rows, new_tokens))

    def note_call(self, batch: Sequence[Request], seconds: float) -> None:
        """Records that a call for these requests took this long."""
        rows, most = sum(each.rows for each in batch), max(each.new_tokens or 0 for each in batch)
        self.note(max(each.length for each in batch), rows, most, seconds)


class Arrivals:
    """Decides when waiting requests enter slots: a prefill takes about as long for a few requests as for one.

    Args:
        slots: rows of a step.
        weight_bytes: bytes of the model's weights.
    """

    def __init__(self, slots: int, weight_bytes: int) -> None:
        prefill = 1 + _PREFILL_SECONDS / (_STEP_SECONDS + weight_bytes / _BYTES_PER_SECOND)  # in steps
        # The step waits for k of n slots to be free. If a request takes t steps, half of the k slots idle on average,
        # and a prefill costs p steps, a request costs t / (n - k / 2) / 2 for idle slots, and p / k for its prefill.
        # The sum is least at k = n r / (1 + r / 2), where r = 2 sqrt(p / t).
        ratio = 2 * math.sqrt(prefill / _NEW_TOKENS)
        self._enough = slots * min(ratio / (1 + ratio / 2), 1.0)  # free slots
        self._enough_for_few = min(self._enough, _FEW * slots)
        self._longest = max(_LONGEST_WAIT, _PREFILLS_TO_WAIT * prefill)
        self._waited = math.inf  # steps since the last prefill, while others waited

    def has_come(self, free: int, rows: int, runs: bool) -> bool:
        """Whether requests enter now. Called after each step while some wait.

        Args:
            free: number of free slots.
            rows: rows that the waiting requests need.
            runs: whether other requests are in slots.
        """
        self._waited = self._waited + 1 if runs else math.inf
        is_backlog = rows >= self._enough  # otherwise, there are no others to wait with
        enough = self._enough if is_backlog else self._enough_for_few
        return free >= enough or self._waited >= (self._longest if is_backlog else _LONGEST_WAIT)

    def note(self, has_all: bool) -> None:
        """Records that requests enter. Unless `has_all` of those chosen enter, the remaining ones need not wait."""
        self._waited = 0 if has_all else math.inf


class Entered:
    """Whether requests enter slots, judged by earlier requests of their prefill group."""

    def __init__(self) -> None:
        self._may: dict[Hashable, bool] = {}
        self._declined: dict[Hashable, int] = {}

    def may(self, prefill_group: Hashable) -> bool:
        """Whether a request may enter, as far as is known."""
        return self._may.get(prefill_group, True)

    def has(self, prefill_group: Hashable) -> bool:
        """Whether a request of the group has entered."""
        return self._may.get(prefill_group, False)

    def note(self, prefill_group: Hashable, may_enter: bool) -> None:
        """Records that a request has entered, or that others of the group cannot."""
        if prefill_group is not None:
            memory.limit(self._may)
            self._may[prefill_group] = may_enter

    def note_declined(self, prefill_group: Hashable) -> None:
        """Records that the call of a request that was to enter ran to its end."""
        if prefill_group is None:
            return
        memory.limit(self._declined)
        self._declined[prefill_group] = self._declined.get(prefill_group, 0) + 1
        if self._declined[prefill_group] >= _MOST_DECLINED and prefill_group not in self._may:
            self.note(prefill_group, False)


def _modelled(length: int, rows: int, new_tokens: int) -> float:
    return CALL + rows * length + new_tokens * (STEP + rows)


def _like(*numbers: int) -> tuple[int, ...]:
    """Rounds numbers up to three significant bits, so that those that differ by less than about a fifth are equal."""
    steps = [1 << max(number.bit_length() - 3, 0) for number in numbers]
    return tuple(-(-number // step) * step for number, step in zip(numbers, steps, strict=True))


def mean(before: float | None, now: float) -> float:
    """Returns the moving average after another value."""
    return now if before is None else (1 - _LATEST) * before + _LATEST * now


def batches(
    lengths: Sequence[int], most: Callable[[int], int], cost: Callable[[int, int, int], float]
) -> list[list[int]]:
    """Cuts inputs of these lengths into the batches of the least total cost: indices into `lengths`, shortest first.

    Args:
        most: the most inputs of a batch, by its longest one.
        cost: the cost of a batch, by its longest input, its number of inputs, and the tokens of all of them.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    rising = [lengths[index] for index in order]
    before = [0, *accumulate(rising)]  # tokens of all shorter inputs
    groups = cheapest(
        range(1, len(order) + 1),
        lambda end: range(max(0, end - most(rising[end - 1])), end),
        lambda start, end: cost(rising[end - 1], end - start, before[end] - before[start]),
    )[1]
    return [order[start:end] for start, end in groups]


def oldest_batch(
    lengths: Sequence[int], most: Callable[[int], int], cost: Callable[[int, int, int], float]
) -> list[int]:
    """Returns the batch of `batches` that contains the first input, which has waited the longest."""
    return next(batch for batch in batches(lengths, most, cost) if 0 in batch)


def next_batch(waiting: Sequence[Request], most_rows: int, costs: Costs) -> list[Request]:
    """Returns the requests to run now, from those that may share a batch with the first one, which is among them.

    Args:
        waiting: requests in order of arrival.
        most_rows: limit of rows of a batch.
    """
    rows, new_tokens = waiting[0].rows, waiting[0].new_tokens or 0
    most = most_rows // rows
    window = waiting[: WINDOW * most]
    cost = cache(lambda length, inputs: costs.of(length, inputs * rows, new_tokens))
    lengths = [request.length for request in window]
    chosen = oldest_batch(lengths, lambda length: most, lambda length, inputs, _: cost(length, inputs))
    return [window[index] for index in chosen]
