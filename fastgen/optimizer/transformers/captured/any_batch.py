"""Decode steps for any number of inputs, from one recording of steps that never run.

A plain step is recorded for two numbers of inputs, and specialized for the number that a call needs
(`fastgen.decoding.captured.symbolic_batch`): the slots that are taken (`Places`), or the inputs of a call that have not
finished (`Compaction`). Buffers that grow may have any size, so the recorded steps have the smallest possible ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastgen import counters, interrupts, memory
from fastgen.decoding import program_memory
from fastgen.decoding.captured import program
from fastgen.decoding.captured.capturable import capturable
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.symbolic_batch import (
    MOST,
    DoesNotFollow,
    NotSymbolic,
    Recorded,
    SymbolicRecording,
    batches,
    tensors_of,
)
from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.key import Key, Sizes, rounded_sizes
from fastgen.optimizer.transformers.captured.pays import STEPS_OF_SPECIALIZING, Ledger, is_repeatable
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.special_models import PLAIN

ENTRY_POINT = "transformers.captured_step, any number of inputs"
# Attempts at recording: the size of an intermediate result may coincide with that of a buffer.
_TRIES = 2
# Numbers of slots that steps compute, between one power of two and the next.
_STEPS_OF_PLACES = 8
# With at most this many rows, the time of a step is that of reading the weights.
_FEW_ROWS = 8
# Steps between two checks for finished inputs.
_EVERY = 4
# Time of moving an input, in steps.
_MOVE = 1.0


def is_symbolic(key: Key) -> bool:
    """Whether one recording may serve any number of inputs."""
    return key.draft is None and key.width == 1 and key.codebooks == PLAIN


def is_recorded(model: Any, key: Key, room: Sizes, inputs: int) -> bool:
    """Whether a recording exists that serves steps of this key for this many inputs, with buffers of these sizes."""
    return is_symbolic(key) and graph_cache.has_symbolic(model, inputs, *(each for each, _ in _kinds(key, room)))


def _is_shared(model: Any, step: DecodeStep) -> bool:
    """Whether a step all of whose inputs continue uses the shared recording."""
    if step.key.slots or is_repeatable():
        return step.key.slots
    return is_recorded(model, step.key, step.sizes, step.key.batch)


def specialize(model: Any, step: DecodeStep, inputs: int | None = None) -> bool:
    """Has a plain step run a program for its first inputs, made from the recording for any number of inputs.

    Otherwise the step is recorded for itself. This also holds for a step without slots all of whose inputs continue, if
    no recording exists yet: a recording for any number of inputs takes as long as several others.

    Args:
        inputs: number of inputs to compute; None for all.

    Returns:
        whether there is such a program.
    """
    part, batch = step.parts[1], step.key.batch
    inputs = inputs or batch
    if not is_symbolic(step.key) or part.use(inputs):
        return is_symbolic(step.key)
    if inputs == batch and not part.is_specialized and (part.is_captured or not _is_shared(model, step)):
        return False
    if not part.is_declined(inputs):
        try:
            with fast_layers(model):  # slots have left them; what is captured of them is a part of the model's state
                programs = _programs(model, step, inputs, makes=step.key.slots or inputs < batch)
            part.out_of_memory.pop(inputs, None)
        except Exception as error:
            if not memory.is_out(error):
                raise
            counters.count_not_used(ENTRY_POINT, "out of memory")
            part.decline_for_now(inputs)
            programs = None
        if programs is not None:
            part.specialize(inputs, batch, programs, step.pieces(model))
            return True
    if part.is_specialized and not part.use(batch):
        part.drop()  # its programs serve fewer inputs only
    if inputs not in part.out_of_memory:
        part.declined.add(inputs)
    return False


def _programs(model: Any, step: DecodeStep, inputs: int, makes: bool) -> list[Program] | None:
    """Returns the programs of the pieces for the first inputs; None if there is no recording for any number of inputs.

    Args:
        makes: make the recording if there is none.
    """
    for key, follows in _kinds(step.key, step.sizes) if inputs <= MOST else ():
        if not (makes or graph_cache.has_symbolic(model, inputs, key)):
            continue
        found = graph_cache.symbolic(model, key, inputs, partial(_recorded, model, step, follows))
        begin = time.perf_counter()
        programs = None if found is None else found.specialize(step, inputs)
        if programs is not None:
            Ledger.of(model).note_specializing(time.perf_counter() - begin)
            return programs
    return None


def _kinds(key: Key, room: Sizes) -> list[tuple[Key, bool]]:
    """Returns the keys of recordings that may serve, each with whether it works with larger buffers."""
    of_size = replace(key, sizes=room), False
    return [of_size] if key.sizes.new else [(key, True), of_size]


class SymbolicStep:
    """The recordings of the pieces of a step.

    Attributes:
        most: the largest number of inputs that it serves.

    Args:
        like: a step of the key that has been watched.
        both: the two numbers of inputs to record.
        follows: the recording is to work with larger buffers.

    Raises:
        NotSymbolic: the recordings do not determine a step for other numbers of inputs.
    """

    def __init__(self, model: Any, like: DecodeStep, both: tuple[int, int], follows: bool) -> None:
        self._masks = _masks_of(like)
        steps = [like.of_batch(batch, _sizes(like, follows)) for batch in both]
        with torch._C._InferenceMode(True):
            recorded = [_record(model, step, follows) for step in steps]
        self._recordings = [SymbolicRecording(*pieces) for pieces in zip(*recorded, strict=True)]
        self.most = both[1]
        self._answers = set(steps[1].buffers.bounds.answers)
        if steps[0].buffers.bounds.answers != self._answers:
            raise NotSymbolic("other answers for other inputs")

    @property
    def chunks(self) -> set[program_memory.Chunk]:
        """The memory of the results of its pieces, and of the programs made from it."""
        return set[program_memory.Chunk]().union(*(each.chunks for each in self._recordings))

    def specialize(self, step: DecodeStep, inputs: int) -> list[Program] | None:
        """Returns the programs of the pieces for the first `inputs` of a step; None if it is not served."""
        if step.forward.is_watched and _masks_of(step) != self._masks:
            return None
        if not step.buffers.bounds.accept(self._answers):  # the model's code relied on a shorter cache
            return None
        buffers, growing = _tensors_of(step), step.buffers.growing
        try:
            found = [each.specialize(buffers, step.key.batch, inputs, growing) for each in self._recordings]
        except NotSymbolic:
            return None
        step.buffers.put_masks(self._masks)
        step.forward.is_watched = True
        return found


def _record(model: Any, step: DecodeStep, follows: bool) -> list[Recorded]:
    """Records what each piece of a step does."""
    step.buffers.begin_capture()
    buffers, growing = _tensors_of(step), step.buffers.growing if follows else None
    scratch = frozenset(buffer.untyped_storage()._cdata for buffer in buffers.values())
    with memory.no_collection():
        pieces = [program.prepared(capturable(run), scratch=scratch) for run, _ in step.pieces(model)]
    return [Recorded(prepared, step.key.batch, buffers, growing) for prepared in pieces]


def _recorded(model: Any, step: DecodeStep, follows: bool) -> SymbolicStep | None:
    """Returns the recording; None if it does not determine steps of other numbers of inputs or, if it is to follow,
    of other sizes. Running out of memory raises, because there may be more memory the next time.
    """
    if not step.forward.is_watched:
        step.watch(model)
    if follows and not _may_follow(step):
        return None
    most = min(step.key.batch, MOST)
    for both in islice(batches(most, step.key.lengths(_sizes(step, follows))), _TRIES):
        try:
            return SymbolicStep(model, step, both, follows)
        except DoesNotFollow:
            return None
        except NotSymbolic:
            continue
        except Exception as error:  # the step is then recorded for itself, which reports why it cannot be
            interrupts.pass_on(error)
            if memory.is_out(error):
                raise
            return None
    return None


def _may_follow(step: DecodeStep) -> bool:
    """Whether a recording may be independent of the length of buffers that grow: it reads neither masks nor tokens."""
    reads_masks = any(False in says for says in _masks_of(step))
    processors = step.processors or ()
    return not reads_masks and not any(each.reads_tokens for each in processors)


def _sizes(step: DecodeStep, follows: bool) -> Sizes:
    """Returns the sizes of the recorded steps' buffers: the smallest possible ones if the recording follows others."""
    exact, have = step.key.sizes, step.sizes
    if not follows:
        return have
    least = rounded_sizes(Sizes(1, 1, 1, min(have.source, 1)), may_pad=not exact.prompt, on_gpu=False)
    return Sizes(*map(max, least, exact)) if exact.prompt else least


