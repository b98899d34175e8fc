"""What runs requests: continuous batching in slots, and static batches for what cannot be run so.

A request takes a slot for each of its rows, and gives them to others when it is over. It enters by a call of `generate`
that ends behind its prefill (`fastgen.optimizer.transformers.captured.slots`). Whatever the hooks of that call decline
runs in it to its end, as a static batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgen import patching, settings
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.engine.executor import CHANGED, StaticBatches, alone_for_model, state_of
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured import slots
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.slots import Guest, Slots

# Steps of so many kinds run in turn: requests of another one wait until one of these has no more.
MOST_KINDS = 8
# Seconds in which no other thread gets the turn for captured steps, and nobody looks whether weights were written to.
_TURN = 2.0


@dataclass(eq=False)
class _Seat:
    """A request in slots."""

    request: Request
    guest: Guest
    slots: Slots
    state: Any  # of the model when it entered
    end: Callable[[], object] | None  # of its streamer


class ContinuousBatches:
    """Runs each request in slots, where it can.

    Args:
        most_rows: slots.

    Attributes:
        static: what runs the others, and counts.
        steps, row_steps, busy_steps: decode steps, and rows in them: of slots, and of requests.
    """

    def __init__(self, model: Any, most_rows: int) -> None:
        self.model, self.most_rows = model, most_rows
        self.static = StaticBatches(model, most_rows)
        self.steps = self.row_steps = self.busy_steps = 0
        self._kinds: dict[Hashable, Slots] = {}
        self._seats: dict[Guest, _Seat] = {}
        self._is_full = False  # the last call has not entered as there are steps of too many kinds
        self._entered: set[Hashable] = set()  # prefill groups of requests that have entered
        self._declined: dict[Hashable, str] = {}  # and of those that cannot, with the reason
        self._waiting_like: Counter[Hashable] = Counter()  # requests that wait, by prefill group

    # ---- which requests run next

    @property
    def unavailable(self) -> str | None:
        """Why no request of this model runs in slots, as things are."""
        if not patching.is_active():
            return "FastGen is disabled"
        if settings.current().captured_step == "never":
            return "captured_step is never"
        if self.model.device.type != "cpu":
            return "slots are on the CPU only"
        return alone_for_model(self.model)

    @property
    def name(self) -> str:
        return "slots" if self.unavailable is None else self.static.name

    def why(self) -> str:
        """What limits which requests share a step."""
        reason = self.unavailable
        if reason is not None:
            return self.static.why()
        return "requests enter and leave while others go on"

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        return sum(kind.rows for kind in self._kinds.values())

    def choose(self, waiting: Sequence[Request]) -> list[Request]:
        """The requests that run next: the first one, and what is prefilled with it; none if the first must wait."""
        first, free = waiting[0], self.most_rows - self.busy
        self._waiting_like = Counter(each.prefill_group for each in waiting)
        if self._runs_static(first):
            return self.static.choose(waiting)
        if first.rows > free:
            return []
        if first.prefill_group is None:
            return [first]
        if first.prefill_group in self._entered:
            like = [each for each in waiting if each.prefill_group == first.prefill_group]
        else:  # which may yet turn out to be a static batch
            like = [each for each in waiting if each.alone is None and each.group == first.group]
        return self.static.together(like, free)

    def _runs_static(self, request: Request) -> bool:
        return self.unavailable is not None or request.config is None or request.prefill_group in self._declined

    # ---- running them

    def run(self, requests: list[Request], more: Callable[[], list[Request]] = list) -> None:
        """Runs requests, and those that `more` gives meanwhile, and settles their futures."""
        if self._runs_static(requests[0]):
            self.static.run(requests)
            return
        while requests or self._seats:
            with slots.running(self.model.device):
                self._take_turn(requests, more)
            requests = []

    def stop(self) -> None:
        """Ends the static call that runs. Another thread calls this."""
        self.static.stop()

    def _take_turn(self, requests: list[Request], more: Callable[[], list[Request]]) -> None:
        until = time.monotonic() + _TURN
        while True:
            while requests:
                self._begin(requests)
                for kind in [kind for kind in self._kinds.values() if kind.is_new]:
                    self._advance(kind)  # whether it can be captured is known then
                requests = more()
            if not self._seats or time.monotonic() > until:
                return
            for kind in list(self._kinds.values()):
                self._advance(kind)
            requests = more()

    def _begin(self, requests: list[Request]) -> None:
        """The prefill of requests, which are in slots then, or done."""
        if self._runs_static(requests[0]):
            self.static.run(requests)
            return
        batch = [request for request in requests if not request.future.done()]
        if not batch:
            return
        for request in batch:
            request.future.has_begun = True
        seats: list[_Seat] = []
        self._is_full = False
        before, group = state_of(self.model), batch[0].prefill_group
        with slots.taking(partial(self._take, batch, seats, before)):
            outcome = self.static.attempt(batch)
        if seats and not isinstance(outcome, BaseException):
            self._entered.add(group)
            return
        for seat in seats:  # what entered, and failed behind that
            self._leave(seat)
        if group is not None and group not in self._entered and not self._is_full:
            self._declined[group] = "a call of this kind goes on without slots"
        is_one = all(request.group == batch[0].group for request in batch)
        if not is_one or (isinstance(outcome, BaseException) and len(batch) > 1) or state_of(self.model) != before:
            self._run_again(batch, outcome if isinstance(outcome, BaseException) else RuntimeError(CHANGED))
            return
        if len(batch) == 1:
            self.static.alone[batch[0].alone or "a call that does not enter slots"] += 1
        results = [outcome] * len(batch) if isinstance(outcome, BaseException) else outcome
        for request, result in zip(batch, results, strict=True):
            self.static.settle(request, result)

    def _take(self, batch: list[Request], seats: list[_Seat], state: Any, decoding: Decoding) -> None:
        """Has the inputs of a call enter. Raises CannotBeCaptured if they cannot."""
        if len(batch) > 1 and decoding.processors_data is None:
            raise CannotBeCaptured("processors that are those of a call of its own")
        identity = slots.identity(decoding)
        kind = self._kinds.get(identity)
        if kind is not None and kind.is_stale:
            self._evict(kind, None)
            kind = None
        if kind is None:
            if len(self._kinds) >= MOST_KINDS:
                self._is_full = True
                raise CannotBeCaptured("steps of many kinds")
            kind = Slots(decoding, self.most_rows // batch[0].rows)
        is_whole = self.model.config.is_encoder_decoder or len(batch) == 1
        guests = [
            decoding.guest(request.new_tokens, None if is_whole else request.length, request.seed)
            for request in batch
        ]
        kind.admit(decoding, guests, self._expected(batch[0]))
        self._kinds[identity] = kind
        decoding.release()
        end = None if decoding.streamer is None else decoding.streamer.end
        for request, guest in zip(batch, guests, strict=True):
            seat = _Seat(request, guest, kind, state, end)
            self._seats[guest] = seat
            seats.append(seat)

    def _expected(self, first: Request) -> int:
        """Inputs of a kind that are likely to be in slots at a time."""
        return self._waiting_like[first.prefill_group] if first.prefill_group is not None else 1

    def _advance(self, kind: Slots) -> None:
        """A step of one kind, and what comes of it."""
        for guest in [guest for guest in kind.guests.values() if self._seats[guest].request.future.done()]:
            self._leave(self._seats[guest])
        try:
            if kind.guests:
                self.steps += 1
                self.row_steps += kind.slots
                self.busy_steps += kind.rows
                for guest in kind.advance():
                    self._retire(self._seats[guest])
        except Exception as error:
            self._evict(kind, error)
        if not kind.guests:
            kind.close()
            self._kinds = {name: each for name, each in self._kinds.items() if each is not kind}

    def _retire(self, seat: _Seat) -> None:
        """The request is over."""
        if isinstance(seat.guest.error, CannotBeCaptured):  # as for code that does what only the library's loop serves
            self._leave(seat)
            self.static.run([seat.request])
            return
        if seat.guest.error is None and state_of(self.model) != seat.state:
            self._leave(seat)
            self._run_again([seat.request], RuntimeError(CHANGED))
            return
        result = seat.guest.error or seat.slots.result(seat.guest)
        self._leave(seat)
        if not isinstance(result, Exception):
            self.static.count(seat.request, result)
            if seat.end is not None:
                seat.end()
        self.static.settle(seat.request, result)

    def _leave(self, seat: _Seat) -> None:
        seat.slots.remove(seat.guest)
        del self._seats[seat.guest]

    def _evict(self, kind: Slots, error: Exception | None) -> None:
        """The step does not go on, for this error or as the model has changed: its requests begin again, without it."""
        seats = [self._seats[guest] for guest in kind.guests.values()]
        for seat in seats:
            self._leave(seat)
            if isinstance(error, CannotBeCaptured) and seat.request.prefill_group is not None:
                self._declined[seat.request.prefill_group] = str(error)
        kind.drop()
        self._run_again([seat.request for seat in seats], error or RuntimeError(CHANGED))

    def _run_again(self, batch: Sequence[Request], error: Any) -> None:
        """Requests run in static batches, unless code of the user's has seen them: those fail."""
        for request in batch:
            if request.runs_user_code:
                self.static.settle(request, error)
        left = [request for request in batch if not request.future.done()]
        while left:
            chosen = self.static.choose(left)
            self.static.counts["repeated"] += 1
            self.static.run(chosen)
            left = [request for request in left if request not in chosen]
