"""One call with speculative decoding, after its prefill."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from fastgen import counters, releases, settings
from fastgen.decoding.beams import rows_of
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.decoding.speculation import draft_length
from fastgen.decoding.speculation.back_off import BackOff
from fastgen.decoding.speculation.costs import HOST
from fastgen.decoding.speculation.draft_length import LEAST_GAIN, MOST_PAUSES, DraftLength, can_begin
from fastgen.decoding.speculation.speculative_search import Progress
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.decoding import MASKS, Decoding
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import POSITIONS, CapturedStep, Key
from fastgen.optimizer.transformers.models import positions_of_step
from fastgen.optimizer.transformers.speculation import leaving
from fastgen.optimizer.transformers.speculation.assistant_step import AssistantStep
from fastgen.optimizer.transformers.speculation.drafts import Draft, DraftKey
from fastgen.optimizer.transformers.speculation.positions import Positions
from fastgen.optimizer.transformers.speculation.preparation import Preparation
from fastgen.optimizer.transformers.speculation.ragged_step import RaggedStep, serves
from fastgen.optimizer.transformers.speculation.step import LENGTHS, SpeculativeStep

ENTRY_POINT = counters.DRAFTS
# The parts of a step with drafts are recorded once calls have asked for so many steps.
PAYS_FROM = settings.RECORDING_PAYS_FROM
# Of a step, that are recorded at first: a draft, and a check of it. A check without one takes a step of the plain call.
_PARTS = 2
# Where another model drafts, buffers are for all tokens that may come. Who asks for more has the library's loop.
_MOST_AT_ONCE = 2**16

_pauses: weakref.WeakKeyDictionary[Any, dict[tuple[type[Draft], int], BackOff]] = weakref.WeakKeyDictionary()


def _pauses_of(model: Any, draft: Draft, rows: int) -> BackOff:
    """Those of the calls with a draft of this kind and so many rows; found before anything is made for the call."""
    return _pauses.setdefault(model, {}).setdefault((type(draft), rows), draft_length.pauses())


def seconds_of_step(model: Any, key: Key) -> float | None:
    """What a plain step of this key was measured to take in the last calls; None if no such step is kept."""
    step = graph_cache.kept(model, key)
    return min(step.seconds_of_calls) if step is not None and step.seconds_of_calls else None


# Models whose rows cannot share the tokens of a check: their attention is not one operator, for example.
_not_ragged: weakref.WeakSet[Any] = weakref.WeakSet()


class SpeculativeDecoding(Decoding):
    """Rounds of a draft and a check of it, until all sequences are finished.

    Raises:
        CannotBeCaptured: the call is not served; nothing has been changed.
    """

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], draft: Draft) -> None:
        self._draft = draft
        self._length = 0  # tokens drafted in the last round
        self._sums = {"checks": 0, "drafted": 0, "accepted": 0}
        self._arguments, self._streamer = arguments, arguments.get("streamer")
        self._pauses = _pauses_of(call.model, draft, arguments["input_ids"].shape[0])
        if draft.schedule is None and self._pauses.waits():
            raise CannotBeCaptured("drafts have gained nothing in the calls before")
        super().__init__(call, arguments, model_kwargs)
        if self._key.processors is None:
            raise CannotBeCaptured("a logits processor that runs on the host")
        if any(self._key.windows):
            raise CannotBeCaptured("a sliding window")
        if self._config.return_dict_in_generate and len(self._input_ids) > 1 and self._eos:
            # Rows that are finished go on in the library, which returns what they store and score then.
            raise CannotBeCaptured("a returned cache of sequences that end one by one")
        if positions_of_step(self._model) != 1:
            raise CannotBeCaptured("a model that stores several positions in a step")
        if draft.schedule is None and self._is_too_short():
            raise CannotBeCaptured("a call of so few tokens that drafts might lose time")

    def _is_too_short(self) -> bool:
        """Whether the call may lose too little time for a draft, by what is known before it has its step.

        What is known may be wrong: after many such calls, it is measured again.
        """
        kept, plain_step = (graph_cache.kept(self._model, key) for key in (self._key, self._plain_key))
        # A call without drafts must have a step, too. With a streamer, the library's loop would run.
        is_served = plain_step is not None or not self._must_pay
        if kept is None or not is_served or self._streamer is not None:
            return False
        assert isinstance(kept, SpeculativeStep), "the key is one of a step that drafts"
        # Plain calls of a few tokens do not say what a step takes: a check without a draft takes about as long.
        costs = kept.costs
        costs.plain = seconds_of_step(self._model, self._plain_key)
        if can_begin(costs, self._prompt.new_tokens):
            return False
        costs.short_calls += 1
        if costs.short_calls > MOST_PAUSES:
            costs.forget()
            return False
        return True

    def run(self) -> Any:
        if self._draft.is_prepared:
            Preparation.of(self._model, self._key).steps += self._steps_asked_for() if self._must_pay else 0
        already = 0 if self._streamer is None else self._streamer.count
        try:
            result = super().run()
        except CannotBeCaptured:
            if self._streamer is not None:
                self._streamer.rewind(already)  # another loop puts the same tokens again
            raise
        if self._streamer is not None:
            with self._users():
                self._streamer.end()
        return result

    def _result(self, step: CapturedStep) -> Any:
        result = super()._result(step)
        if not any(self._records()):
            return result
        scores, logits = self._positions.records
        return type(result)(**{**result, "scores": scores, "logits": logits})

    def _steps_asked_for(self) -> int:
        """Steps that the call is likely to make."""
        return min(self._prompt.new_tokens, settings.STEPS_OF_A_CALL) if self._eos else self._prompt.new_tokens

    def _steps_before_capture(self) -> int:
        at_once_from = self._draft.recorded_at_once_from
        if not self._must_pay or (at_once_from is not None and self._prompt.new_tokens >= at_once_from):
            return 0
        # There are several parts to be recorded: it takes more steps until they have paid.
        parts = 1 if at_once_from is not None else _PARTS
        if not self._ledger.has_asked_for(self._key, -(-self._steps_asked_for() // parts), PAYS_FROM):
            raise CannotBeCaptured(counters.NOT_YET)
        return 0

    def _step_with(self, made: list[CapturedProcessor] | None) -> SpeculativeStep:
        # So do the positions of a check: what is drafted would change what is in front of it.
        if self._call.rows_depend_on_each_other:
            raise CannotBeCaptured("a model whose results depend on what else is in the batch")
        kind = RaggedStep if self._key.draft.is_ragged else SpeculativeStep
        return kind(self._key, self._prompt, made, self._sizes())

    def _make_key(self) -> Key:
        self._plain_key = key = super()._make_key()
        draft = DraftKey(self._draft.kind, key.samples and self._draft.is_model, False, any(self._records()))
        # What another model drafts with is made for the buffers of the step, which is not exchanged for a larger one.
        if self._draft.has_buffers and self._needed.new > _MOST_AT_ONCE:
            raise CannotBeCaptured(f"another model drafts, for more than {_MOST_AT_ONCE} tokens")
        sizes = self._rounded_sizes(at_once=self._draft.has_buffers)
        # Criteria are looked at between the rounds, and scores are kept there.
        key = replace(key, width=LENGTHS[-1] + 1, draft=draft, sizes=sizes, has_criteria=False, kept=())
        if graph_cache.is_refused(self._model, key) and {*POSITIONS}.isdisjoint(key.tensors):
            # It computes positions from the length of its cache in a way that `RowLengths` cannot stand for.
            return replace(key, draft=draft._replace(together=True))
        ragged = replace(key, draft=draft._replace(is_ragged=True))
        is_served = not self._draft.is_model and self._draft.schedule is None and serves(ragged, self._model.device)
        return ragged if is_served and self._model not in _not_ragged else key

    def _start(self, step: CapturedStep, run: Callable[[], Any]) -> Any:
        try:
            return super()._start(step, run)
        except Exception:
            if self._key.draft.is_ragged and graph_cache.is_refused(self._model, self._key):
                _not_ragged.add(self._model)  # whatever the shapes of a call are
            raise

    def _records(self) -> tuple[bool, bool]:
        """Whether the scores, and whether the logits of every position are returned."""
        config = self._config
        returns = bool(config.return_dict_in_generate)
        return returns and bool(config.output_scores), returns and bool(config.output_logits)

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self._eos

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        return int(self._prompt.logits.shape[-1])

    def of_assistant(self, call: Call, source: Tensor | None) -> Assistant:
        """The same call of another model, which drafts for this one; `source` is what its encoder reads, if it has one.

        As in the library, an encoder of its own: it may be another one than that of this model.
        """
        config = call.model.config.get_text_config(decoder=True)
        kwargs = dict(self._model_kwargs)
        cache: Cache = DynamicCache(config=config)
        if source is not None:
            # Of sounds there is no mask, and of tokens one that the library has made where none was given.
            masks = {
                name: kwargs[name][:: self._per_input] for name in MASKS[:1] if name in kwargs and source.dim() == 2
            }
            encoded = call.model.get_encoder()(**{call.model.main_input_name: source}, **masks, return_dict=True)
            states = encoded.last_hidden_state.repeat_interleave(self._per_input, dim=0)
            kwargs["encoder_outputs"] = type(encoded)(last_hidden_state=states)
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        kwargs |= releases.with_cache(cache)
        return Assistant(call, self._arguments, kwargs, is_rated=self._draft.threshold > 0)

    def _prepare(self, step: SpeculativeStep) -> None:
        """What a draft needs is made before, little by little, where plain calls have a recorded step meanwhile.

        Raises:
            CannotBeCaptured: there is too little for a draft, or it would gain nothing.
        """
        try:
            self._draft.make(0.0)
        except CannotBeCaptured:
            self._pauses.give_up()
            raise
        has_plain = graph_cache.kept(self._model, self._plain_key) is not None
        is_at_once = not self._must_pay
        step.costs.only_timed = not is_at_once and has_plain and self._draft.is_prepared
        if not step.costs.only_timed:
            return

        def begin() -> None:
            step.begin(self._prompt, self._fill())
            step.choose_first(self._prompt.logits, self._host)

        is_ready, reason = False, "what drafts need is made little by little, in calls without them"
        plain = step.costs.plain
        if plain is not None:  # calls of a few tokens do not say what a step takes
            preparation = Preparation.of(self._model, self._key)
            make = partial(preparation.make_next, step, self._model, self._draft, plain, begin)
            is_ready = self._start(step, make)
            if step.costs.most_gain() < LEAST_GAIN:
                step.costs.forget()  # the machine may have been busy: the next time, they are measured again
                self._pauses.give_up()
                is_ready, reason = False, "drafts would gain nothing"
        if not is_ready:
            graph_cache.give_back(self._model, step)
            raise CannotBeCaptured(reason)

    def _decode(self, step: CapturedStep) -> CapturedStep:
        assert isinstance(step, SpeculativeStep), "what `_step_with` makes"
        prompt, rows = self._prompt, self._prompt.inputs * self._per_input
        step.costs.plain = seconds_of_step(self._model, self._plain_key)
        self._prepare(step)
        self._draft.begin(step, self)
        step.begin(prompt, self._fill())
        step.choose_first(prompt.logits, self._host)
        self._positions = self._make_positions(rows)
        progress = self._follow(step)
        policy = DraftLength(step.costs, rows, prompt.new_tokens, self._draft.is_model, self._draft.schedule)
        left: list[tuple[SpeculativeStep, Tensor]] = []
        begun = time.perf_counter()
        while not progress.done:
            key = self._key_to_leave_for(step, progress)
            if key is not None:
                left.append((step, leaving.staying(step, key.batch)))
                step = self._smaller(*left[-1], key, policy)
                progress = step.search.progress()
                begun = time.perf_counter()
            if max(progress.lengths) - step.sizes.prompt > step.sizes.new:
                larger = self._larger(step)
                assert isinstance(larger, SpeculativeStep), "what `_step_with` makes"
                step = larger
            progress, begun = self._round(step, policy, progress, begun)
        pays = policy.pays()
        if policy.cannot_pay:
            self._pauses.give_up()
        elif pays is not None:
            (self._pauses.succeed if pays else self._pauses.fail)()
        counters.add(ENTRY_POINT, near_ties=int(step.near_ties), **self._sums)
        self._draft.end()
        whole = self._whole(step, left)
        if policy.cannot_pay and not self._draft.is_prepared:
            whole.costs.forget()  # the machine may have been busy: the next trial measures again, as `_prepare` does
        return whole

    def _key_to_leave_for(self, step: SpeculativeStep, progress: Progress) -> Key | None:
        """Of a step with fewer inputs, if those that go on are to leave the others for it."""
        # What is done at each position, an assistant's step, and a cache that is returned are those of the whole batch.
        if self._positions.is_needed or self._draft.has_buffers or self._call.returns_cache:
            return None
        key = leaving.smaller_key(step)
        if key is None:
            return None
        shortest = min(progress.lengths[row] for row in progress.rows)
        tokens = self._prompt.new_tokens + step.search.prompt_capacity - shortest
        return key if leaving.pays(self._model, step, key, self._length, tokens) else None

    def _smaller(self, step: SpeculativeStep, inputs: Tensor, key: Key, policy: DraftLength) -> SpeculativeStep:
        """A step that goes on with these inputs of another one."""
        rows = rows_of(inputs, key.per_input)
        self._key, self._processors = key, leaving.narrowed(self._processors, rows)
        smaller = self._step()
        assert isinstance(smaller, SpeculativeStep), "what `_step_with` makes"
        smaller.costs.only_timed = False
        smaller.take_over(step, inputs)
        policy.keep(smaller.costs, rows.tolist())
        self._draft.keep(rows.tolist())
        counters.add(ENTRY_POINT, rows_left=step.key.rows - len(rows))
        return smaller

    def _whole(self, step: SpeculativeStep, left: list[tuple[SpeculativeStep, Tensor]]) -> SpeculativeStep:
        """The first step, with what the smaller ones have found."""
        for larger, inputs in reversed(left):
            step.search.put_back(larger.search, inputs)
            if step.is_captured:
                graph_cache.give_back(self._model, step)
            step = larger
        return step

    def _make_positions(self, rows: int) -> Positions:
        put = None if self._streamer is None else partial(self._put, self._streamer)
        return Positions(rows, self._stops if self._criteria else None, put, bool(self._eos), self._records())

    def _put(self, streamer: Any, tokens: Tensor) -> None:
        with self._users():
            streamer.put(tokens)

    def _follow(self, step: SpeculativeStep) -> Progress:
        """The first token has been chosen, or a check is done."""
        progress = step.search.progress()
        self._draft.take(step, progress.lengths)
        if not self._positions.is_needed:
            return progress
        self._positions.take(step)
        return step.search.progress()

    def _round(
        self, step: SpeculativeStep, policy: DraftLength, progress: Progress, begun: float
    ) -> tuple[Progress, float]:
        """Some tokens are drafted and checked. Returns how far the search is then, and the time.

        Between two checks the caches are full of weights: whatever is touched here is read from memory, and takes about
        ten times as long. So nothing is done that a round does not need.

        Args:
            begun: when the last round has ended.
        """
        rows, lengths = progress.rows, progress.lengths
        # Of what a row may still get, one token is not drafted: that behind the draft.
        decisive = max if step.has_own_lengths else min
        limit = self._prompt.new_tokens + step.search.prompt_capacity - 1
        most = limit - decisive(lengths[row] for row in rows)
        available = self._draft.available(step, rows, min(most, step.key.width - 1))
        is_ragged = step.key.draft.is_ragged
        if available is not None and is_ragged:  # what a row cannot use is for others
            available = [min(count, limit - lengths[row]) for row, count in zip(rows, available, strict=True)]
        self._length = drafted = policy.choose(rows, most, available)
        before = time.perf_counter()
        if drafted:
            if available is not None and is_ragged:
                self._draft.cut(policy.shares(rows, available, drafted))
            self._start(step, partial(self._draft.propose, step, self._model, drafted))
        self._start(step, partial(step.check, self._model, drafted))
        begun += time.perf_counter() - before
        progress = self._follow(step)
        counts, accepted = self._come_of(step, rows, drafted)
        policy.observe(rows, drafted, counts, accepted)
        if available is not None and not drafted:
            policy.learn(rows, self._draft.hits(rows))
        ended = time.perf_counter()
        step.costs.add(HOST, ended - begun)
        return progress, ended

    def _come_of(self, step: SpeculativeStep, rows: list[int], drafted: int) -> tuple[list[int], list[int]]:
        """Counts the last check. Returns how many drafted tokens these rows had in it, and how many were accepted."""
        self._sums["checks"] += 1
        if not drafted:
            return [0] * len(rows), [0] * len(rows)
        of_all = step.counts.tolist(), step.accepted.tolist()
        counts, accepted = ([each[row] for row in rows] for each in of_all)
        step.counts.zero_()  # a check without a draft finds none
        self._sums["drafted"] += sum(counts)
        self._sums["accepted"] += sum(accepted)
        return counts, accepted


class Assistant(Decoding):
    """The call as one of a model that drafts for another one: its prefill, and the step that follows."""

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], is_rated: bool) -> None:
        self._is_rated = is_rated
        call.runs_user_code = False
        call.prefilled = call.model._prefill(arguments["input_ids"], arguments["generation_config"], model_kwargs)
        if not call.accelerated:
            raise CannotBeCaptured("the prefill of the assistant is not accelerated")
        super().__init__(call, arguments, model_kwargs)
        if any(self._key.windows):
            raise CannotBeCaptured("an assistant with a sliding window")

    def begin(self, kept: AssistantStep | None, of: SpeculativeStep) -> AssistantStep:
        """Its step on the sequences of another one: the one that is kept, if it fits."""
        self._of = of
        step = kept if kept is not None and kept.key == self._key else self._new_step()
        assert isinstance(step, AssistantStep), "what `_step_with` makes"
        step.begin(self._prompt, self._fill())
        return step

    def _step_with(self, made: list[CapturedProcessor] | None) -> AssistantStep:
        return AssistantStep(self._key, self._prompt, made, self._sizes(), self._of)

    def _make_key(self) -> Key:
        key = super()._make_key()
        draft = DraftKey("an assistant", key.samples, together=False, is_rated=self._is_rated)
        sizes = self._rounded_sizes(at_once=True)
        return replace(key, width=LENGTHS[-1] + 1, draft=draft, sizes=sizes, has_criteria=False, kept=())
