"""Runs one call on a captured step, from its prefill to its result."""

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
from fastgen.decoding.kv.states import saved_states
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.decoding.retrying import RandomState
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.call import Call, DoesNotPay, Unexpected
from fastgen.optimizer.transformers.captured import any_batch, graph_cache
from fastgen.optimizer.transformers.captured.any_batch import Compaction
from fastgen.optimizer.transformers.captured.choice import Written
from fastgen.optimizer.transformers.captured.key import more_new
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.prefilled_call import PrefilledCall
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.models import reads_padding
from fastgen.optimizer.transformers.special_models import PLAIN

# Replays that a call needs before its median time per step counts as a measurement.
_ENOUGH_STEPS = 8


class Decoding(PrefilledCall):
    """Runs one call on a captured step, from its prefill to its result."""

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
        self._streamer: Any = arguments.get("streamer")
        self._has_released = False
        self._current: DecodeStep | None = None  # the step that the call runs on, from its first token on
        self._compacted: Compaction | None = None  # set if finished inputs have left the step
        # If a step may end half-way: the length after the last whole step, and what restores the states of that length.
        self._last_whole: tuple[int, Callable[[], None]] | None = None
        super().__init__(call, arguments, model_kwargs)
        self._ledger = Ledger.of(self.model)

    def run(self) -> Any:
        """Returns what the library's loop returns.

        Raises:
            CannotBeCaptured: the captured step does not work, or would not pay. Nothing has been changed then.
        """
        already = 0 if self._streamer is None else self._streamer.count
        try:
            result = self._run()
        except CannotBeCaptured:
            if self._streamer is not None:
                self._streamer.rewind(already)  # the loop that takes over puts the same tokens again
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
            if step is not None:  # before that, this call draws nothing, and other threads may have drawn meanwhile
                random_state.restore()
                self._calls.rewind(self.config.do_sample and not graph.is_recorded(self.model.device))
            if memory.is_out(error):
                graph_cache.drop_all()
                raise CannotBeCaptured("out of memory") from None
            kind = CannotBeCaptured if isinstance(error, CannotBeCaptured) else Unexpected
            raise kind(_describe(error)) from error
        finally:
            self._calls.end()
            self._code.raised = None  # the frames of its traceback hold this object
        if step.is_captured:
            graph_cache.give_back(self.model, step)
        return result

    def _hold_for_user(self) -> None:
        """If the call ends early, leaves the K and V that whole steps have stored in the user's own cache."""
        if self._current is None or not self._call.cache_is_the_users:
            return
        if self._last_whole is not None and self._last_whole[0] == int(self._current.search.length.max()):
            self._last_whole[1]()  # the step that ended half-way has changed the states already
        self._store.hold(*self._current.materialized())

    def _note_states(self, step: DecodeStep) -> None:
        """Saves the states before a step that may end half-way. A step replayed in a single piece cannot."""
        is_atomic = step.is_captured and self._key.processors is not None and not self._key.has_criteria
        self._last_whole = None
        if self.prompt.forms and self._call.cache_is_the_users and not is_atomic:
            self._last_whole = int(step.search.length.max()), saved_states(step.buffers.states)

    @property
    def _must_pay(self) -> bool:
        """Whether a step is recorded only if that pays."""
        return self.model.device.type == "cpu" and settings.current().captured_step != "always"

    def _steps_before_capture(self) -> int:
        """Returns how many steps run eagerly before one is captured.

        Raises:
            DoesNotPay: no step is to be captured in this call.
        """
        # One eager step is watched (`Parts.run`), and may as well be one of the call's own. Its results may differ from
        # those of a captured step in the last digits, though. With "always", no result may depend on earlier calls.
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
        """Whether a step for more inputs gives the same results: its spare rows draw nothing, and nobody sees them."""
        is_seen = self._key.samples or self._key.waits_for_host or self._call.rows_depend_on_each_other
        is_seen |= self._key.codebooks != PLAIN
        return not is_seen

    def _note(self, tokens: int, eager_steps: int) -> None:
        """Notes in the ledger how many steps the finished call has made."""
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
        """Runs the search to its end. Returns the step, or the larger step that has replaced it."""
        prompt, config = self.prompt, self.config
        options = {"length_penalty": config.length_penalty} if config.num_beams > 1 else {}
        step.begin(prompt, self.fill(), **options)
        step.choose_first(prompt.logits, self.host)
        self._current = step
        self._stream(step)
        done, replays = 1, 0
        ends: list[float] | None = None  # times at which the replays ended, after that of the step before them
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
            # Also after the first step in larger buffers: if an earlier call has left these, it is a replay, too.
            if compaction is not None and step.is_captured:
                compaction.after(step, seconds)
            if self._may_release(step):
                self._calls.end()
                self.release()
            done += 1
        self._compacted = compaction if compaction is not None and compaction.has_begun else None
        if ends is not None and self._compacted is None and not self._key.waits_for_host and len(ends) > _ENOUGH_STEPS:
            # The median, as other processes may have used the processors during a part of the call.
            step.seconds_of_calls.append(median(end - begin for begin, end in pairwise(ends)))
            self._ledger.replayed[step.key.rows] = min(step.seconds_of_calls)
        self._note(done, done - 1 - replays)
        return step

    def _stream(self, step: DecodeStep) -> None:
        """Puts the tokens of the last step, unless the search was over before it or its scores were NaN."""
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
        """Returns the batch compaction of the call; None if the user could see a difference.

        Draws, scores returned of every step, and rows that depend on each other would show one.
        """
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
        """Notes how long one of the first steps took. Returns the present time once all later steps are replays.

        Steps in which the host runs code, such as the user's, are not noted: they say nothing about the next call.
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
        """Runs the next step. If it cannot be captured, notes that, because later calls would fail likewise."""
        try:
            return run()
        except Exception as error:
            is_users = error is self._code.raised or interrupts.behind(error) is not None
            is_ours = not (is_users or isinstance(error, (Written, OfThisCall)))
            if is_ours and not step.parts.is_complete and not memory.is_out(error):
                graph_cache.refuse(self.model, self._key, _describe(error))
            raise

    def _may_release(self, step: DecodeStep) -> bool:
        """Whether the step has all that it needs from the prefill, and will not be exchanged for a larger one."""
        is_whole = step.is_captured and self.prompt.new_tokens <= step.sizes.new
        # The user's code may still do something that a captured step cannot.
        begins_again = self._call.runs_user_code and not self._calls.is_much()
        return is_whole and not self._has_released and not begins_again

    def _larger(self, step: DecodeStep) -> DecodeStep:
        """Returns the step with room for more new tokens, or a larger step that continues the call."""
        more = more_new(step.sizes, on_gpu=not graph.is_recorded(step.device))
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
                graph_cache.give_back(self.model, step)  # for calls whose processors fit
            step = self._new_step()
        step.make_room(self._sizes())
        return step

    def release(self) -> None:
        """Frees what the prefill has stored. The library's loop cannot continue from the prefill after that."""
        self._has_released = True
        self._store.release()
        self.prompt.own.clear()
        self.prompt.cross.clear()
        self.prompt.states.clear()


def recorded(search: Search, inputs: slice, count: int, kept: dict[str, list[Tensor]], config: Any) -> dict[str, Any]:
    """Returns what `return_dict_in_generate` adds to the sequences of these inputs, whose rows count from the first.

    Args:
        count: sequences that each input returns.
        kept: what the call returns of every step, by name.
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
