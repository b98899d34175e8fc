"""Runs requests: by continuous batching in slots, and in static batches where slots cannot serve them.

A request takes one slot per row and frees its slots when it ends. It enters by a call of `generate` that stops after
its prefill (`fastgen.optimizer.transformers.entering`). If that call's hooks decline, it runs on as a static batch.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.engine import models
from fastgen.engine.calls import OwnGenerate, call, written
from fastgen.engine.planning import Arrivals, Costs, Drafts, Entered, ExceedsBudget, KVBudget, next_batch
from fastgen.engine.prefills import Prefills
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding, Kind
from fastgen.optimizer.transformers.captured.pays import is_repeatable
from fastgen.optimizer.transformers.captured.slots import Slot, Slots, running
from fastgen.optimizer.transformers.entering import entering

# At most this many kinds of steps run, one after the other. Beyond that, a request of another kind is a static batch.
MOST_IN_USE = 8
# Seconds that an engine keeps the turn for captured steps, and the same while others, such as another engine, wait for
# it. Weights are checked for writes only once per turn.
_TURN, _SHARED_TURN = 2.0, 0.25
# Seconds between two turns, in which others may take theirs.
_BREATH = 0.001
# A request begins again at most this many times after a step has failed or the model has changed; then it fails.
_MOST_FAILURES = 2
COUNTED = "steps row_steps busy_row_steps batches rows tokens repeated preempted drafted_tokens accepted_tokens".split()
DECLINED = "a call that does not enter slots"
CHANGED = "the model has changed while the request ran: its weights, modules, adapters or training mode"


class ContinuousBatches:
    """Runs each request in slots if it can. Not thread-safe: one thread uses it.

    Args:
        most_rows: number of slots.
        cache_bytes: the most bytes of K and V, and states, of requests in slots; None for no limit.
        max_stall: seconds that requests in slots may wait for the prefill of others; None for no limit. The order of
            requests then depends on the requests alone, and not on a clock.
        lookup: tokens to draft at once for a request that does not say how many.

    Attributes:
        counts, alone: as in `Engine.stats`.
    """

    def __init__(
        self, model: Any, most_rows: int, cache_bytes: int | None = None, max_stall: float | None = 1.0, lookup: int = 0
    ) -> None:
        self.model, self._inside, self.most_rows = model, models.model_that_decodes(model), most_rows
        has_encoder = bool(self._inside.config.is_encoder_decoder)
        self.counts, self.alone = Counter(dict.fromkeys(COUNTED, 0)), Counter[str]()
        self.prefills = Prefills(self._inside, models.pads(model), has_encoder, max_stall)
        self._budget, self._costs = KVBudget(cache_bytes, has_encoder), Costs()
        self._arrivals = Arrivals(most_rows, sum(weight.nbytes for weight in self._inside.parameters()))
        self._entered, self._expected = Entered(), 0  # requests waiting at the latest choice that could share a step
        self._is_for_itself = False  # the latest failure to enter concerns that request alone
        self._state = models.ModelState(model)  # the state in which requests entered slots
        self._adapters, self._drafts = models.Served(), Drafts(lookup)
        self.reset()

    def reset(self) -> None:
        """Forgets all requests: initially, and in a forked process, whose requests belong to the parent."""
        self._in_use: list[Slots] = []
        self._running: list[Slot] = []  # in the order in which they entered
        self._again: list[Request] = []  # requests that begin again, before new ones begin
        self._own: list[OwnGenerate] = []  # unfinished calls of the model's own `generate`

    @property
    def has_slots(self) -> bool:
        """Whether requests of this model run in slots under the present settings."""
        return models.has_slots(self.model)

    @property
    def busy(self) -> int:
        """Number of occupied slots."""
        return sum(step.rows for step in list(self._in_use))  # copied, because other threads ask, too

    def runs_in(self, thread: Any) -> bool:
        """Whether a request runs in this thread, other than the executor's own, while the executor waits for it."""
        return any(own.thread is thread for own in list(self._own))

    def stats(self) -> dict[str, Any]:
        """Returns the executor's part of `Engine.stats`."""
        return {
            "executor": "slots" if self.has_slots else "static batches",
            "why": models.what_runs_together(self.model),
            "alone": dict(self.alone),
            "slots": self.most_rows,
            "busy": self.busy,
            **self.counts,
            "kv_bytes": self._budget.peak,
            **{name: getattr(self.prefills, name) for name in ("shared_positions", "shared_sources", "chunks")},
        }

    # ---- which requests run next

    def choose(self, waiting: list[Request]) -> list[Request]:
        """Takes the requests that run next from the list: the first and others of its call; none if it must wait."""
        free = self.most_rows - self.busy
        if waiting[0].rows > free or self._again or any(own.may_go_on for own in self._own):
            return []
        is_time = self._arrivals.has_come(free, len(waiting) * waiting[0].rows, bool(self._running))
        return self._chosen(waiting, free) if is_time else []

    def _next(self, more: Callable[[], list[Request]]) -> list[Request]:
        """Returns the requests to begin now: those that begin again, once the first has room; otherwise `more()`."""
        self._again = [request for request in self._again if not request.future.done()]
        if not self._again:
            return more()
        first, free = self._again[0], self.most_rows - self.busy
        return self._chosen(self._again, free) if first.rows <= free or self._runs_static(first) else []

    def _chosen(self, waiting: list[Request], free: int) -> list[Request]:
        first = waiting[0]
        if self._runs_static(first):
            shares = models.alone_for_model(self.model) is None
            like = [each for each in waiting if each.group == first.group] if shares else [first]
            chosen = self._cheapest(like, self.most_rows)
        else:
            has_entered = self._entered.has(first.prefill_group)
            like = [
                each
                for each in waiting
                if each.prefill_group == first.prefill_group
                and (has_entered or each.group == first.group)  # the group may yet have to run as a static batch
                and not each.is_static
            ]
            if first.prefill_group is None or self.prefills.alone(first, like):
                like = [first]
            self._expected = sum(each.search == first.search for each in waiting)
            batch = self._budget.fitting(self._cheapest(like, free), first, self._running)
            chosen = self.prefills.fitting(batch) if has_entered else batch
            if chosen:  # the rest of the batch enters after the next step
                self._arrivals.note(len(chosen) == len(batch))
        found = set(chosen)  # a cancelled request may leave the list meanwhile
        waiting[:] = [request for request in tuple(waiting) if request not in found]
        return chosen

    def _cheapest(self, like: Sequence[Request], most_rows: int) -> list[Request]:
        """Picks, from requests that may share a batch, those that are cheapest together with the first."""
        length = None if models.pads(self.model) else like[0].length
        return next_batch([each for each in like if length in (None, each.length)], most_rows, self._costs)

    def _runs_static(self, request: Request) -> bool:
        may_enter = self.has_slots and self._entered.may(request.prefill_group)
        return not may_enter or request.config is None or request.is_static

    # ---- running them

    def steps(self, more: Callable[[], list[Request]]) -> Iterator[None]:
        """Runs the requests that `more` returns, now and later, and settles their futures."""
        try:
            while (requests := self._next(more)) or self._running or self._own:
                yield from self._run(requests, more)
        finally:  # after an error, some are left
            while self._own:
                self._own.pop().abandon()

    def _run(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        if self._running or (requests and not self._runs_static(requests[0])):
            with contextlib.ExitStack() as turn:
                try:
                    turn.enter_context(running(self._inside.device))
                except CannotBeCaptured as error:
                    self._do_without_turn(requests, error)
                else:
                    yield from self._take_turn(requests, more)
            time.sleep(_BREATH)
        else:
            self._begin(requests)
        self._run_own()  # outside the turn, because their threads may take it
        yield

    def _take_turn(self, requests: list[Request], more: Callable[[], list[Request]]) -> Iterator[None]:
        begin = time.monotonic()
        self.prefills.begin_turn()
        while True:
            while requests:
                self._begin(requests)
                for step in [step for step in self._in_use if step.is_new]:
                    self._advance(step)  # this tells whether the step can be captured
                if self._running and self.prefills.max_stall is not None:
                    break  # requests in slots advance before the next prefill
                requests = self._next(more)
            if not (self._running or self._again):
                return
            yield
            for step in list(self._in_use):
                self._advance(step)
            self._make_room()
            most = _SHARED_TURN if graph.is_wanted(self._inside.device) else _TURN
            if any(own.may_go_on for own in self._own) or time.monotonic() - begin > most:
                return  # after a step, and before asking for the next requests, which affects the counts
            requests = self._next(more)

    def _do_without_turn(self, requests: list[Request], error: CannotBeCaptured) -> None:
        """Runs without captured steps: another thread holds the turn for good, and may wait for one of these requests.

        Requests in slots whose user code must not run twice keep waiting.
        """
        again, self._again = [*requests, *self._again], []
        self._run_again(again)
        for step in list(self._in_use):
            if not any(slot.owner.runs_user_code for slot in step.taken.values()):
                self._evict(step, RuntimeError(str(error)))
        while requests := self._next(list):
            self._begin(requests)

    def _begin(self, requests: list[Request]) -> None:
        """Enters requests into slots by a call of `generate`; the call runs to its end if they cannot enter."""
        batch = [request for request in requests if not request.future.done()]
        if not batch:
            return
        for request in batch:
            request.future.begun = request.future.begun or time.perf_counter()
        self._evict_if_changed()
        if batch[0].has_inner_requests and self.has_slots and not batch[0].is_static:
            self._own.append(OwnGenerate(self.model, self._inside, batch[0], self.most_rows, self._state.changes))
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
        self._withdraw(entered, outcome)  # the call failed after they had entered
        self._settle_call(batch, outcome, is_static)

    def _run_own(self) -> None:
        """Continues the calls of the model's own `generate`, and collects their inner requests or their results."""
        for own in [each for each in self._own if each.may_go_on]:
            inner = own.go_on()
            if inner is not None:
                self._again.append(inner)
                continue
            self._own.remove(own)
            if self._evict_if_changed() or own.changes != self._state.changes:
                self._run_again([own.request], error=RuntimeError(CHANGED))
            else:
                self.alone.update(own.why_alone)
                self._settle(own.request, own.outcome)

    def _outcome(self, batch: list[Request], enters_slots: bool) -> Any:
        """Returns the results of a call, or the exception that it raises."""
        first, begin = batch[0], time.perf_counter()
        try:
            results = call(self.model, batch, enters_slots)
        except BaseException as error:  # user code may raise anything, and nothing must end the engine's thread
            return error
        self.counts.update(batches=1, rows=sum(each.rows for each in batch), repeated=int(first.repeats > 0))
        if first.alone is None and self.prefills.max_stall is not None:
            self._costs.note_call(batch, time.perf_counter() - begin)
        return results

    def _settle_call(self, batch: list[Request], outcome: Any, is_static: bool) -> None:
        """Settles a call that ran to its end, or that raised."""
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
            reason = first.alone or models.alone_for_model(self.model) or (None if is_static else DECLINED)
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
        """Enters the inputs of a call into slots. Raises CannotBeCaptured if they cannot enter."""
        if len(batch) > 1 and decoding.shared_processors is None:
            raise CannotBeCaptured("processors that are those of a call of its own")
        kind = Kind.of(decoding).beside(self._adapters.beside(batch[0].adapter))
        kind, drafts = self._drafts.of_batch(batch, decoding, kind)
        step = next((each for each in self._in_use if each.serves(kind)), None)
        if step is None and len(self._in_use) >= MOST_IN_USE:
            raise CannotBeCaptured("steps of many kinds")
        if step is not None and step.is_stale:  # checked in a call: the model's layers are replaced there
            for each in self._in_use:  # their next steps raise it; the new request runs on the present model
                each.failure = each.failure or RuntimeError(CHANGED)
            self._adapters.clear()
            raise CannotBeCaptured("the model has changed")
        if step is None:
            repeats = self.prefills.max_stall is None and is_repeatable()
            step = Slots(self._inside, kind, self.most_rows // batch[0].rows, self._drafts.seconds, repeats)
        self._budget.note(decoding.prompt, max(batch, key=lambda each: each.prompt_positions))
        is_whole, entered = self._inside.config.is_encoder_decoder or len(batch) == 1, list[Slot]()
        for request, of_slot in zip(batch, drafts, strict=True):
            own, length = request.options.get("logits_processor") or (), None if is_whole else request.length
            slot = decoding.slot(request, request.new_tokens, length, request.seed, own)
            if len(batch) > 1 and request.options.get("streamer") is not None:  # the call itself has none
                slot.streamer, slot.streams_prompt = request.options["streamer"], True
            slot.drafts = of_slot
            slot.most_bytes = needed = self._budget.needed(request, slot.new_tokens, decoding.prompt)
            if not self._budget.has_room(needed):
                slot.error = ExceedsBudget(f"the request may need {needed} bytes of cache: cache_gib is less")
            entered.append(slot)
        if step not in self._in_use:
            self._in_use.append(step)
        self._running += entered
        try:
            step.admit(decoding, kind, entered, self._expected)
            decoding.release()
            if kind.processors is not None:  # otherwise, each request has to enter by its own call
                self._entered.note(batch[0].prefill_group, True)
        except BaseException as error:
            self._is_for_itself = isinstance(error, OfThisCall)
            self._withdraw(entered, error)
            raise

    def _withdraw(self, entered: list[Slot], error: BaseException) -> None:
        """Removes requests whose call failed. Those that have streamed fail: no token may be streamed twice."""
        for slot in entered:
            self._leave(slot)
            if slot.has_streamed:
                self._settle(slot.owner, error)

    def _advance(self, step: Slots) -> None:
        """Runs a decode step of these slots, and handles the requests that end with it."""
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
        """Runs a decode step, and returns the slots that are finished."""
        over = step.advance(partial(self._budget.drafted, self._running))
        self.counts.update(steps=1, row_steps=step.slots, busy_row_steps=step.rows)
        self.counts.update(drafted_tokens=step.drafts.drafted, accepted_tokens=step.drafts.accepted)
        return over

    def _step_between(self) -> None:
        """Runs the captured steps between two chunks of a prefill: only they do not touch the prefilling call.

        The next step handles requests that end or fail here.
        """
        for step in self._in_use:
            if step.is_captured and step.failure is None:
                try:
                    self._stepped(step)
                except Exception as error:
                    step.failure = error  # its next step raises it, so that the prefilling call is not affected

    def _retire(self, step: Slots, slot: Slot) -> None:
        """Removes a finished request from its slots, and settles it."""
        result = slot.error if slot.error is not None else step.result(slot)
        self._leave(slot)
        if isinstance(slot.error, CannotBeCaptured):  # user code does what only the library's loop supports
            self._run_again([slot.owner])
            return
        if slot.error is None and slot.streamer is not None:
            slot.catch(slot.streamer.end)
        self._settle(slot.owner, result if slot.error is None else slot.error)

    def _leave(self, slot: Slot) -> None:
        """Removes a request from its slots. If the step fails here, only the requests left in it are affected."""
        self._running.remove(slot)
        for step in self._in_use:
            try:
                step.remove(slot)
            except Exception as error:
                step.failure = error
        slot.host = None  # breaks a reference cycle, which would otherwise wait for the garbage collector
        self._in_use = [step for step in self._in_use if step.taken]

    # ---- beginning again

    def _evict_if_changed(self) -> bool:
        """Makes all requests in slots begin again if the model has changed, and returns whether it has."""
        if not self._state.has_changed():
            return False
        self._adapters.clear()
        for step in list(self._in_use):
            self._evict(step, RuntimeError(CHANGED))
        return True

    def _evict(self, step: Slots, error: Exception) -> None:
        """Drops a step that cannot continue: its requests begin again, without slots."""
        step.failure, left = error, list(step.taken.values())
        says_all = isinstance(error, CannotBeCaptured) and not (step.is_widened or isinstance(error, OfThisCall))
        for slot in left:
            self._leave(slot)
            if says_all:
                self._entered.note(slot.owner.prefill_group, False)
        self._run_again([slot.owner for slot in left], error=error)

    def _run_again(self, requests: list[Request], error: Exception | None = None, is_unseen: bool = False) -> None:
        """Runs requests again, in static batches. With an error, requests that user code has seen (unless `is_unseen`),
        and requests that have failed too often, fail with it.
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
        """Evicts the latest requests, to begin again later, while the next step would exceed the cache budget."""
        while (last := self._budget.to_begin_again(self._running)) is not None:
            self._leave(last)
            self._again.insert(0, last.owner)
            self.counts["preempted"] += 1