def _masks_of(step: DecodeStep) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(kv.says_nothing_new) for kv in step.buffers.layers)


def _tensors_of(step: DecodeStep) -> dict[str, Tensor]:
    return tensors_of(step.buffers, step.search, step.choice, step.forward, step.flag)


# ---- how many inputs a step computes


class Places:
    """The numbers of slots that the steps of one kind have computed: as few as possible without specializing too often.

    A program for fewer slots takes time once. It is made once idle rows have cost as much.

    Args:
        repeats: the choice of programs must not depend on a clock.

    Attributes:
        seconds: time of the last step.
    """

    def __init__(self, model: Any, repeats: bool) -> None:
        self._model, self._repeats, self._ledger = model, repeats, Ledger.of(model)
        self._paid: set[int] = set()  # numbers of slots that steps have computed
        self._lost = 0.0  # time that idle rows have cost for want of a program for fewer slots, in steps
        self.seconds = 0.0

    def sizes(self, step: DecodeStep, count: int) -> list[int]:
        """Returns, in order, the numbers of slots that a step may compute with drafts after its first `count` slots."""
        batch = step.key.batch
        if not is_symbolic(step.key):
            return [batch]
        found = {_rounded(count, batch), *(1 << power for power in range(batch.bit_length())), batch}
        return sorted(each for each in found if each >= count)

    def specialize(self, step: DecodeStep, count: int, has_drafts: bool) -> int:
        """Has a step compute at least `count` slots. Returns how many it computes."""
        batch = step.key.batch
        wanted = min(power_of_two(count), batch) if has_drafts else _rounded(count, batch)
        there, needed = step.parts[1].smallest(count), self._ledger.steps_of_specializing(self.seconds)
        if self._repeats:  # programs that earlier runs have left do not count
            there = min((places for places in self._paid if places >= count), default=None)
            needed = STEPS_OF_SPECIALIZING
        if there is None or there > wanted:
            self._lost += 0 if there is None else 1 - wanted / there
            if there is None or self._lost >= needed:
                there, self._lost = wanted, 0.0
        places = there if specialize(self._model, step, there) else batch
        self._paid.add(places)
        return places


