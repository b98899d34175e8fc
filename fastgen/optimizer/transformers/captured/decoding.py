"""One call with a captured step, after its prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from torch import Tensor

from fastgen import interrupts, memory, releases, settings
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.search import NOT_NUMBERS, Search
from fastgen.decoding.kv.states import saved
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.decoding.randomness import RandomState
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.call import Call, DoesNotPay, Unexpected
from fastgen.optimizer.transformers.captured import any_batch, graph_cache, sizes
from fastgen.optimizer.transformers.captured.compaction import Compaction
from fastgen.optimizer.transformers.captured.host import Written
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.prefilled_call import PrefilledCall
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.codebooks import PLAIN
from fastgen.optimizer.transformers.models import reads_padding

# A call of so many replays says how long a step takes.
_ENOUGH_STEPS = 8


class Decoding(PrefilledCall):
    """One call with a captured step, after its prefill."""

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
        self._streamer: Any = arguments.get("streamer")
        self._has_released = False
        self._current: DecodeStep | None = None  # the one that the call is in, from its first token on
        self._compacted: Compaction | None = None  # where inputs have left the step
        # The length behind the last whole step, and what puts the states back to that, where a step may end half-way.
        self._last_whole: tuple[int, Callable[[], None]] | None = None
        super().__init__(call, arguments, model_kwargs)
        self._ledger = Ledger.of(self.model)

    def run(self) -> Any:
        """What the library's loop returns, on the step that fits.

        Raises:
            CannotBeCaptured: it does not work, or would not pay; nothing has been changed then.
        """
        already = 0 if self._streamer is None else self._streamer.count
        try:
            result = self._run()
        except CannotBeCaptured:
            if self._streamer is not None:
                self._streamer.rewind(already)  # another loop puts the same tokens again
            raise
        if self._streamer is not None:
            with self._code.running():
                self._streamer.end()
        return result

    def _run(self) -> Any:
        self._code.check()
        self._eager_steps = self._steps_before_capture()
        random_state = RandomState(self.model.device)
        self._calls = user_code.Calls((*self._processors, *self._code.criteria))
        step = None
        try:
            step = self._step()
            step = self._decode(step)
            result = self._result(step)
        except BaseException as error:
            if not isinstance(error, Exception) or interrupts.behind(error) is not None:
                self._hold_for_user()
                interrupts.pass_on(error)
                raise
            if error is self._code.raised or self._has_released:
                self._hold_for_user()
                raise
            if step is not None:  # before, nothing is drawn, and other threads may have drawn meanwhile
                random_state.restore()
                self._calls.rewind(self.config.do_sample and not graph.is_recorded(self.model.device))
            if memory.is_out(error):
                graph_cache.drop_all()
                raise CannotBeCaptured("out of memory") from None
            kind = CannotBeCaptured if isinstance(error, CannotBeCaptured) else Unexpected
            raise kind(_describe(error)) from error
        finally:
            self._calls.end()
            self._code.raised = None  # its frames hold this object
        if step.is_captured:
            graph_cache.give_back(self.model, step)
        return result

    def _hold_for_user(self) -> None:
        """The call ends in the middle: a cache of the user's has what has been stored until then, by whole steps."""
        if self._current is None or not self._call.cache_is_the_users:
            return
        if self._last_whole is not None and self._last_whole[0] == int(self._current.search.length.max()):
            self._last_whole[1]()  # the step that has ended half-way has changed them already
        self._store.hold(*self._current.materialized())

    def _note_states(self, step: DecodeStep) -> None:
        """To be called in front of each step. One that is replayed in a single piece does not end half-way."""
        is_atomic = step.is_captured and self._key.processors is not None and not self._key.has_criteria
        self._last_whole = None
        if self.prompt.forms and self._call.cache_is_the_users and not is_atomic:
            self._last_whole = int(step.search.length.max()), saved(step.buffers.states)

    @property
    def _must_pay(self) -> bool:
        """Whether a step is to be recorded only where that pays."""
        return self.model.device.type == "cpu" and settings.current().captured_step != "always"

    def _steps_before_capture(self) -> int:
        """Steps that run as they are before one is captured.

        Raises:
            DoesNotPay: none is to be captured in this call.
        """
        # The first one is looked at (`DecodeStep.verify`), so it may as well be one of the call's own; but its results
        # may differ from those of a captured one in the last digits. With "always" no result depends on calls before.
        first = int(settings.current().captured_step != "always")
        if not self._must_pay or graph_cache.kept(self.model, self._key) is not None:
            return first
        asked = self.certain_tokens, self.prompt.new_tokens
        specializes = any_batch.is_recorded(self.model, self._key, self._sizes(), self._key.batch)
        steps = self._ledger.starts_at(self._key, *asked, specializes)
        if self._rows_may_idle:
            others = graph_cache.others(self.model, self._key)
            making = self._ledger.making(specializes) if steps == 0 else None
            larger = self._ledger.with_more_rows(self._key, others, *asked, making)
            if larger is not None:
                self._key = larger
                return first
        if steps is None:
            raise DoesNotPay(lambda tokens: self._note(tokens, tokens))
        return max(steps, first)

    @property
    def _rows_may_idle(self) -> bool:
        """Whether a step for more inputs does the same: those that are left over draw nothing, and nobody sees them."""
        is_seen = self._key.samples or self._key.waits_for_host or self._call.rows_depend_on_each_other
        is_seen |= self._key.codebooks != PLAIN
        return not is_seen

    def _note(self, tokens: int, eager_steps: int) -> None:
        """The call is over."""
        may_end = self.certain_tokens < self.prompt.new_tokens
        self._ledger.note_call(self.own_key, tokens, may_end, eager_steps)
        if self._key.batch != self.own_key.batch:
            self._ledger.note_idle(self.own_key, self._key, tokens)

    def _result(self, step: DecodeStep) -> Any:
        config, search = self.config, step.search
        if bool(search.has_nan):
            raise ValueError(NOT_NUMBERS)
        count = slice(self.prompt.inputs), self._count
        sequences = search.results(*count) if self._compacted is None else self._compacted.results(step)
        if self._call.returns_cache:
            self._store.hold(*step.materialized())
        if not config.return_dict_in_generate:
            return sequences
        found = {**recorded(search, *count, self._code.kept, config), **releases.with_cache(self._store.cache)}
        return self.output(sequences=sequences, **found)

    def _decode(self, step: DecodeStep) -> DecodeStep:
        """Runs the search to its end; returns the step, or the larger one that has replaced it."""
        prompt, config = self.prompt, self.config
        options = {"length_penalty": config.length_penalty} if config.num_beams > 1 else {}
        step.begin(prompt, self.fill(), **options)
        step.choose_first(prompt.logits, self.host)
        self._current = step
        self._stream(step)
        done, replays = 1, 0
        ends: list[float] | None = None  # of the replays, and of what was before them
        compaction = self._compaction()
        while not step.is_over() and done < prompt.new_tokens:
            if done >= step.sizes.new:
                step = self._larger(step)
                if compaction is not None:
                    compaction.refresh(step)
                ends = None
            captures, was_kept = done > self._eager_steps, step.is_captured
            start = time.perf_counter()
            self._start(step, partial(self._verify, step, done, captures, compaction))
            seconds = time.perf_counter() - start
            self._stream(step)
            if ends is None:
                ends = self._first_steps(step, was_kept, seconds)
            else:
                replays += 1
                ends.append(time.perf_counter())
            # Also behind the first step of larger buffers: others may have left such, and then they are not exchanged.
            if compaction is not None and step.is_captured:
                compaction.after(step, seconds)
            if self._may_release(step):
                self._calls.end()
                self.release()
            done += 1
        self._compacted = compaction if compaction is not None and compaction.has_begun else None
        if ends is not None and self._compacted is None and not self._key.waits_for_host and len(ends) > _ENOUGH_STEPS:
            # Other work may have had the processors for a part of the call.
            step.seconds_of_calls.append(median(end - begin for begin, end in pairwise(ends)))
            self._ledger.replayed[step.key.rows] = min(step.seconds_of_calls)
        self._note(done, done - 1 - replays)
        return step

    def _stream(self, step: DecodeStep) -> None:
        """Puts the tokens of the last step, but of one behind the end, and of one that ends in an error."""
        if self._streamer is None:
            return
        rows, search = self.prompt.inputs * self._per_input, step.search
        if bool(search.taken.any()) and not bool(search.has_nan):
            self._put(search.tokens[:rows])

    def _put(self, tokens: Tensor) -> None:
        with self._code.running():
            self._streamer.put(tokens.to("cpu", copy=True))

    def _verify(self, step: DecodeStep, done: int, captures: bool, compaction: Compaction | None) -> None:
        if (captures or step.is_captured) and graph.is_recorded(step.device):
            any_batch.specialize(self.model, step, None if compaction is None else compaction.places)
        self._note_states(step)
        step.verify(self.model, step.turns(self.host, done), captures)

    def _compaction(self) -> Compaction | None:
        """Where it changes nothing that anybody sees: draws, what is returned of every step, other rows."""
        is_seen = self._key.samples or self._key.waits_for_host or self._streamer is not None
        is_seen |= self.config.return_dict_in_generate or self._call.cache_is_the_users
        is_seen |= self._key.codebooks != PLAIN
        if is_seen or not graph.is_recorded(self.model.device) or self._call.rows_depend_on_each_other:
            return None
        if not reads_padding(self.model, self.config):
            return None
        given = self.model, self._key, self._ledger, self.prompt.inputs, self._count, self.fill()
        return Compaction(*given, self._refresh)

    def _first_steps(self, step: DecodeStep, was_kept: bool, seconds: float) -> list[float] | None:
        """Takes what one of the first steps took; if all that follow are replays, the time.

        What the host does in a step, such as the user's code, says nothing of the next call's.
        """
        is_measured = not self._key.waits_for_host
        if not step.is_captured:
            if is_measured:
                self._ledger.note_eager(step.key.rows, seconds)
            return None
        if not (step.key.sizes.new or step.parts.follows):
            graph_cache.bind(self.model, step)
        if not (was_kept or step.parts[1].is_specialized) and is_measured:
            self._ledger.recording = seconds
        return [time.perf_counter()]

    def _start(self, step: DecodeStep, run: Callable[[], Any]) -> Any:
        """Runs the next step. What keeps it from being captured now will do so in the next call, too."""
        try:
            return run()
        except Exception as error:
            is_users = error is self._code.raised or interrupts.behind(error) is not None
            is_ours = not (is_users or isinstance(error, (Written, OfThisCall)))
            if is_ours and not step.parts.is_complete and not memory.is_out(error):
                graph_cache.refuse(self.model, self._key, _describe(error))
            raise

    def _may_release(self, step: DecodeStep) -> bool:
        """Whether the step has all that is needed, and will not be exchanged for a larger one."""
        is_whole = step.is_captured and self.prompt.new_tokens <= step.sizes.new
        # The user's code may yet do what a captured step cannot.
        begins_again = self._call.runs_user_code and not self._calls.is_much()
        return is_whole and not self._has_released and not begins_again

    def _larger(self, step: DecodeStep) -> DecodeStep:
        """The step with room for more of what is generated, or another one where this one has got to."""
        more = sizes.more_new(step.sizes, on_gpu=not graph.is_recorded(step.device))
        if not step.key.sizes.new:
            step.make_room(more)
            return step
        self._key = replace(step.key, sizes=more)
        larger = self._step()
        larger.take_over(step)
        self._current = None if self._current is None else larger
        graph_cache.give_back(self.model, step)
        return larger

    def _step(self) -> DecodeStep:
        step = graph_cache.take(self.model, self._key, self._new_step)
        if not self._refresh(step.processors or ()):
            if step.is_captured:
                graph_cache.give_back(self.model, step)  # for the calls that it fits
            step = self._new_step()
        step.make_room(self._sizes())
        return step

    def release(self) -> None:
        """Frees what the prefill has stored. The library's loop cannot go on from there any more."""
        self._has_released = True
        self._store.release()
        self.prompt.own.clear()
        self.prompt.cross.clear()
        self.prompt.states.clear()


def recorded(search: Search, inputs: slice, count: int, kept: dict[str, list[Tensor]], config: Any) -> dict[str, Any]:
    """What `return_dict_in_generate` returns beside the sequences of these inputs: their rows count from the first one.

    Args:
        count: sequences that each of them returns.
        kept: what is returned of every step, by name.
        config: the generation config.
    """
    found: dict[str, Any] = {name: tuple(each) for name, each in kept.items()}
    if isinstance(search, BeamSearch):
        found["beam_indices"] = search.result_indices(inputs, count)
        found["sequences_scores"] = search.result_scores(inputs, count) if config.output_scores else None
    return found


def _describe(error: Exception) -> str:
    if isinstance(error, CannotBeCaptured):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
