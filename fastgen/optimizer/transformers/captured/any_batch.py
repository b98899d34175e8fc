"""Decode steps for any number of inputs from one recording: of a step that nothing runs on.

What is recorded for a prime number of inputs is specialized for the number of a call
(`fastgen.decoding.captured.symbolic_batch`). Buffers that grow may have any size, so those of the recorded step are as
small as they may be.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import interrupts
from fastgen.decoding.captured import graph, program
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.symbolic_batch import NotSymbolic, SymbolicRecording, primes, tensors_of
from fastgen.optimizer.transformers.captured import graph_cache, sizes
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import DecodeStep

# A size that is made on the way may be a multiple of the first prime.
_TRIES = 2


def specialize(model: Any, step: DecodeStep, inputs: int | None = None) -> None:
    """Has a plain step run what was recorded for any number of inputs, if that serves it.

    Args:
        inputs: the first ones, of which something is to be computed; None for all.
    """
    part, inputs = step.parts[1], inputs or step.key.batch
    if not is_symbolic(step.key) or part.use(inputs) or (part.is_captured and not part.is_specialized):
        return
    for follows, key in zip((True, False), _keys(step.key, step.sizes), strict=True):
        found = graph_cache.symbolic(model, key, inputs, partial(_recorded, model, step, follows))
        if found is not None:
            with contextlib.suppress(NotSymbolic):  # it is recorded for itself then
                part.specialize(inputs, found.specialize(step, inputs), step.pieces(model))
            return


def is_recorded(model: Any, key: Key, room: Sizes) -> bool:
    """Whether there is a recording for any number of inputs, for steps of this key with buffers of these sizes."""
    return is_symbolic(key) and any(graph_cache.has_symbolic(model, each) for each in _keys(key, room))


def _keys(key: Key, room: Sizes) -> tuple[Key, Key]:
    """The keys of what is recorded: for buffers of any sizes, where there may be such, and for those of these sizes."""
    return key, replace(key, sizes=room)


def is_symbolic(key: Key) -> bool:
    """Whether one recording may serve any number of inputs."""
    return key.draft is None and key.width == 1


class SymbolicStep:
    """What was recorded of the pieces of a step.

    Attributes:
        recordings: of each piece.
        most: inputs that it serves.
    """

    def __init__(self, model: Any, like: DecodeStep, batch: int, follows: bool) -> None:
        """Raises NotSymbolic, or whatever the step does that cannot be captured."""
        self.most, self._masks = batch, _masks_of(like)
        step = like.of_batch(batch, _sizes(like, follows))
        step.buffers.begin_capture()
        buffers, growing = _tensors_of(step), step.buffers.growing if follows else None
        self.recordings = []
        with torch._C._InferenceMode(True):
            for run, _ in step.pieces(model):
                made = program.prepared(graph.capturable(run), undoes=False)
                self.recordings.append(SymbolicRecording(made, batch, buffers, growing))
        self._answers = set(step.buffers.bounds.answers)

    def specialize(self, step: DecodeStep, inputs: int) -> list[Program]:
        """The programs of the pieces, for the first `inputs` of a step. Raises NotSymbolic: for it, there are none."""
        if step.forward.is_watched and _masks_of(step) != self._masks:
            raise NotSymbolic("masks that say something else")
        if not step.buffers.bounds.accept(self._answers):
            raise NotSymbolic("a model that was told that its cache cannot be as long")
        buffers, growing = _tensors_of(step), step.buffers.growing
        found = [each.specialize(buffers, step.key.batch, inputs, growing) for each in self.recordings]
        step.buffers.put_masks(self._masks)
        step.forward.is_watched = True
        return found


def _recorded(model: Any, step: DecodeStep, follows: bool) -> SymbolicStep | None:
    """None where the step says too little of other numbers of inputs; or of other sizes, if it is to follow."""
    if not step.forward.is_watched:
        step.watch(model)
    if follows and not _may_follow(step):
        return None
    for _, batch in zip(range(_TRIES), primes(step.key.batch, _sizes_of(model, step, follows)), strict=False):
        try:
            return SymbolicStep(model, step, batch, follows)
        except NotSymbolic:
            continue
        except Exception as error:  # recorded for itself, the step will say why it cannot be
            interrupts.pass_on(error)
            return None
    return None


def _sizes_of(model: Any, step: DecodeStep, follows: bool) -> frozenset[int]:
    """What a multiple of the batch must not be taken for."""
    of_weights = (size for weight in (*model.parameters(), *model.buffers()) for size in weight.shape)
    return frozenset((*of_weights, *step.key.lengths(_sizes(step, follows)), step.key.per_input))


def _may_follow(step: DecodeStep) -> bool:
    """Whether what is recorded may have nothing in it of how long buffers that grow are: no mask, and no tokens."""
    reads_masks = any(False in says for says in _masks_of(step))
    processors = step.processors or ()
    return not step.key.sizes.new and not reads_masks and not any(each.reads_tokens for each in processors)


def _sizes(step: DecodeStep, follows: bool) -> Sizes:
    """Those of the buffers of what is recorded: as small as they may be, where these may be any."""
    exact, have = step.key.sizes, step.sizes
    if not follows:
        return have
    least = sizes.rounded(Sizes(1, 1, 1, min(have.source, 1)), may_pad=not exact.prompt, on_gpu=False)
    return Sizes(*map(max, least, exact)) if exact.prompt else least


def _masks_of(step: DecodeStep) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(kv.says_nothing_new) for kv in step.buffers.layers)


def _tensors_of(step: DecodeStep) -> dict[str, Tensor]:
    return tensors_of(step.buffers, step.search, step.choice, step.forward, step.flag)
