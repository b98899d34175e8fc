"""A captured step whose inputs come and go: continuous batching.

Each input has a slot of the step, and a length of its own. It enters after its prefill, with its first token, and
leaves when its search is over. Neither needs a new recording. `fastgen.optimizer.transformers.entering` decides which
calls of `generate` may enter.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastgen import memory
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.search import NOT_NUMBERS, Search
from fastgen.decoding.kv.view import CannotBeCaptured, OfThisCall
from fastgen.interrupts import undoing
from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers.call import BEYOND_WINDOW, fast_layers
from fastgen.optimizer.transformers.captured import any_batch, graph_cache, processors
from fastgen.optimizer.transformers.captured.any_batch import Places
from fastgen.optimizer.transformers.captured.choice import Choice, Turn
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding, Kind
from fastgen.optimizer.transformers.captured.key import Prompt, Sizes, rounded_sizes
from fastgen.optimizer.transformers.captured.pays import Ledger, is_repeatable
from fastgen.optimizer.transformers.captured.slot import MOST_ROWS, DraftRows, Slot, StepSeconds
from fastgen.optimizer.transformers.captured.step import DecodeStep

# The most seconds that steps wait for captured steps of other threads.
PATIENCE = 10.0


class TooLong(OfThisCall):
    """An input has more positions than the step can serve; others of its kind may have fewer."""


@contextlib.contextmanager
def running(device: torch.device) -> Iterator[None]:
    """The context in which steps run. It waits for calls of other threads that have captured steps. Tensors that are
    made in it may be written to outside of inference mode.

    Raises:
        CannotBeCaptured: another call did not end in time. It may be waiting for the present thread.
    """
    modes = undoing(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))
    with graph.taken(device, PATIENCE), modes, torch._C._InferenceMode(False), torch.no_grad():
        yield


class Slots:
    """A step of a model, and the inputs in it. Its kind serves them all, and gets wider as inputs of other kinds enter.

    Args:
        model: whose step it is.
        kind: the kind of the first inputs to enter.
        most: maximum number of slots.
        seconds: times of this model's steps so far.
        repeats: inputs come in an order that depends on no clock, and nothing else may depend on one.

    Attributes:
        taken: the inputs, by slot.
        drafts: the drafts that free rows verify.
        is_widened: whether the step does more than some of its requests asked for. Its failure may then have nothing to
            do with them.
        failure: the reason why the step must not continue; None if it may.
    """

    def __init__(self, model: Any, kind: Kind, most: int, seconds: StepSeconds, repeats: bool = False) -> None:
        self._model, self._kind, self._most, self._repeats = model, kind, most, repeats
        self._key = kind.key
        self._ledger = Ledger.of(self._model)
        self._steps, self._captures_from = 0, math.inf
        self._is_changing = True  # the last input has changed the step, and more inputs are about to come
        self._is_recorded = False  # whether a recording served any number of inputs at the last check
        self._programs, self._places = Places(model, repeats), 0  # slots that the last step has computed
        self.drafts = DraftRows(None if repeats else seconds)
        self.taken: dict[int, Slot] = {}
        self.is_widened = False
        self.failure: Exception | None = None
        self._step: DecodeStep | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the present inputs."""
        return len(self.taken) * self._key.per_input

    @property
    def is_new(self) -> bool:
        """Whether it has made no step."""
        return self._steps == 0

    @property
    def is_stale(self) -> bool:
        """Whether the model has changed since the step was made."""
        return self._step is not None and graph_cache.state(self._model) != self._step.state

    def serves(self, kind: Kind) -> bool:
        """Whether inputs of this kind can join the present ones, as far as is known."""
        wider = None if self.failure is not None else self._kind.with_inputs_of(kind)
        if wider is None or wider == self._kind:
            return wider is not None
        # Whether rows can share K and V is found out in a separate step, because user code must not run twice.
        if wider.key.maps_rows > self._kind.key.maps_rows and not graph_cache.shares_kv(self._model):
            return False
        batches = {*(1 << n for n in range(self._most.bit_length())), self._most}
        return not any(graph_cache.is_refused(self._model, replace(wider.key, batch=n)) for n in batches)

    # ---- inputs that enter

    def admit(self, decoding: EnteringDecoding, kind: Kind, entering: list[Slot], expected: int) -> None:
        """Adds the inputs of a prefilled call to the step, and selects their first tokens.

        Args:
            kind: of the call.
            expected: number of inputs that are likely to come soon.
        """
        prompts = [
            decoding.prompt.only(number, self._key.per_input, slot.new_tokens, slot.padding)
            for number, slot in enumerate(entering)
        ]
        needed = Sizes(*map(max, *(prompt.sizes for prompt in prompts), Sizes(0, 0, 0, 0)))
        self._is_changing = (self._widen(decoding, kind) or self.is_new) and expected > len(entering)
        step = self._with_room(decoding, len(self.taken) + max(len(entering), expected), needed)
        if not step.forward.is_watched:  # before user code sees a token
            self._try(step, prompts[0])
        if step.key.maps_rows:
            graph_cache.note_shared_kv(self._model, True)
        self._check_window(step, decoding, needed)
        for slot, prompt in zip(entering, prompts, strict=True):
            slot.certain_tokens, slot.entered = decoding.certain_tokens, self._steps
            self._note(slot)
            self._enter(step, slot, prompt, decoding, kind)
        self._check_numbers(step)
        for slot, prompt in zip(entering, prompts, strict=True):  # so none has seen a token if another cannot enter
            if slot.streams_prompt:
                slot.has_streamed = True
                slot.catch(partial(slot.streamer.put, prompt.tokens.clone()))
            self._stream(step, slot)

    def _enter(self, step: DecodeStep, slot: Slot, prompt: Prompt, decoding: EnteringDecoding, kind: Kind) -> None:
        place = self._free_place()
        step.load(place, prompt)
        options = {"length_penalty": decoding.config.length_penalty} if self._key.early_stopping is not None else {}
        numbers = [decoding.numbers[each] if isinstance(each, int) else each for each in kind.numbers(self._kind)]
        search, choice = step.arrival(prompt, kind.fill, numbers, **options)
        search.draws.fill_(slot.generator is not None)
        if self._key.samples:
            search.noise = torch.ones(self._key.per_input, prompt.logits.shape[-1], dtype=torch.float32)
            slot.draw(search.noise.view(-1))
        start, end = int(search.start[0, 0]), search.prompt_capacity
        self._block(slot, choice, search, 0)
        turns = [] if slot.host is None else [Turn(slot.host, slice(0, 1), start, end)]
        choice.first(prompt.logits, lambda: None, turns)
        if isinstance(slot.error, CannotBeCaptured):  # the call continues in the library's loop
            step.leave(slice(place, place + 1))
            raise slot.error
        step.enter(place, search, choice)
        slot.positions, slot.source, slot.taken = prompt.cached, prompt.sizes.source, 1
        if slot.drafts is not None:
            slot.drafts.append(prompt.tokens[0].tolist())
        slot.place, self.taken[place] = place, slot

    def _free_place(self) -> int:
        return next(place for place in range(self._key.batch) if place not in self.taken)

    def _try(self, step: DecodeStep, prompt: Prompt) -> None:
        """Raises CannotBeCaptured if the model does something that a step with rows of unequal lengths cannot do."""
        place = self._free_place()
        step.load(place, prompt)
        try:
            step.watch(self._model)
        except Exception as error:
            if memory.is_out(error) or isinstance(error, OfThisCall):
                raise
            raise self._refused(step, error) from error
        finally:
            step.leave(slice(place, place + 1))

    def _check_window(self, step: DecodeStep, decoding: EnteringDecoding, needed: Sizes) -> None:
        """Raises TooLong if a sliding window's mask would hide positions of a shorter row, as it fits the longest one.

        The check counts the positions that present and entering inputs may need, not the room of the buffers.
        """
        if decoding.window is None or not step.buffers.reads_masks_of_windows:
            return
        there = step.buffers.longest_prompt
        new = max([needed.new, *(slot.new_tokens for slot in self.taken.values())])
        if max(there, needed.cached) + new > decoding.window:
            raise TooLong(BEYOND_WINDOW)

    def _note(self, slot: Slot) -> None:
        """Decides from which step on recording pays, by all inputs that have entered so far."""
        if is_repeatable():
            self._captures_from = 0
        if self._captures_from <= self._steps:  # the next step is recorded, whatever this input asks for
            return
        room = Sizes(0, 0, 0, 0) if self._step is None else self._step.sizes
        self._is_recorded = self._is_recorded or any_batch.is_recorded(self._model, self._key, room, 1)
        done = self._steps - slot.entered
        asked = max(slot.certain_tokens - done, 0), slot.new_tokens - done
        starts = self._ledger.starts_at(self._key, *asked, self._is_recorded)
        if starts is not None:
            self._captures_from = min(self._captures_from, self._steps + max(starts - done, 0))

    def _with_room(self, decoding: EnteringDecoding, inputs: int, needed: Sizes) -> DecodeStep:
        """Returns the step, with room for this many inputs, up to the maximum, and for their sizes."""
        rows = max(inputs, MOST_ROWS) if self._kind.key.maps_rows else inputs
        batch = min(max(power_of_two(rows), self._key.batch if self._step is not None else 1), self._most)
        if self._step is None:
            self._step = self._taken(decoding, batch, self._rounded(decoding, needed), self._kind)
            self._step.open(self._kind.eos)
        self._grow(self._step, self._rounded(decoding, needed))
        if batch > self._step.key.batch:
            self._step = self._moved(decoding, batch, self._kind)
        self._key = self._step.key
        return self._step

    def _widen(self, decoding: EnteringDecoding, kind: Kind) -> bool:
        """Has the step serve inputs of this kind, which are about to enter. Returns whether it did not do so before."""
        wider = self._kind.with_inputs_of(kind)
        if wider is None:
            raise CannotBeCaptured("inputs of another kind")
        if wider == self._kind:
            return False
        was_captured, self.is_widened = self.is_captured, True
        if self._step is not None:
            self._step = self._moved(decoding, self._key.batch, wider)
        self._kind, self._key = wider, replace(wider.key, batch=self._key.batch)
        # If the step was captured, the present inputs have shown that this pays.
        self._captures_from, self._is_recorded = self._steps if was_captured else math.inf, False
        for slot in self.taken.values():
            self._note(slot)
        return True

    def _taken(self, decoding: EnteringDecoding, batch: int, room: Sizes, kind: Kind) -> DecodeStep:
        """Returns a kept or new step for this many inputs, with buffers of at least these sizes."""
        key, given = replace(kind.key, batch=batch), kind.processors
        vocabulary = decoding.prompt.logits.shape[-1]

        def make() -> DecodeStep:
            made = None if given is None else processors.all_made(given, decoding.bucket(key))
            return DecodeStep(key, decoding.prompt, made, room)

        step: DecodeStep = graph_cache.take(self._model, key, make)
        if not processors.refresh(step.processors or (), given or ()):
            step = make()
            step.state = graph_cache.state(self._model)
        step.make_room(room)
        if key.samples and step.search.noise is None:
            step.search.noise = torch.ones(key.rows, vocabulary, dtype=torch.float32)
        return step

    def _rounded(self, decoding: EnteringDecoding, needed: Sizes) -> Sizes:
        return rounded_sizes(needed, decoding.may_pad, on_gpu=False, at_once=True)

    def _moved(self, decoding: EnteringDecoding, batch: int, kind: Kind) -> DecodeStep:
        """Returns a step for more inputs, or of a wider kind, which continues the present inputs."""
        before = self._step
        assert before is not None
        step = self._taken(decoding, batch, before.sizes, kind)
        self._grow(before, step.sizes)
        step.make_room(before.sizes)
        step.open(kind.eos)
        numbers = self._kind.numbers(kind)
        for place in self.taken:
            step.move_in(before, place, place, numbers)
        graph_cache.give_back(self._model, before)
        return step

    def _grow(self, step: DecodeStep, needed: Sizes) -> None:
        """Grows a step that has inputs. If memory runs out before, it stays usable, but not if it is half grown."""
        grow = step.reserve(needed)
        try:
            grow()
        except BaseException as error:
            self.failure = error if isinstance(error, Exception) else RuntimeError("a step that was left half grown")
            raise

    # ---- a step

    @property
    def is_captured(self) -> bool:
        return self._step is not None and self._step.is_captured

    def advance(self, most_drafted: Callable[[], int | None] = lambda: None) -> list[Slot]:
        """Makes a step, in the context `running`, and returns the slots that are over. They stay in the step until
        `remove`. The step verifies at most as many drafted tokens as `most_drafted` returns; None for no limit.
        """
        step = self._step
        assert step is not None, "somebody is there"
        if self.failure is not None:
            raise self.failure
        self.drafts.drafted = self.drafts.accepted = 0
        if len(self._over(step)) < len(self.taken):
            # The next input may be of another kind, which this recording would not serve.
            captures = self._steps >= self._captures_from and (self._repeats or not self._is_changing)
            self._is_changing = False
            if (captures or step.is_captured) and any_batch.is_symbolic(step.key):
                self._close_ranks(step)
            for slot in self.taken.values():
                slot.taken = int(not slot.is_over)
                if not slot.is_over:
                    self._draw(step, slot)
                    self._block(slot, step.choice, step.search, slot.place)
            turns = self._turns(step) if self._key.waits_for_host else []
            self._verify(step, turns, captures, self._put_drafts(step, max(self.taken) + 1, most_drafted))
            self._steps += 1
            self.drafts.take(step)
            self._check_numbers(step)
            for slot in self.taken.values():
                slot.positions += self._key.per_input * slot.taken
                self._stream(step, slot)
        return self._over(step)

    def _put_drafts(self, step: DecodeStep, count: int, most_drafted: Callable[[], int | None]) -> int:
        """Has free rows verify drafts. Returns how many slots the step has to compute."""
        if not (self._key.maps_rows and step.is_captured):
            return count
        going_on = [slot for slot in self.taken.values() if not slot.is_over]
        return self.drafts.put(step, going_on, count, most_drafted(), partial(self._programs.sizes, step, count))

    def _verify(self, step: DecodeStep, turns: list[Turn], captures: bool, count: int) -> None:
        was_captured, has_drafts = step.is_captured, count > max(self.taken) + 1
        try:
            specializes = captures or step.is_captured
            self._places = self._programs.specialize(step, count, has_drafts) if specializes else step.key.batch
            with contextlib.nullcontext() if step.is_captured else fast_layers(self._model):
                begin = time.perf_counter()
                step.verify(self._model, turns, captures)
                seconds = self._programs.seconds = time.perf_counter() - begin
            if was_captured:
                self.drafts.note(self._places, seconds)
        except Exception as error:
            if not (step.parts.is_complete or memory.is_out(error) or isinstance(error, OfThisCall)):
                refused = self._refused(step, error)
                if isinstance(error, CannotBeCaptured):  # others then know whether it concerns them
                    raise refused from error
            raise

    def _refused(self, step: DecodeStep, error: Exception) -> CannotBeCaptured:
        """Notes that steps of this key cannot be captured. If it maps rows, this says nothing about other keys."""
        graph_cache.refuse(self._model, step.key, str(error))
        if not step.key.maps_rows:
            return CannotBeCaptured(str(error))
        graph_cache.note_shared_kv(self._model, False)
        return OfThisCall(str(error))

    def _close_ranks(self, step: DecodeStep) -> None:
        """Moves inputs to the first slots, because nothing is computed for the slots after them."""
        for target in range(len(self.taken)):
            if target not in self.taken:
                source = max(self.taken)
                step.move(source, target)
                self.taken[target] = self.taken.pop(source)
                self.taken[target].place = target

    def _over(self, step: DecodeStep) -> list[Slot]:
        """Returns the slots that are over, and stops their searches."""
        goes_on = step.search.unfinished.view(self._key.batch, -1).any(dim=1).tolist()
        for place, slot in self.taken.items():
            if not slot.is_over and (slot.error is not None or not goes_on[place]):
                step.search.leave(slice(place, place + 1))
                slot.is_over = True
        return [slot for slot in self.taken.values() if slot.is_over]

    def _check_numbers(self, step: DecodeStep) -> None:
        """Fails inputs whose probabilities are NaN, and only these, before their streamers see a token."""
        has_nan = step.search.nan_inputs[:, 0].tolist()
        for place, slot in self.taken.items():
            if has_nan[place] and slot.error is None:
                slot.error = ValueError(NOT_NUMBERS)

    def _turns(self, step: DecodeStep) -> list[Turn]:
        starts, ends = step.search.start[:, 0].tolist(), step.search.length[:, 0].tolist()
        return [
            Turn(slot.host, slice(place, place + 1), starts[place], ends[place])
            for place, slot in self.taken.items()
            if slot.host is not None and not slot.is_over
        ]

    def _draw(self, step: DecodeStep, slot: Slot) -> None:
        """Draws the noise of an input's next step."""
        if slot.generator is not None:
            slot.draw(step.search.noise.view(self._key.batch, -1)[slot.place])

    def _block(self, slot: Slot, choice: Choice, search: Search, place: int) -> None:
        """Blocks the tokens that may not come next for an input whose result has a form."""
        if slot.form is None or slot.error is not None:
            return
        mask = slot.mask(choice.processors)
        slot.catch(partial(mask.block, slot.form, search.sequences_of(place), place))

    def _stream(self, step: DecodeStep, slot: Slot) -> None:
        """Passes the tokens of the latest step to the input's streamer and drafts."""
        if slot.is_over or (slot.streamer is None and slot.drafts is None):
            return
        tokens = step.search.tokens[slot.place : slot.place + 1]
        if slot.taken > 1:
            end = int(step.search.length[slot.place, 0])
            tokens = step.search.running_tokens[slot.place, end - slot.taken : end]
        if slot.drafts is not None:
            slot.drafts.append(tokens.tolist())
        for token in tokens.clone().split(1) if slot.streamer is not None else ():
            slot.catch(partial(slot.streamer.put, token))

    # ---- inputs that leave

    def result(self, slot: Slot) -> Any:
        """Returns the sequences of an input that is over, with its prompt, [count, length of the longest]. With
        `return_dict_in_generate`, returns what `generate` returns, without a cache.
        """
        assert self._step is not None, "the input is in it"
        search, inputs = self._step.search, slice(slot.place, slot.place + 1)
        self._ledger.note_call(self._key, int(search.length[inputs].max()) - search.prompt_capacity, True, 0)
        return slot.results(search, inputs)

    def remove(self, slot: Slot) -> None:
        """Removes an input, if it is in the step. It may be over, or not, or have failed to enter. When the last input
        leaves, a step that has not failed returns to the cache of recordings, for inputs that come later.
        """
        step = self._step
        if step is not None and self.taken.get(slot.place) is slot:
            del self.taken[slot.place]
            step.leave(slice(slot.place, slot.place + 1))
        if step is not None and not self.taken:
            if step.forward.is_watched and self.failure is None:
                graph_cache.give_back(self._model, step)
            self._step = None

    @property
    def slots(self) -> int:
        """Number of rows that the last step has computed."""
        return self._places * self._key.per_input
