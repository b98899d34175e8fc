"""Runs one call with speculative decoding, after its prefill."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from fastgen import counters, releases
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.retrying import BackOff
from fastgen.decoding.speculation import draft_length
from fastgen.decoding.speculation.draft_length import HOST, MOST_CALLS, Costs, DraftLength, can_begin
from fastgen.decoding.speculation.speculative_search import Progress
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured import graph_cache, pays
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.key import MASKS, POSITIONS, DraftKey, Key
from fastgen.optimizer.transformers.captured.prefilled_call import PrefilledCall
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.models import positions_of_step, why_no_drafts
from fastgen.optimizer.transformers.prefill import prefill
from fastgen.optimizer.transformers.speculation.drafting import (
    LENGTHS,
    AssistantDrafting,
    Drafting,
    RaggedDrafting,
    may_share,
)
from fastgen.optimizer.transformers.speculation.drafts import Draft, Schedule, make_next

ENTRY_POINT = counters.DRAFTS
# Parts that have to be recorded first: a draft, and its verify. Without a draft, the plain call's step serves.
_PARTS = 2
# If another model drafts, buffers have room for all new tokens. Calls for more tokens use the library's loop.
_MOST_AT_ONCE = 2**16

# Scores and logits of the positions so far, each [rows, vocabulary]; None for those that the call does not return.
Records = tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]

# Back-offs of the calls of a model, by the kind of their draft and their number of rows.
_back_offs: weakref.WeakKeyDictionary[Any, dict[tuple[type[Draft], int], BackOff]] = weakref.WeakKeyDictionary()


def seconds_of_step(model: Any, key: Key) -> float | None:
    """Returns the measured seconds of a plain step of this key in the last calls; None if no such step is kept."""
    step = graph_cache.kept(model, key)
    return min(step.seconds_of_calls) if step is not None and step.seconds_of_calls else None


class SpeculativeDecoding(Decoding):
    """Runs draft-verify iterations to the end. Raises CannotBeCaptured before anything is changed."""

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], draft: Draft) -> None:
        self._draft = draft
        self._sums = {"verifies": 0, "drafted": 0, "accepted": 0}
        self._arguments = arguments
        reason = why_no_drafts(call.model)
        if reason is not None:  # checked before anything is made for the call
            raise CannotBeCaptured(reason)
        kind = type(draft), arguments["input_ids"].shape[0]
        self._back_off = _back_offs.setdefault(call.model, {}).setdefault(kind, draft_length.of_calls())
        if draft.schedule is None and self._back_off.waits():
            raise CannotBeCaptured("drafts have gained nothing in the calls before")
        super().__init__(call, arguments, model_kwargs)
        if self._key.processors is None:
            raise CannotBeCaptured("a logits processor that runs on the host")
        if any(self._key.windows):
            raise CannotBeCaptured("a sliding window")
        is_returned = self.config.return_dict_in_generate or call.cache_is_the_users
        if is_returned and len(self._input_ids) > 1 and self.prompt.eos:
            # The library continues finished rows, and returns what they store and score after their ends.
            raise CannotBeCaptured("a returned cache of sequences that end one by one")
        if positions_of_step(self.model) != 1:
            raise CannotBeCaptured("a model that stores several positions in a step")
        if draft.schedule is None and self._is_too_short():
            raise CannotBeCaptured("a call of so few tokens that drafts might lose time")

    def _is_too_short(self) -> bool:
        """Whether drafts could lose too much time in so short a call, by what is known before it has its step.

        The times may be wrong, so they are measured again after many such calls.
        """
        step, plain_step = (graph_cache.kept(self.model, key) for key in (self._key, self._plain_key))
        is_served = plain_step is not None or not self._must_pay  # a call without drafts must have a step, too
        if step is None or not is_served:
            return False
        # Plain calls of few tokens do not measure their step. A verify without a draft takes about as long.
        costs = step.drafting.costs
        costs.plain = seconds_of_step(self.model, self._plain_key)
        if can_begin(costs, self.prompt.new_tokens):
            return False
        costs.short_calls += 1
        if costs.short_calls > MOST_CALLS:
            costs.forget()
            return False
        return True

    def run(self) -> Any:
        if self._draft.is_prepared and self._must_pay:
            self._ledger.budget(self._key).steps += self._steps_asked_for()
        return super().run()

    def _result(self, step: DecodeStep) -> Any:
        result = super()._result(step)
        if not any(self._records()):
            return result
        scores, logits = self._positions.records
        return type(result)(**{**result, "scores": scores, "logits": logits})

    def _steps_asked_for(self) -> int:
        """Returns the number of steps that the call is likely to make."""
        return min(self.prompt.new_tokens, pays.STEPS_OF_A_CALL) if self.prompt.eos else self.prompt.new_tokens

    def _steps_before_capture(self) -> int:
        at_once_from = self._draft.recorded_at_once_from
        if not self._must_pay or (at_once_from is not None and self.prompt.new_tokens >= at_once_from):
            return 0
        # Several parts have to be recorded, which takes more steps to pay.
        parts = 1 if at_once_from is not None else _PARTS
        if not self._ledger.has_asked_for(self._key, -(-self._steps_asked_for() // parts), pays.ASKED_FOR):
            raise CannotBeCaptured(counters.NOT_YET)
        return 0

    def _step_with(self, made: list[CapturedProcessor] | None) -> DecodeStep:
        # Verified positions depend on each other, too: drafted tokens would change results of those before them.
        if self._call.rows_depend_on_each_other:
            raise CannotBeCaptured("a model whose results depend on what else is in the batch")
        kind = RaggedDrafting if self._key.draft.is_ragged else Drafting
        return DecodeStep(self._key, self.prompt, made, self._sizes(), kind)

    def _make_key(self) -> Key:
        self._plain_key = key = super()._make_key()
        draft = DraftKey(self._draft.kind, key.samples and self._draft.is_model, False, any(self._records()))
        # Another model's draft is made for the step's buffers, so the step is not exchanged for a larger one.
        if self._draft.has_buffers and self._needed.new > _MOST_AT_ONCE:
            raise CannotBeCaptured(f"another model drafts, for more than {_MOST_AT_ONCE} tokens")
        sizes = self._rounded_sizes(at_once=self._draft.has_buffers)
        # Between the iterations, the host evaluates criteria and keeps scores.
        key = replace(key, width=LENGTHS[-1] + 1, draft=draft, sizes=sizes, has_criteria=False, kept=())
        if graph_cache.is_refused(self.model, key) and {*POSITIONS}.isdisjoint(key.tensors):
            # The model computes positions from its cache's length in a way that `RowLengths` does not support.
            return replace(key, draft=draft._replace(together=True))
        ragged = replace(key, draft=draft._replace(is_ragged=True))
        is_served = not self._draft.is_model and self._draft.schedule is None and may_share(ragged, self.model.device)
        return ragged if is_served and graph_cache.shares_kv(self.model) is not False else key

    def _start(self, step: DecodeStep, run: Callable[[], Any]) -> Any:
        try:
            return super()._start(step, run)
        except Exception:
            if self._key.draft.is_ragged and graph_cache.is_refused(self.model, self._key):
                graph_cache.note_shared_kv(self.model, False)  # for calls of any shape
            raise

    def _records(self) -> tuple[bool, bool]:
        """Whether the scores, and whether the logits of every position are returned."""
        config = self.config
        returns = bool(config.return_dict_in_generate)
        return returns and bool(config.output_scores), returns and bool(config.output_logits)

    def of_assistant(self, call: Call, source: Tensor | None) -> Assistant:
        """Returns the same call of another model, which drafts for this one. `source` is its encoder's input, if any.

        As in the library, the other model runs its own encoder, which may differ from that of this model.
        """
        config = call.model.config.get_text_config(decoder=True)
        kwargs = dict(self._model_kwargs)
        if kwargs.get("inputs_embeds") is not None:
            raise CannotBeCaptured("embeddings in place of tokens, which another model would not read")
        cache: Cache = DynamicCache(config=config)
        if source is not None:
            # Sounds have no mask. For tokens, the library has made one if none was given.
            masks = {
                name: kwargs[name][:: self._per_input] for name in MASKS[:1] if name in kwargs and source.dim() == 2
            }
            encoded = call.model.get_encoder()(**{call.model.main_input_name: source}, **masks, return_dict=True)
            states = encoded.last_hidden_state.repeat_interleave(self._per_input, dim=0)
            kwargs["encoder_outputs"] = type(encoded)(last_hidden_state=states)
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        kwargs |= releases.with_cache(cache)
        return Assistant(call, self._arguments, kwargs, is_rated=self._draft.threshold > 0)

    def _prepare(self, step: DecodeStep) -> None:
        """Makes another item that a draft needs, if a plain call has a recorded step to use meanwhile.

        Raises CannotBeCaptured if a draft still needs more, or would gain nothing.
        """
        try:
            self._draft.make(0.0)
        except CannotBeCaptured:
            self._back_off.give_up()
            raise
        drafting, costs = step.drafting, step.drafting.costs
        has_plain = graph_cache.kept(self.model, self._plain_key) is not None
        costs.only_timed = self._must_pay and has_plain and self._draft.is_prepared
        if not costs.only_timed:
            return

        def begin() -> None:
            step.begin(self.prompt, self.fill())
            step.choose_first(self.prompt.logits, self.host)

        is_ready, reason = False, "what drafts need is made little by little, in calls without them"
        if costs.plain is not None:  # plain calls of few tokens do not measure their step
            budget = self._ledger.budget(self._key)
            make = partial(make_next, budget, drafting, self.model, self._draft, costs.plain, begin)
            is_ready = self._start(step, make)
            if costs.cannot_pay:
                self._give_up(costs)
                is_ready, reason = False, "drafts would gain nothing"
        if not is_ready:
            graph_cache.give_back(self.model, step)
            raise CannotBeCaptured(reason)

    def _decode(self, step: DecodeStep) -> DecodeStep:
        prompt, rows = self.prompt, self.prompt.inputs * self._per_input
        costs = step.drafting.costs
        costs.plain = seconds_of_step(self.model, self._plain_key)
        self._prepare(step)
        self._draft.begin(step.drafting, self)
        step.begin(prompt, self.fill())
        step.choose_first(prompt.logits, self.host)
        self._current = step
        put = None if self._streamer is None else self._put
        stops = self._code.stops if self._code.criteria else None
        self._positions = Positions(rows, stops, put, bool(self.prompt.eos), self._records())
        progress = self._follow(step)
        policy = self._draft.schedule or DraftLength(costs, rows, prompt.new_tokens, self._draft.is_model)
        begun = time.perf_counter()
        while not progress.done:
            if max(progress.lengths) - step.sizes.prompt > step.sizes.new:
                step = self._larger(step)
            progress, begun = self._iterate(step, policy, progress, begun)
        counters.add(ENTRY_POINT, near_ties=int(step.drafting.near_ties), **self._sums)
        self._draft.end()
        if isinstance(policy, DraftLength):
            has_paid = policy.pays()
            if policy.costs.cannot_pay:
                self._give_up(policy.costs)
            elif has_paid is not None:
                (self._back_off.succeed if has_paid else self._back_off.fail)()
        return step

    def _give_up(self, costs: Costs) -> None:
        """Has as many calls as possible run without drafts. Then the next trial measures again, as the machine may have
        been busy.
        """
        self._back_off.give_up()
        costs.forget()

    def _follow(self, step: DecodeStep) -> Progress:
        """Updates draft and positions, after the first token is chosen or a draft is verified. Returns the progress."""
        progress: Progress = step.search.progress()
        self._draft.take(step.drafting, progress.lengths)
        if not self._positions.is_needed:
            return progress
        self._positions.take(step.drafting)
        after: Progress = step.search.progress()
        return after

    def _iterate(
        self, step: DecodeStep, policy: DraftLength | Schedule, progress: Progress, begun: float
    ) -> tuple[Progress, float]:
        """Drafts and verifies some tokens. Returns the search's progress, and the time, which is the next `begun`.

        Between two forward passes, the processor's caches are full of weights: whatever is touched here comes from
        memory, and takes about ten times as long. So this does nothing that an iteration does not need.
        """
        drafting, rows, lengths = step.drafting, progress.rows, progress.lengths
        # One of the tokens that a row may still get is not drafted: the one after the draft.
        decisive = max if drafting.key.has_own_lengths else min
        limit = self.prompt.new_tokens + step.search.prompt_capacity - 1
        most = limit - decisive(lengths[row] for row in rows)
        available = self._draft.available(drafting, rows, min(most, step.key.width - 1))
        if available is not None:  # what a row cannot use is left to the others
            available = [min(count, limit - lengths[row]) for row, count in zip(rows, available, strict=True)]
        drafted = policy.choose(rows, most, available)
        before = time.perf_counter()
        if drafted:
            if available is not None and isinstance(policy, DraftLength):
                self._draft.cut(policy.counts(rows, available, drafted))
            self._start(step, partial(self._draft.propose, drafting, self.model, drafted))
        self._start(step, partial(drafting.verify, self.model, drafted))
        begun += drafting.now(waits=True) - before  # what follows waits for the device anyway
        progress = self._follow(step)
        counts, accepted = self._count_verified(drafting, rows, drafted)
        if available is not None and not drafted:
            counts, accepted = self._draft.hits(rows)
        policy.observe(rows, drafted, counts, accepted)
        ended = time.perf_counter()
        drafting.costs.add(HOST, ended - begun)
        return progress, ended

    def _count_verified(self, drafting: Drafting, rows: list[int], drafted: int) -> tuple[list[int], list[int]]:
        """Counts a verify. Returns the numbers of drafted and of accepted tokens of these rows."""
        self._sums["verifies"] += 1
        if not drafted:
            return [0] * len(rows), [0] * len(rows)
        of_all = drafting.counts.tolist(), drafting.accepted.tolist()
        counts, accepted = ([each[row] for row in rows] for each in of_all)
        drafting.counts.zero_()  # for a verify without a draft
        self._sums["drafted"] += sum(counts)
        self._sums["accepted"] += sum(accepted)
        return counts, accepted


class Assistant(PrefilledCall):
    """The call of a model that drafts for another one: its prefill, and the step that follows."""

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], is_rated: bool) -> None:
        self._is_rated = is_rated
        call.runs_user_code = False
        given = arguments["input_ids"], arguments["generation_config"], model_kwargs
        call.prefilled = prefill(call.model._prefill, call.model, given, {})
        if not call.accelerated:
            raise CannotBeCaptured("the prefill of the assistant is not accelerated")
        super().__init__(call, arguments, model_kwargs)
        if any(self._key.windows):
            raise CannotBeCaptured("an assistant with a sliding window")

    def begin(self, kept: DecodeStep | None, of: Drafting) -> DecodeStep:
        """Begins its step on the sequences of another one, in the kept step if that fits."""
        self._of = of
        step = kept if kept is not None and kept.key == self._key else self._new_step()
        step.begin(self.prompt, self.fill())
        return step

    def _step_with(self, made: list[CapturedProcessor] | None) -> DecodeStep:
        kind = partial(AssistantDrafting, of=self._of)
        return DecodeStep(self._key, self.prompt, made, self._sizes(), kind, self._of.search)

    def _make_key(self) -> Key:
        key = super()._make_key()
        draft = DraftKey("an assistant", key.samples, together=False, is_rated=self._is_rated)
        sizes = self._rounded_sizes(at_once=True)
        return replace(key, width=LENGTHS[-1] + 1, draft=draft, sizes=sizes, has_criteria=False, kept=())


# ---- what the host does at each position: stopping criteria, the streamer, and returned scores


class Positions:
    """The positions of one call that all rows have reached.

    In plain generation, all rows are at the same position in each step. Here, each row advances by its own number of
    tokens, so a position is handled once the last row has reached it. Every call is then made as often, in the same
    order and with the same contents. A row that a criterion ends there loses the tokens after it.

    Args:
        rows: number of sequences of the call.
        stops: tells from tokens, [rows, length], and the scores so far which sequences end, [rows], bool; None if only
            end tokens and lengths end sequences.
        put: receives the tokens of a position, [rows]; None without a streamer.
        ends_singly: a sequence that ends is padded. Otherwise all continue until each has met a criterion.
        records: whether scores, and whether logits are returned.
    """

    def __init__(
        self,
        rows: int,
        stops: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor] | None,
        put: Callable[[Tensor], None] | None,
        ends_singly: bool,
        records: tuple[bool, bool],
    ) -> None:
        self._rows, self._stops, self._put, self._ends_singly = rows, stops, put, ends_singly
        self._has_stopped = torch.zeros(rows, dtype=torch.bool)
        self._keeps = any(records)
        self._records: list[tuple[Tensor, ...] | None] = [() if wanted else None for wanted in records]
        # By row: scores and logits of the tokens after the last position that all rows have reached.
        self._ahead: list[deque[Tensor]] = [deque() for _ in range(rows)]
        self._known: list[int] = []
        self._reached = 0

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self._stops is not None or self._put is not None or self._keeps

    @property
    def records(self) -> Records:
        """The scores and the logits of all positions so far."""
        return self._records[0], self._records[1]

    def take(self, drafting: Drafting) -> None:
        """Handles the positions due after the first token or a verify. May end rows of the step."""
        search = drafting.search
        if not self._known:
            self._reached = search.prompt_capacity
            self._known = [self._reached] * self._rows
        self._keep_scores(drafting)
        due = self._due(drafting)
        while self._reached < due:
            self._reached += 1
            self._note_scores()
            if self._stops is not None:
                start = int(search.start.flatten()[0])
                tokens = search.running_tokens[: self._rows, start : self._reached]
                self._end(drafting, self._stops(tokens.clone(), self._records[0]))
            if self._put is not None:
                self._put(search.running_tokens[: self._rows, self._reached - 1].cpu())
            due = self._due(drafting)

    def _due(self, drafting: Drafting) -> int:
        """Returns the length that all unfinished rows have reached."""
        lengths = drafting.search.length.flatten()[: self._rows]
        unfinished = drafting.search.unfinished.flatten()[: self._rows]
        return int(lengths[unfinished].amin() if bool(unfinished.any()) else lengths.amax())

    def _end(self, drafting: Drafting, stops: Tensor) -> None:
        """Ends the rows of `stops`, [rows], bool, at the present position."""
        self._has_stopped |= stops.cpu()
        if not self._ends_singly:
            stops = torch.full_like(stops, bool(self._has_stopped.all()))
        search = drafting.search
        lengths, unfinished = search.length.flatten(), search.unfinished.flatten()
        ending = torch.zeros_like(unfinished)
        ending[: self._rows] = stops
        ending &= (lengths > self._reached) | ((lengths == self._reached) & unfinished)
        if bool(ending.any()):
            drafting.end(ending, self._reached)

    def _keep_scores(self, drafting: Drafting) -> None:
        """Keeps scores and logits of the tokens that the rows have just taken."""
        if not self._keeps:
            return
        for row, end in enumerate(drafting.search.length.flatten()[: self._rows].tolist()):
            self._ahead[row].extend(drafting.recorded[row, : max(end - self._known[row], 0)].clone().unbind())
            self._known[row] = end

    def _note_scores(self) -> None:
        if not self._keeps:
            return
        both = torch.stack([ahead.popleft() for ahead in self._ahead], dim=1)
        self._records = [
            None if kept is None else (*kept, part.clone()) for kept, part in zip(self._records, both, strict=True)
        ]
