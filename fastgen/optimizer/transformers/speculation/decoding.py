"""One call with speculative decoding, after its first pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastgen import counters
from fastgen.decoding.shared import CannotBeCaptured
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.step import CapturedStep, Key
from fastgen.optimizer.transformers.models import positions_of_step
from fastgen.optimizer.transformers.speculation.drafts import Draft, DraftKey
from fastgen.optimizer.transformers.speculation.pace import LENGTHS, Pace
from fastgen.optimizer.transformers.speculation.step import SpeculativeStep

ENTRY_POINT = "transformers.speculation"


class SpeculativeDecoding(Decoding):
    """Rounds of a draft and a check of it, until all sequences are finished.

    Raises:
        CannotBeCaptured: the call is not served; nothing has been changed.
    """

    _step_type = SpeculativeStep

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], draft: Draft) -> None:
        self._draft = draft
        super().__init__(call, arguments, model_kwargs)
        if self._key.processors is None:
            raise CannotBeCaptured("a logits processor that runs on the host")
        if self._key.has_criteria:
            raise CannotBeCaptured("stopping criteria that run on the host")
        if any(self._key.windows):
            raise CannotBeCaptured("a sliding window")
        if positions_of_step(self._model) != 1:
            raise CannotBeCaptured("a model that stores several positions in a step")

    def _steps_to_record_for(self) -> int | None:
        return None if self._draft.asked_for else super()._steps_to_record_for()

    def _make_key(self) -> Key:
        key = super()._make_key()
        names = set(key.tensors)
        has_own_positions = {"attention_mask", "position_ids"} <= names or "decoder_position_ids" in names
        draft = DraftKey(self._draft.kind, key.samples and self._draft.is_model, together=not has_own_positions)
        return replace(key, width=LENGTHS[-1] + 1, draft=draft)

    def _decode(self, step: CapturedStep) -> CapturedStep:
        assert isinstance(step, SpeculativeStep), "made of `_step_type`"
        prompt, rows = self._prompt, self._prompt.inputs * self._per_input
        step.begin(prompt, self._fill())
        step.choose_first(prompt.logits, self._host)
        self._draft.begin(step, self._eos)
        pace = Pace(step, rows, prompt.new_tokens, self._draft.is_model, self._draft.schedule)
        while not bool(step.search.done):
            longest = int(step.search.length.max()) - step.key.prompt_capacity
            if longest > step.key.capacity:
                larger = self._larger(step)
                assert isinstance(larger, SpeculativeStep), "made of `_step_type`"
                step = larger
            self._round(step, pace, prompt.new_tokens - longest)
        counters.add(ENTRY_POINT, near_ties=int(step.near_ties))
        return step

    def _round(self, step: SpeculativeStep, pace: Pace, left: int) -> None:
        """Some tokens are drafted and checked; no row has more than `left` to go."""
        unfinished = step.search.unfinished.flatten().tolist()
        rows = [row for row, goes_on in enumerate(unfinished) if goes_on]
        available = self._draft.available(step, rows, left - 1)
        drafted = pace.choose(step, rows, left - 1, available)
        step.counts.zero_()
        if drafted:
            self._start(step, partial(self._draft.propose, step, self._model, drafted))
        self._start(step, partial(step.check, self._model, drafted))
        self._draft.take(step)
        counts, accepted = ([each.tolist()[row] for row in rows] for each in (step.counts, step.accepted))
        pace.observe(step, rows, drafted, counts, accepted)
        counters.add(ENTRY_POINT, checks=1, drafted=sum(counts), accepted=sum(accepted))
