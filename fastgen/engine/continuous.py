"""What runs requests: continuous batching in slots, and static batches for what cannot be run so.

A request takes a slot for each of its rows, and gives them to others when it is over. It enters by a call of `generate`
that ends behind its prefill (`fastgen.optimizer.transformers.entering`). What the hooks of that call decline runs in it
to its end, as a static batch.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgen import caches, patching, settings
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.engine.executor import CHANGED, StaticBatches, alone_for_model, pads, state_of
from fastgen.engine.kv_budget import RESERVED, ExceedsBudget, KVBudget
from fastgen.engine.planning import Costs
from fastgen.engine.prefills import Prefills
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured import slots
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.captured.slots import Slot, Slots
from fastgen.optimizer.transformers.entering import entering

# Steps of so many kinds run in turn. A request of another kind is a static batch while there are as many.
MOST_IN_USE = 8
# Seconds in which no other thread gets the turn for captured steps, and nobody looks whether weights were written to.
_TURN = 2.0
# Seconds between two turns, in which others may take theirs.
_BREATH = 0.001
# A prefill reads all weights, as a decode step does: it waits until this part of the slots is free, or so many steps.
SHARE_OF_FREE, LONGEST_WAIT = 0.25, 8


@dataclass(eq=False)
class _Running:
    """A request in slots."""

    request: Request
    slot: Slot
    step: Slots
    state: Any  # of the model when it entered
    end: Callable[[], object] | None  # of its streamer


class ContinuousBatches:
    """Runs each request in slots, where it can.

    Args:
        most_rows: slots.
        cache_bytes: of K and V of requests in slots, at the most; None for any number.
        max_stall: seconds that requests in slots may wait for the prefill of others; None for any number.
        costs: of prefills; by default, those that are measured.
        prefix_bytes: of beginnings that prompts share, at the most; None for a part of the memory that is free.

    Attributes:
        static: what runs the others, and counts.
        counts: "steps", decode steps; "row_steps", the slots in them, and "busy_row_steps", those that were taken;
            "preempted", requests that have left for want of memory, and begun again.
    """

    def __init__(
        self,
        model: Any,
        most_rows: int,
        cache_bytes: int | None = None,
        max_stall: float | None = 1.0,
        costs: Costs | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        self.model, self.most_rows = model, most_rows
        self.static = StaticBatches(model, most_rows, costs)
        self.counts: Counter[str] = Counter(steps=0, row_steps=0, busy_row_steps=0, preempted=0)
        self.budget = KVBudget(cache_bytes)
        self.prefills = Prefills(pads(model), model.config.is_encoder_decoder, max_stall, prefix_bytes)
        self._in_use: dict[Hashable, Slots] = {}
        self._running: dict[Slot, _Running] = {}  # in the order in which they entered
        self._preempted: list[Request] = []
        self._is_stale = False  # the model has changed since requests have entered
        self._waited = LONGEST_WAIT  # steps since the last prefill, while others waited
        self._is_cut = False  # others are prefilled behind the next step, which would have been with the last ones
        self._entered: dict[Hashable, None] = {}  # prefill groups of requests that have entered
        self._declined: dict[Hashable, str] = {}  # and of those that cannot, with the reason
        self._waiting_like: Counter[Hashable] = Counter()  # requests that wait, by prefill group

    def reset(self) -> None:
        """In a forked process: nothing is in slots, as the requests are those of the other one."""
        self._in_use, self._running, self._preempted = {}, {}, []

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
        return graph.unavailable(self.model.device) or alone_for_model(self.model)

    @property
    def name(self) -> str:
        return "slots" if self.unavailable is None else self.static.name

    def why(self) -> str:
        """What limits which requests share a step."""
        return "requests enter and leave while others go on" if self.unavailable is None else self.static.why()

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        return sum(step.rows for step in list(self._in_use.values()))  # other threads ask, too

    def stats(self) -> dict[str, int]:
        """`counts`, and "kv_bytes", the most K and V that requests have stored at a time; "shared_positions", those of
        prompts that others had prefilled; "shared_sources", that others had; "chunks", after which steps were made
        before a prefill was over.
        """
        shared = {name: getattr(self.prefills, name) for name in ("shared_positions", "shared_sources", "chunks")}
        return {**self.counts, "kv_bytes": self.budget.peak, **shared}

    def choose(self, waiting: Sequence[Request]) -> list[Request]:
        """The requests that run next: the first one, and what is prefilled with it; none if the first must wait."""
        first, free = waiting[0], self.most_rows - self.busy
        if first.rows > free or self._preempted or not self._is_time(free):
            return []
        if self._runs_static(first):
            return self.static.choose(waiting)
        self._waiting_like = Counter(each.prefill_group for each in waiting)
        if first.prefill_group in self._entered:
            like = [each for each in waiting if each.prefill_group == first.prefill_group]
        else:  # which may yet turn out to be a static batch
            like = [each for each in waiting if each.alone is None and each.group == first.group]
        if first.prefill_group is None or self.prefills.alone(first, like):
            return self._with_room([first], first)
        batch = self._with_room(self.static.together(like, free), first)
        if first.prefill_group not in self._entered:
            return batch
        fitting = self.prefills.fitting(batch)
        self._is_cut = len(fitting) < len(batch)
        return fitting

    def _is_time(self, free: int) -> bool:
        """Whether to prefill now: for a few slots together, unless others have waited for some steps."""
        self._waited = self._waited + 1 if self._running else LONGEST_WAIT
        return free >= self.most_rows * SHARE_OF_FREE or self._waited >= LONGEST_WAIT

    def _with_room(self, batch: list[Request], oldest: Request) -> list[Request]:
        """Those of a batch whose K and V have room, the oldest first; that one at least, if nobody is there."""
        stored, chosen = self.budget.stored(self._running) + self._promised(), list[Request]()
        for request in sorted(batch, key=lambda each: each is not oldest):
            # What does not leave where room gets short has all of its room from the beginning.
            most = RESERVED if request.may_begin_again else request.new_tokens
            stored += self._needed(request, RESERVED if most is None else most)
            if not (self.budget.has_room(stored, 0) or not (chosen or self._running)):
                break
            chosen.append(request)
            if not self.budget.is_known:
                break
        return chosen

    def _promised(self) -> int:
        """Bytes that requests in slots may yet store that do not leave."""
        return sum(
            max(self._needed(each.request, each.slot.new_tokens) - self.budget.stored_by(each.slot), 0)
            for each in self._running.values()
            if not each.request.may_begin_again
        )

    def _needed(self, request: Request, new_tokens: int) -> int:
        """Bytes of K and V with so many new tokens, or as many as it may have."""
        prompt, source = (1, request.length) if self.model.config.is_encoder_decoder else (request.length, 0)
        most = new_tokens if request.new_tokens is None else min(new_tokens, request.new_tokens)
        return self.budget.needed(prompt, source, request.rows, most)

    def _runs_static(self, request: Request) -> bool:
        return self.unavailable is not None or request.config is None or request.prefill_group in self._declined

    # ---- running them

    def run(self, requests: list[Request], more: Callable[[], list[Request]] = list) -> None:
        """Runs requests, and those that `more` gives meanwhile, and settles their futures."""
        for _ in self.steps(requests, more):
            pass

    def steps(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        """As `run`, step by step."""
        if requests and self._runs_static(requests[0]):
            self._run_static(requests)
            yield
            return
        while requests or self._running or self._preempted:
            with contextlib.ExitStack() as turn:
                try:
                    turn.enter_context(slots.running(self.model.device))
                except CannotBeCaptured as error:
                    self._do_without_turn(requests, error)
                    yield
                else:
                    yield from self._take_turn(requests, more)
            requests = []
            time.sleep(_BREATH)

    def _do_without_turn(self, requests: list[Request], error: CannotBeCaptured) -> None:
        """A call of another thread has captured steps, and does not end: it may wait for one of these requests.

        Those whose code must not run twice wait on.
        """
        for step in list(self._in_use.values()):
            if not any(self._running[slot].request.runs_user_code for slot in step.taken.values()):
                self._evict(step, RuntimeError(str(error)))
        again, self._preempted = self._preempted, []
        self._run_static([*requests, *again])

    def _run_static(self, requests: Sequence[Request]) -> int:
        """Runs requests in as many static batches as they need; returns how many."""
        left, count = [request for request in requests if not request.future.done()], 0
        while left:
            count += 1
            chosen = self.static.choose(left)
            self.static.run(chosen)
            left = [request for request in left if request not in chosen]
        return count

    def stop(self) -> None:
        """Ends the static call that runs. Another thread calls this."""
        self.static.stop()

    def _take_turn(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        until = time.monotonic() + _TURN
        while True:
            while requests:
                self._begin(requests)
                for step in [step for step in self._in_use.values() if step.is_new]:
                    self._advance(step)  # whether it can be captured is known then
                if self._running and self.prefills.max_stall is not None:
                    break  # others go on before the next prefill
                requests = self._again() or more()
            yield
            if not (self._running or self._preempted) or time.monotonic() > until:
                return
            for step in list(self._in_use.values()):
                self._advance(step)
            self._make_room()
            requests = self._again() or more()

    def _begin(self, requests: list[Request]) -> None:
        """The prefill of requests, which are in slots then, or done."""
        batch = [request for request in requests if not request.future.done()]
        if not batch:
            return
        if self._runs_static(batch[0]):
            self._run_static(batch)
            return
        for request in batch:
            request.future.has_begun = True
        self._waited, self._is_cut = LONGEST_WAIT if self._is_cut else 0, False
        before, entered = state_of(self.model), list[_Running]()
        take = partial(self._enter, batch, entered, before)
        how = self.prefills.plan(batch, before, bool(self._running), take, self._step_between)
        with entering(how):
            outcome = self.static.attempt(batch)
        if entered and not isinstance(outcome, BaseException):
            caches.limit(self._entered)
            self._entered[batch[0].prefill_group] = None
            return
        for running in entered:  # what entered, and failed behind that
            self._leave(running)
        is_changed, self._is_stale = self._is_stale, False
        if is_changed:
            for step in list(self._in_use.values()):
                self._evict(step, None)
        self._settle(batch, outcome, is_changed or state_of(self.model) != before)

    def _settle(self, batch: list[Request], outcome: Any, is_changed: bool) -> None:
        """Takes what a call has given that went on as a static batch, or what it has raised."""
        group, is_error = batch[0].prefill_group, isinstance(outcome, BaseException)
        is_new = group is not None and group not in self._entered and len(self._in_use) < MOST_IN_USE
        if is_new and not (is_error or is_changed):
            caches.limit(self._declined)
            self._declined[group] = "calls of this kind have no slots"
        if is_error and not isinstance(outcome, Exception):
            for request in batch:
                self.static.settle(request, outcome)
            return
        is_static = all(request.group == batch[0].group for request in batch)
        if not is_static or is_changed or (is_error and len(batch) > 1):
            self._run_again(batch, outcome if is_error else RuntimeError(CHANGED))
            return
        if len(batch) == 1:
            self.static.alone[batch[0].alone or "a call that does not enter slots"] += 1
        for request, result in zip(batch, [outcome] * len(batch) if is_error else outcome, strict=True):
            self.static.settle(request, result)

    def _enter(self, batch: list[Request], entered: list[_Running], state: Any, decoding: EnteringDecoding) -> None:
        """Has the inputs of a call enter. Raises CannotBeCaptured if they cannot."""
        if len(batch) > 1 and decoding.processors_data is None:
            raise CannotBeCaptured("processors that are those of a call of its own")
        identity = slots.identity(decoding)
        step = self._in_use.get(identity)
        if step is None and len(self._in_use) >= MOST_IN_USE:
            raise CannotBeCaptured("steps of many kinds")
        if step is not None and step.is_stale:  # looked at in a call, as the model's layers are those of one then
            self._is_stale = True
            raise CannotBeCaptured("the model has changed")
        step = step or Slots(decoding, self.most_rows // batch[0].rows)
        self.budget.note(*decoding.prompt.bytes_per_position)
        end = None if decoding.streamer is None else decoding.streamer.end
        is_whole = self.model.config.is_encoder_decoder or len(batch) == 1
        for request in batch:
            length = None if is_whole else request.length
            slot = decoding.slot(request.new_tokens, length, request.seed)
            needed = self._needed(request, slot.new_tokens)
            if not self.budget.has_room(0, needed):
                slot.error = ExceedsBudget(f"the request may need {needed} bytes of K and V: cache_gib is less")
            entered.append(_Running(request, slot, step, state, end))
        try:
            step.admit(decoding, [running.slot for running in entered], self._waiting_like[batch[0].prefill_group])
        except BaseException:
            for running in entered:
                self._leave(running)
            entered.clear()
            raise
        self._in_use[identity] = step
        self._running |= {running.slot: running for running in entered}
        decoding.release()

    # ---- decode steps

    def _advance(self, step: Slots) -> None:
        """A decode step, and what comes of it."""
        for running in [self._running[slot] for slot in step.taken.values()]:
            if running.request.future.done():  # it was cancelled
                self._leave(running)
        try:
            if step.taken:
                for slot in self._advanced(step):
                    self._retire(self._running[slot])
        except Exception as error:
            self._evict(step, error)
        if not step.taken:
            step.close()
            self._forget(step)

    def _advanced(self, step: Slots) -> list[Slot]:
        """Those that are over behind a decode step."""
        self.counts.update(steps=1, row_steps=step.slots, busy_row_steps=step.rows)
        return step.advance()

    def _step_between(self) -> None:
        """Between two chunks of a prefill: steps that are captured do not meet the call that prefills.

        What is over, or fails, is seen in the next step.
        """
        for step in self._in_use.values():
            if step.is_captured and step.failure is None:
                try:
                    self._advanced(step)
                except Exception as error:
                    step.failure = error  # its next step raises it: the call that prefills has nothing to do with it

    def _retire(self, running: _Running) -> None:
        """The request is over."""
        error, request = running.slot.error, running.request
        result = error if error is not None else running.step.result(running.slot)
        self._leave(running)
        if isinstance(error, CannotBeCaptured):  # code of the user's does what only the library's loop serves
            self.static.run([request])
        elif error is None and state_of(self.model) != running.state:
            self._run_again([request], RuntimeError(CHANGED))
        else:
            if running.end is not None and not isinstance(result, BaseException):
                running.slot.catch(running.end)
                result = running.slot.error or result
            if not isinstance(result, BaseException):
                self.static.count(request, result)
            self.static.settle(request, result)

    def _leave(self, running: _Running) -> None:
        running.step.remove(running.slot)
        self._running.pop(running.slot, None)

    def _forget(self, step: Slots) -> None:
        self._in_use = {name: each for name, each in self._in_use.items() if each is not step}

    def _evict(self, step: Slots, error: Exception | None) -> None:
        """The step does not go on, for this error or as the model has changed: its requests begin again, without it."""
        left = [self._running[slot] for slot in step.taken.values()]
        for running in left:
            self._leave(running)
            if isinstance(error, CannotBeCaptured) and running.request.prefill_group is not None:
                self._declined[running.request.prefill_group] = str(error)
        step.drop()
        self._forget(step)
        self._run_again([running.request for running in left], error or RuntimeError(CHANGED))

    def _run_again(self, batch: Sequence[Request], error: Any) -> None:
        """Requests run in static batches, unless code of the user's has seen them: those fail."""
        for request in batch:
            if request.runs_user_code:
                self.static.settle(request, error)
        left = [request for request in batch if not request.future.done()]
        self.static.counts["repeated"] += self._run_static(left)

    # ---- memory

    def _make_room(self) -> None:
        """Has the requests that came last begin again later, while more is stored than may be."""
        while len(self._running) > 1 and not self.budget.has_room(self.budget.stored(self._running), 0):
            last = next((each for each in reversed(self._running.values()) if each.request.may_begin_again), None)
            if last is None:
                return
            self._leave(last)
            self._preempted.insert(0, last.request)
            self.counts["preempted"] += 1

    def _again(self) -> list[Request]:
        """A request that has left for want of memory, if there is room for it again."""
        if not self._preempted or self._preempted[0].rows > self.most_rows - self.busy:
            return []
        first = self._preempted[0]
        return [self._preempted.pop(0)] if self._with_room([first], first) else []
