"""Makes decode steps for any number of inputs from one recording of steps that never run.

A plain step is recorded for two numbers of inputs, and specialized for the number that a call needs
(`fastgen.decoding.captured.symbolic_batch`): the slots that are taken, or the inputs of a call that have not finished.
Buffers that grow may have any size, so the recorded steps have the smallest possible ones.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastgen import counters, interrupts, memory
from fastgen.decoding import arena
from fastgen.decoding.captured import graph, program
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
from fastgen.optimizer.transformers.call import fast_layers
from fastgen.optimizer.transformers.captured import graph_cache, sizes
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import Ledger, is_repeatable
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.codebooks import PLAIN

ENTRY_POINT = "transformers.captured_step, any number of inputs"
# Attempts at recording: the size of an intermediate result may coincide with that of a buffer.
_TRIES = 2


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
    def chunks(self) -> set[arena.Chunk]:
        """The memory of the results of its pieces, and of the programs made from it."""
        return set[arena.Chunk]().union(*(each.chunks for each in self._recordings))

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
        pieces = [program.prepared(graph.capturable(run), scratch=scratch) for run, _ in step.pieces(model)]
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
    least = sizes.rounded(Sizes(1, 1, 1, min(have.source, 1)), may_pad=not exact.prompt, on_gpu=False)
    return Sizes(*map(max, least, exact)) if exact.prompt else least


def _masks_of(step: DecodeStep) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(kv.says_nothing_new) for kv in step.buffers.layers)


def _tensors_of(step: DecodeStep) -> dict[str, Tensor]:
    return tensors_of(step.buffers, step.search, step.choice, step.forward, step.flag)
