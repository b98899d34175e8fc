"""Decides what runs together: which waiting requests (`next_batch`), when they enter slots (`Arrivals`, `Entered`),
how many fit into the memory (`KVBudget`), and what is drafted for them (`Drafts`).

Requests of a group are sorted by length and cut into the batches of the least total cost, using costs of whole calls
(Algorithm 2 of Fang et al., "TurboTransformers", PPoPP 2021). The batch with the oldest request runs; the others are
planned again, together with new requests. Requests that enter slots wait until enough slots are free. Costs decide
which requests share a batch, never their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache
from itertools import accumulate

from fastgen import memory
from fastgen.decoding.speculation.draft_sources import BOUNDARY
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding, Kind
from fastgen.optimizer.transformers.captured.key import Prompt
from fastgen.optimizer.transformers.captured.slot import Chances, Slot, SlotDrafts, StepSeconds
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
_MOST_DECLINED, _HAS_ENTERED = 3, -1
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
        self._declined: dict[Hashable, int] = {}  # how many in a row: before any has entered

    def may(self, prefill_group: Hashable) -> bool:
        """Whether a request may enter, as far as is known."""
        return self._declined.get(prefill_group, 0) < _MOST_DECLINED

    def has(self, prefill_group: Hashable) -> bool:
        """Whether a request of the group has entered."""
        return self._declined.get(prefill_group) == _HAS_ENTERED

    def note(self, prefill_group: Hashable, may_enter: bool) -> None:
        """Records that a request has entered, or that others of the group cannot."""
        self._put(prefill_group, _HAS_ENTERED if may_enter else _MOST_DECLINED)

    def note_declined(self, prefill_group: Hashable) -> None:
        """Records that the call of a request that was to enter ran to its end."""
        if not self.has(prefill_group):
            self._put(prefill_group, self._declined.get(prefill_group, 0) + 1)

    def _put(self, prefill_group: Hashable, declined: int) -> None:
        if prefill_group is not None:
            memory.limit(self._declined)
            self._declined[prefill_group] = declined


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
    chosen = oldest_batch(lengths, lambda _: most, lambda length, inputs, _: cost(length, inputs))
    return [window[index] for index in chosen]


# A request enters if its prompt and this many tokens of each row fit: most requests end before their limit.
RESERVED = 32


class ExceedsBudget(MemoryError):
    """A request may need more than the whole budget."""


class KVBudget:
    """A byte budget, and the bytes that positions and rows take. Without a limit, everything fits.

    Args:
        most_bytes: limit for K and V, and states, of all requests in slots.
        has_encoder: inputs are those of cross-attention.

    Attributes:
        peak: the most bytes stored so far.
    """

    def __init__(self, most_bytes: int | None, has_encoder: bool) -> None:
        self.most_bytes, self.peak, self._has_encoder = most_bytes, 0, has_encoder
        self._is_known = False
        self._own = self._cross = self._states = 0  # bytes of a position, and of a row
        self._before = 0  # the most positions of pictures before the tokens so far
        self._source = self._beside = 0  # the most positions of a source without tokens, and of one besides its tokens

    def note(self, prompt: Prompt, request: Request) -> None:
        """Records the bytes of a position in self- and cross-attention, the bytes of a row's states, and the positions
        of images and audio. `request`: the longest of those that have been prefilled together.
        """
        if request.has_other_inputs and not self._has_encoder:
            self._before = max(self._before, prompt.cached - request.prompt_positions)
        source = prompt.sizes.source
        if request.tokens is None:
            self._source = max(self._source, source)
        elif request.has_other_inputs:
            self._beside = max(self._beside, source - request.length)
        self._own, self._cross = prompt.bytes_per_position
        self._states = prompt.bytes_of_states
        self._is_known = True

    def has_room(self, stored: int) -> bool:
        """Whether this many bytes may be stored."""
        return self.most_bytes is None or stored <= self.most_bytes

    def stored(self, slots: Iterable[Slot]) -> int:
        """Returns the bytes that these slots store."""
        found = sum(map(self._stored, slots))
        self.peak = max(self.peak, found)
        return found

    def of_a_step(self, slots: Iterable[Slot]) -> int:
        """Returns the bytes that the next decode step adds for these slots."""
        return sum(slot.owner.rows for slot in slots) * self._own

    def drafted(self, slots: Collection[Slot]) -> int | None:
        """Returns how many draft tokens the next decode step of these slots may store besides; None for no limit. A
        draft never preempts a request.
        """
        if self.most_bytes is None or not self._own:
            return None
        return max(self.most_bytes - self.stored(slots) - self.of_a_step(slots), 0) // self._own

    def needed(self, request: Request, new_tokens: int, prompt: Prompt | None = None) -> int:
        """Returns the bytes of a request with `new_tokens` in each row, or fewer if it allows fewer. The sizes of its
        images and audio are estimated from those of others before a prefill has made its `prompt`.
        """
        own, source = request.prompt_positions, 0
        if self._has_encoder:
            own, source = request.start_positions, request.length
        if prompt is not None and prompt.inputs == 1:
            own, source = prompt.cached, prompt.sizes.source
        elif request.tokens is None:
            own, source = own + self._before, self._source
        elif request.has_other_inputs:
            own, source = own + self._before, source + self._beside
        most = new_tokens if request.new_tokens is None else min(new_tokens, request.new_tokens)
        return (own + request.rows * most) * self._own + source * self._cross + request.rows * self._states

    def fitting(self, batch: Iterable[Request], oldest: Request, others: Collection[Slot]) -> list[Request]:
        """Returns the requests of a batch that fit beside others, oldest first; at least that one if it is alone."""
        stored, chosen = self.stored(others), list[Request]()
        for slot in others:  # what requests that cannot be preempted may yet store
            if not slot.owner.may_begin_again:
                stored += max(slot.most_bytes - self._stored(slot), 0)
        for request in sorted(batch, key=lambda each: each is not oldest):
            # A request that cannot be preempted gets all of its room at once.
            most = RESERVED if request.may_begin_again else request.new_tokens
            stored += self.needed(request, RESERVED if most is None else most)
            if not self.has_room(stored) and (chosen or others):
                break
            chosen.append(request)
            if self.most_bytes is not None and not self._is_known:
                break
        return chosen

    def to_begin_again(self, running: Sequence[Slot]) -> Slot | None:
        """Returns the latest preemptible request if the next step would exceed the budget; otherwise None."""
        if self.has_room(self.stored(running) + self.of_a_step(running)) or len(running) == 1:
            return None
        return next((slot for slot in reversed(running) if slot.owner.may_begin_again), None)

    def _stored(self, slot: Slot) -> int:
        return slot.positions * self._own + slot.source * self._cross + slot.owner.rows * self._states


# Longest n-gram to match in the preceding tokens, unless the request says otherwise.
_NGRAM = 3


class Drafts:
    """The drafts of an engine.

    Args:
        lookup: tokens to look up at once for a request that does not say how many.

    Attributes:
        seconds: the measured times of the model's steps.
    """

    def __init__(self, lookup: int) -> None:
        self._lookup, self._chances, self.seconds = lookup, Chances(), StepSeconds()

    def of_batch(
        self, batch: Sequence[Request], decoding: EnteringDecoding, kind: Kind
    ) -> tuple[Kind, list[SlotDrafts | None]]:
        """Returns the kind of step for these requests, which verifies drafts if any has some, and the drafts."""
        if not kind.may_draft(decoding.model):
            return kind, [None] * len(batch)
        found = [self._of(request, decoding) for request in batch]
        return kind.drafting() if any(found) else kind, found

    def _of(self, request: Request, decoding: EnteringDecoding) -> SlotDrafts | None:
        most = self._lookup if request.lookup is None else request.lookup
        if not most:
            return None
        source, vocabulary = list[int](), decoding.prompt.logits.shape[-1]
        if decoding.model.config.is_encoder_decoder:  # an encoder may read tokens that the decoder cannot write
            source = [token if token < vocabulary else BOUNDARY for token in request.token_list]
        max_ngram = request.config.max_matching_ngram_size or _NGRAM
        return SlotDrafts(most, max_ngram, source, decoding.prompt.eos, self._chances)
