"""What runs requests: continuous batching in slots, and static batches for what cannot be run so.

A request takes a slot for each of its rows, and gives them to others when it is over. It enters by a call of `generate`
that ends behind its prefill (`fastgen.optimizer.transformers.entering`). What the hooks of that call decline runs in it
to its end, as a static batch.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastgen import patching, settings
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.engine import adapters
from fastgen.engine.calls import ModelState, alone_for_model, call, pads, what_shares_a_call, written
from fastgen.engine.drafts import Drafts
from fastgen.engine.kv_budget import ExceedsBudget, KVBudget
from fastgen.engine.own_generate import OwnCalls
from fastgen.engine.planning import Arrivals, Costs, Entered, next_batch
from fastgen.engine.prefills import Prefills
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured import slots
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.captured.kind import Kind
from fastgen.optimizer.transformers.captured.pays import is_repeatable
from fastgen.optimizer.transformers.captured.slots import Slot, Slots
from fastgen.optimizer.transformers.entering import entering

# Steps of so many kinds run in turn. A request of another kind is a static batch while there are as many.
MOST_IN_USE = 8
# Seconds in which no other thread gets the turn for captured steps, and nobody looks whether weights were written to;
# and where others wait for it, as another engine does. Each turn looks at the weights once more.
_TURN, _SHARED_TURN = 2.0, 0.25
# Seconds between two turns, in which others may take theirs.
_BREATH = 0.001
# So often a request may meet a step that fails, or a model that has changed, and begin again: the next time it fails.
_MOST_FAILURES = 2
COUNTED = "steps row_steps busy_row_steps batches rows tokens repeated preempted drafted_tokens accepted_tokens".split()
DECLINED = "a call that does not enter slots"
CHANGED = "the model has changed while the request ran: its weights, modules, adapters or training mode"


class ContinuousBatches:
    """Runs each request in slots, where it can. For one thread.

    Args:
        most_rows: slots.
        cache_bytes: of K and V, and states, of requests in slots, at the most; None for any number.
        max_stall: seconds that requests in slots may wait for the prefill of others; None for any number. The order
            then depends on the requests alone, and on no clock.
        lookup: tokens that are drafted at once for a request that does not say how many.

    Attributes:
        counts, alone: as `Engine.stats` has them.
    """

    def __init__(
        self, model: Any, most_rows: int, cache_bytes: int | None = None, max_stall: float | None = 1.0, lookup: int = 0
    ) -> None:
        self.model, self._inside, self.most_rows = model, adapters.model_inside(model), most_rows
        has_encoder = bool(self._inside.config.is_encoder_decoder)
        self.counts, self.alone = Counter(dict.fromkeys(COUNTED, 0)), Counter[str]()
        self.prefills = Prefills(self._inside, pads(model), has_encoder, max_stall)
        self._budget, self._costs = KVBudget(cache_bytes, has_encoder), Costs()
        self._arrivals = Arrivals(most_rows, sum(weight.nbytes for weight in self._inside.parameters()))
        self._entered, self._expected = Entered(), 0  # requests that waited with the latest, and may be in one step
        self._is_for_itself = False  # the latest that could not enter says nothing of others
        self._state = ModelState(model)  # that requests in slots have entered with
        self._adapters, self._drafts = adapters.Served(), Drafts(lookup)
        self.reset()

    def reset(self) -> None:
        """Nothing runs: at the beginning, and in a forked process, as the requests are those of the other one."""
        self._in_use: list[Slots] = []
        self._running: list[Slot] = []  # in the order in which they entered
        self._again: list[Request] = []  # those that begin again, before others begin
        self._own = OwnCalls(self.model, self.most_rows)

    @property
    def has_slots(self) -> bool:
        """Whether requests of this model run in slots, as things are."""
        is_on = patching.is_active() and settings.current().captured_step != "never"
        device = self._inside.device
        is_served = is_on and device.type == "cpu" and graph.unavailable(device) is None
        return is_served and alone_for_model(self.model) is None

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        return sum(step.rows for step in list(self._in_use))  # other threads ask, too

    def runs_in(self, thread: Any) -> bool:
        """Whether a request runs in this thread, which is not that of the executor: that waits for it meanwhile."""
        return self._own.run_in(thread)

    def stats(self) -> dict[str, Any]:
        """What `Engine.stats` says of running."""
        has_slots = self.has_slots
        return {
            "executor": "slots" if has_slots else "static batches",
            "why": "requests enter and leave while others go on" if has_slots else what_shares_a_call(self.model),
            "alone": dict(self.alone),
            "slots": self.most_rows,
            "busy": self.busy,
            **self.counts,
            "kv_bytes": self._budget.peak,
            **{name: getattr(self.prefills, name) for name in ("shared_positions", "shared_sources", "chunks")},
        }

    # ---- which requests run next

    def choose(self, waiting: list[Request]) -> list[Request]:
        """Takes out those that run next: the first one, and what shares its call; none if the first must wait."""
        free = self.most_rows - self.busy
        if waiting[0].rows > free or self._again or self._own.some_may_go_on:
            return []
        is_time = self._arrivals.has_come(free, len(waiting) * waiting[0].rows, bool(self._running))
        return self._chosen(waiting, free) if is_time else []

    def _next(self, more: Callable[[], list[Request]]) -> list[Request]:
        """The requests to begin now: of those that begin again, once the first one has room; or `more`."""
        self._again = [request for request in self._again if not request.future.done()]
        if not self._again:
            return more()
        first, free = self._again[0], self.most_rows - self.busy
        return self._chosen(self._again, free) if first.rows <= free or self._runs_static(first) else []

    def _chosen(self, waiting: list[Request], free: int) -> list[Request]:
        first = waiting[0]
        if self._runs_static(first):
            shares = alone_for_model(self.model) is None
            like = [each for each in waiting if each.group == first.group] if shares else [first]
            chosen = self._cheapest(like, self.most_rows)
        else:
            has_entered = self._entered.has(first.prefill_group)
            like = [
                each
                for each in waiting
                if each.prefill_group == first.prefill_group
                and (has_entered or each.group == first.group)  # it may yet turn out to be a static batch
                and not each.is_static
            ]
            if first.prefill_group is None or self.prefills.alone(first, like):
                like = [first]
            self._expected = sum(each.search == first.search for each in waiting)
            batch = self._budget.fitting(self._cheapest(like, free), first, self._running)
            chosen = self.prefills.fitting(batch) if has_entered else batch
            if chosen:  # what would have been with them comes behind the next step
                self._arrivals.note(len(chosen) == len(batch))
        found = set(chosen)  # a cancelled one may leave the list meanwhile
        waiting[:] = [request for request in tuple(waiting) if request not in found]
        return chosen

    def _cheapest(self, like: Sequence[Request], most_rows: int) -> list[Request]:
        """Those that are cheapest together with the first one, of requests whose options let them share a batch."""
        length = None if pads(self.model) else like[0].length
        return next_batch([each for each in like if length in (None, each.length)], most_rows, self._costs)

    def _runs_static(self, request: Request) -> bool:
        may_enter = self.has_slots and self._entered.may(request.prefill_group)
        return not may_enter or request.config is None or request.is_static

    # ---- running them

    def steps(self, more: Callable[[], list[Request]]) -> Iterator[None]:
        """Runs the requests that `more` gives, and those that it gives meanwhile, and settles their futures."""
        with self._own:  # nobody goes on with what an error has left
            while (requests := self._next(more)) or self._running or self._own:
                yield from self._run(requests, more)

    def _run(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        if self._running or (requests and not self._runs_static(requests[0])):
            with contextlib.ExitStack() as turn:
                try:
                    turn.enter_context(slots.running(self._inside.device))
                except CannotBeCaptured as error:
                    self._do_without_turn(requests, error)
                else:
                    yield from self._take_turn(requests, more)
            time.sleep(_BREATH)
        else:
            self._begin(requests)
        self._run_own()  # outside of the turn, which their threads may take
        yield

    def _take_turn(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        begin = time.monotonic()
        self.prefills.begin_turn()
        while True:
            while requests:
                self._begin(requests)
                for step in [step for step in self._in_use if step.is_new]:
                    self._advance(step)  # whether it can be captured is known then
                if self._running and self.prefills.max_stall is not None:
                    break  # others go on before the next prefill
                requests = self._next(more)
            if not (self._running or self._again):
                return
            yield
            for step in list(self._in_use):
                self._advance(step)
            self._make_room()
            most = _SHARED_TURN if graph.is_wanted(self._inside.device) else _TURN
            if self._own.some_may_go_on or time.monotonic() - begin > most:
                return  # behind a step, and before it is asked who runs next, which counts
            requests = self._next(more)

    def _do_without_turn(self, requests: list[Request], error: CannotBeCaptured) -> None:
        """A call of another thread has captured steps, and does not end: it may wait for one of these requests.

        Those in slots whose code must not run twice wait on.
        """
        again, self._again = [*requests, *self._again], []
        self._run_again(again)
        for step in list(self._in_use):
            if not any(slot.owner.runs_user_code for slot in step.taken.values()):
                self._evict(step, RuntimeError(str(error)))
        while requests := self._next(list):
            self._begin(requests)

    def _begin(self, requests: list[Request]) -> None:
        """Has requests enter slots in a call of `generate`, which runs to its end where they cannot."""
        batch = [request for request in requests if not request.future.done()]
        if not batch:
            return
        for request in batch:
            request.future.begun = request.future.begun or time.perf_counter()
        self._evict_if_changed()
        if batch[0].asks_library and self.has_slots and not batch[0].is_static:
            self._own.begin(batch[0], self._state.changes)
            return
        is_static, self._is_for_itself = self._runs_static(batch[0]), False
        with contextlib.ExitStack() as way:
            if not is_static:
                take, others_wait = partial(self._enter, batch), bool(self._running)
                how = self.prefills.plan(batch, self._state.latest, others_wait, take, self._step_between)
                way.enter_context(entering(how))
            outcome = self._outcome(batch, enters_slots=not is_static)
        entered = [slot for slot in self._running if slot.owner in batch]
        if entered and not isinstance(outcome, BaseException):
            return
        self._withdraw(entered, outcome)  # what failed behind that
        self._settle_call(batch, outcome, is_static)

    def _run_own(self) -> None:
        """Has calls of the model's own `generate` go on, and takes what they ask for, or end with."""
        for own, inner in self._own.go_on():
            if inner is not None:
                self._again.append(inner)
            elif self._evict_if_changed() or own.changes != self._state.changes:
                self._run_again([own.request], error=RuntimeError(CHANGED))
            else:
                self.alone.update(own.why_alone)
                self._settle(own.request, own.outcome)

    def _outcome(self, batch: list[Request], enters_slots: bool) -> Any:
        """What a call gives, or what it raises."""
        first, begin = batch[0], time.perf_counter()
        try:
            results = call(self.model, batch, enters_slots)
        except BaseException as error:  # whatever the user's code raises: nothing ends the thread of the engine
            return error
        self.counts.update(batches=1, rows=sum(each.rows for each in batch), repeated=int(first.repeats > 0))
        if first.alone is None and self.prefills.max_stall is not None:
            self._costs.note_call(batch, time.perf_counter() - begin)
        return results

    def _settle_call(self, batch: list[Request], outcome: Any, is_static: bool) -> None:
        """Takes what a call has given that ran to its end, or what it has raised."""
        first, has_failed, middle = batch[0], isinstance(outcome, BaseException), len(batch) // 2
        if not has_failed or isinstance(outcome, Exception):
            if self._evict_if_changed() or any(request.group != first.group for request in batch):
                error = outcome if has_failed else RuntimeError(CHANGED)
                self._run_again(batch, error=error, is_unseen=len(batch) > 1)
                return
            if has_failed and middle:
                for half in (batch[:middle], batch[middle:]):
                    own = object()
                    for request in half:
                        request.group = own
                self._run_again(batch)
                return
            says_nothing = is_static or self._is_for_itself or len(self._in_use) >= MOST_IN_USE
            if not (has_failed or says_nothing):
                self._entered.note_declined(first.prefill_group)
            reason = first.alone or alone_for_model(self.model) or (None if is_static else DECLINED)
            if reason and len(batch) == 1:
                self.alone[reason] += 1
        for request, result in zip(batch, [outcome] * len(batch) if has_failed else outcome, strict=True):
            self._settle(request, result)

    def _settle(self, request: Request, result: Any) -> None:
        sequences = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
        if request.config is not None and isinstance(sequences, Tensor) and sequences.dim() == 2:
            self.counts["tokens"] += sum(written(sequences[:, request.prompt :], request.config))
        request.future.settle(result)

    # ---- in slots

    def _enter(self, batch: list[Request], decoding: EnteringDecoding) -> None:
        """Has the inputs of a call enter. Raises CannotBeCaptured if they cannot."""
        if len(batch) > 1 and decoding.shared_processors is None:
            raise CannotBeCaptured("processors that are those of a call of its own")
        kind = Kind.of(decoding).beside(self._adapters.beside(batch[0].adapter))
        kind, drafts = self._drafts.of_batch(batch, decoding, kind)
        step = next((each for each in self._in_use if each.serves(kind)), None)
        if step is None and len(self._in_use) >= MOST_IN_USE:
            raise CannotBeCaptured("steps of many kinds")
        if step is not None and step.is_stale:  # looked at in a call, as the model's layers are those of one then
            for each in self._in_use:  # their next steps raise it: this request is of the model as it is now
                each.failure = each.failure or RuntimeError(CHANGED)
            self._adapters.clear()
            raise CannotBeCaptured("the model has changed")
        if step is None:
            repeats = self.prefills.max_stall is None and is_repeatable()
            step = Slots(self._inside, kind, self.most_rows // batch[0].rows, self._drafts.seconds, repeats)
        self._budget.note(decoding.prompt)
        is_whole, entered = self._inside.config.is_encoder_decoder or len(batch) == 1, list[Slot]()
        for request, of_slot in zip(batch, drafts, strict=True):
            own, length = request.options.get("logits_processor") or (), None if is_whole else request.length
            slot = decoding.slot(request, request.new_tokens, length, request.seed, own)
            if len(batch) > 1 and request.options.get("streamer") is not None:  # the call has none
                slot.streamer, slot.streams_prompt = request.options["streamer"], True
            slot.drafts = of_slot
            needed = self._budget.needed(request, slot.new_tokens)
            if not self._budget.has_room(needed):
                slot.error = ExceedsBudget(f"the request may need {needed} bytes of cache: cache_gib is less")
            entered.append(slot)
        if step not in self._in_use:
            self._in_use.append(step)
        self._running += entered
        try:
            step.admit(decoding, kind, entered, self._expected)
            decoding.release()
            if kind.processors is not None:  # otherwise, each has to enter by a call of its own
                self._entered.note(batch[0].prefill_group, True)
        except BaseException as error:
            self._is_for_itself = isinstance(error, OfThisCall)
            self._withdraw(entered, error)
            raise

    def _withdraw(self, entered: list[Slot], error: BaseException) -> None:
        """Requests leave whose call has failed. Those fail with it that have streamed: no token is to come twice."""
        for slot in entered:
            self._leave(slot)
            if slot.has_streamed:
                self._settle(slot.owner, error)

    def _advance(self, step: Slots) -> None:
        """A decode step, and what comes of it."""
        for slot in [slot for slot in step.taken.values() if slot.owner.future.done()]:  # it was cancelled
            self._leave(slot)
        if not step.taken:
            return
        try:
            over = self._stepped(step)
            for slot in [] if over and self._evict_if_changed() else over:
                self._retire(step, slot)
        except Exception as error:
            self._evict(step, error)

    def _stepped(self, step: Slots) -> list[Slot]:
        """Those that are over behind a decode step."""
        over = step.advance(partial(self._budget.drafted, self._running))
        self.counts.update(steps=1, row_steps=step.slots, busy_row_steps=step.rows)
        self.counts.update(drafted_tokens=step.drafts.drafted, accepted_tokens=step.drafts.accepted)
        return over

    def _step_between(self) -> None:
        """Between two chunks of a prefill: steps that are captured do not meet the call that prefills.

        What is over, or fails, is seen in the next step.
        """
        for step in self._in_use:
            if step.is_captured and step.failure is None:
                try:
                    self._stepped(step)
                except Exception as error:
                    step.failure = error  # its next step raises it: the call that prefills has nothing to do with it

    def _retire(self, step: Slots, slot: Slot) -> None:
        """A request is over: it leaves its slots, and gets its result."""
        result = slot.error if slot.error is not None else step.result(slot)
        self._leave(slot)
        if isinstance(slot.error, CannotBeCaptured):  # code of the user's does what only the library's loop serves
            self._run_again([slot.owner])
            return
        if slot.error is None and slot.streamer is not None:
            slot.catch(slot.streamer.end)
        self._settle(slot.owner, result if slot.error is None else slot.error)

    def _leave(self, slot: Slot) -> None:
        """What a step fails with here is no matter of this request any more: it does not go on with the others."""
        self._running.remove(slot)
        for step in self._in_use:
            try:
                step.remove(slot)
            except Exception as error:
                step.failure = error
        slot.host = None  # it has the slot: without this, both would wait for a search for garbage
        self._in_use = [step for step in self._in_use if step.taken]

    # ---- beginning again

    def _evict_if_changed(self) -> bool:
        """Whether the model is no longer the one that requests in slots have entered with: all of them begin again."""
        if not self._state.has_changed():
            return False
        self._adapters.clear()
        for step in list(self._in_use):
            self._evict(step, RuntimeError(CHANGED))
        return True

    def _evict(self, step: Slots, error: Exception) -> None:
        """A step does not go on: its requests begin again, without slots."""
        step.failure, left = error, list(step.taken.values())
        says_all = isinstance(error, CannotBeCaptured) and not (step.is_widened or isinstance(error, OfThisCall))
        for slot in left:
            self._leave(slot)
            if says_all:
                self._entered.note(slot.owner.prefill_group, False)
        self._run_again([slot.owner for slot in left], error=error)

    def _run_again(self, requests: list[Request], error: Exception | None = None, is_unseen: bool = False) -> None:
        """Requests run in static batches. With an error, those fail that code of the user's has seen, unless it
        `is_unseen`, or that have begun too often.
        """
        for request in requests:
            is_seen = request.runs_user_code and not is_unseen
            if error is not None and (is_seen or request.failures >= _MOST_FAILURES):
                self._settle(request, error)
            request.is_static = True
            request.repeats += request.future.begun is not None
            request.failures += error is not None
        self._again += requests

    def _make_room(self) -> None:
        """Has the requests that came last begin again later, while the next step would store more than may be."""
        while (last := self._budget.to_begin_again(self._running)) is not None:
            self._leave(last)
            self._again.insert(0, last.owner)
            self.counts["preempted"] += 1