def _rounded(count: int, batch: int) -> int:
    every = max(power_of_two(count) // _STEPS_OF_PLACES, 1)
    return min(-(-count // every) * every, batch)


class Compaction:
    """The batch compaction of one call: finished inputs leave its step, and the others continue in the first places.

    Nothing is computed for the places after these. This takes a program for so few inputs, which is specialized once
    the rows of finished inputs have cost as much time as that takes.

    Args:
        inputs: number of inputs of the call; further places of the step only fill the batch.
        count: sequences that each input returns.
        fill: the token that pads sequences after their ends.
        refresh: has captured processors do what those of the call do for these of its inputs, in this order.
    """

    def __init__(
        self,
        model: Any,
        key: Key,
        ledger: Ledger,
        inputs: int,
        count: int,
        fill: int,
        refresh: Callable[[Sequence[CapturedProcessor], Sequence[int]], object],
    ) -> None:
        self._model, self._ledger, self._count, self._fill, self._refresh = model, ledger, count, fill, refresh
        self._order = list(range(inputs))  # the input of each place
        self._finished: dict[int, Tensor] = {}
        self._steps, self._lost = 0, 0.0  # `_lost` in steps of all places
        # A processor that holds the encoder's input of each sequence lets no input leave.
        signatures: Any = key.processors or ()
        reads_sources = any(kind.reads_source for kind, *_ in signatures)
        self._is_over = not is_symbolic(key) or reads_sources  # no input can leave any more

    @property
    def places(self) -> int | None:
        """Number of places, the first ones, of the inputs that are left; None while all are left."""
        return len(self._order) if self.has_begun else None

    @property
    def has_begun(self) -> bool:
        """Whether inputs have left."""
        return bool(self._finished)

    def after(self, step: DecodeStep, seconds: float) -> None:
        """Has finished inputs leave if that pays. To be called after each replay, with the seconds that it took."""
        self._steps += 1
        places = len(self._order)
        if self._steps % _EVERY or places == 1 or self._is_over:
            return
        goes_on = step.search.unfinished[:places].any(dim=1).tolist()
        left = sum(goes_on)
        per_input = step.key.per_input
        saved = 1 - max(left * per_input, _FEW_ROWS) / max(places * per_input, _FEW_ROWS)
        if not 0 < left < places or saved <= 0:
            return
        self._lost += _EVERY * saved
        cost = _MOVE * (places - left)
        if is_repeatable():
            cost += STEPS_OF_SPECIALIZING
        elif self._lost >= cost and step.parts[1].smallest(left) != left:
            exists = is_recorded(self._model, step.key, step.sizes, left)
            cost += self._ledger.steps_of_specializing(seconds, exists)
        if self._lost >= cost:
            self._compact(step, goes_on)

    def _compact(self, step: DecodeStep, goes_on: list[bool]) -> None:
        """Moves the unfinished inputs to the first places."""
        for place, (number, lives) in enumerate(zip(self._order, goes_on, strict=True)):
            if not lives:
                self._finished[number] = step.search.results(slice(place, place + 1), self._count)
        left = sum(goes_on)
        free = [place for place in range(left) if not goes_on[place]]
        for target, source in zip(free, (place for place in range(left, len(goes_on)) if goes_on[place]), strict=True):
            step.move(source, target)
            self._order[target] = self._order[source]
        for place in range(left, len(goes_on)):
            step.leave(slice(place, place + 1))
        del self._order[left:]
        self.refresh(step)
        self._lost = 0.0
        self._is_over = not specialize(self._model, step, left)

    def refresh(self, step: DecodeStep) -> None:
        """Has a step's processors do what the input of each place asks for; the step may be a new, larger one."""
        self._refresh(step.processors or (), self._order)

    def results(self, step: DecodeStep) -> Tensor:
        """Returns the sequences of all inputs, [inputs * count, length of the longest]."""
        found = dict(self._finished)
        for place, number in enumerate(self._order):
            found[number] = step.search.results(slice(place, place + 1), self._count)
        longest = max(each.shape[1] for each in found.values())
        width = [(0, longest - found[number].shape[1]) for number in sorted(found)]
        return torch.cat([pad(found[number], more, value=self._fill) for number, more in enumerate(width)])
