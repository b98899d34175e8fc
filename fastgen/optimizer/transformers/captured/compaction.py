"""Batch compaction of a plain step: inputs that have finished leave it, and the others go on in its first places.

Nothing is computed of the places behind. A program for so few inputs has to be specialized first: that is done once
rows of finished inputs have cost as much.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastgen.optimizer.transformers.captured import any_batch
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.pays import STEPS_OF_SPECIALIZING, Ledger, is_repeatable
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import DecodeStep

# With so few rows, a step takes the time of reading the weights.
_FEW_ROWS = 8
# Steps from one look at what has finished to the next.
_EVERY = 4
# What moving an input takes, in steps.
_MOVE = 1.0


class Compaction:
    """Of one call.

    Args:
        inputs: of the call; other places of the step fill it up.
        count: sequences that each input returns.
        fill: what stands behind the end of a sequence.
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
        self._steps, self._lost = 0, 0.0  # the latter in steps of all places
        self._is_over = not any_batch.is_symbolic(key) or reads_sources(key)  # nobody leaves any more

    @property
    def places(self) -> int | None:
        """The first ones, of the inputs that are left; None as long as all are."""
        return len(self._order) if self.has_begun else None

    @property
    def has_begun(self) -> bool:
        """Whether inputs have left."""
        return bool(self._finished)

    def after(self, step: DecodeStep, seconds: float) -> None:
        """To be asked behind each replay, which took so long: has inputs leave where that pays."""
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
            is_recorded = any_batch.is_recorded(self._model, step.key, step.sizes, left)
            cost += self._ledger.steps_of_specializing(seconds, is_recorded)
        if self._lost >= cost:
            self._compact(step, goes_on)

    def _compact(self, step: DecodeStep, goes_on: list[bool]) -> None:
        """Those that go on take the first places."""
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
        self._is_over = not any_batch.specialize(self._model, step, left)

    def refresh(self, step: DecodeStep) -> None:
        """Has the processors of a step, which may have taken the place of another one, do what each place asks for."""
        self._refresh(step.processors or (), self._order)

    def results(self, step: DecodeStep) -> Tensor:
        """The sequences of all inputs, [inputs * count, length of the longest]."""
        found = dict(self._finished)
        for place, number in enumerate(self._order):
            found[number] = step.search.results(slice(place, place + 1), self._count)
        longest = max(each.shape[1] for each in found.values())
        width = [(0, longest - found[number].shape[1]) for number in sorted(found)]
        return torch.cat([pad(found[number], more, value=self._fill) for number, more in enumerate(width)])


def selected(processors: Iterable[Any], rows: Tensor) -> list[Any]:
    """The processors of a call that goes on with these of its rows."""
    found = []
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # one per row
            processor = copy.copy(processor)
            given = processor.prompt_ignore_length
            processor.prompt_ignore_length = given[rows.to(given.device)]
        found.append(processor)
    return found


def reads_sources(key: Key) -> bool:
    """Whether a processor has the encoder's input of each sequence, of which none may leave."""
    signatures: Any = key.processors or ()
    return any(kind.reads_source for kind, *_ in signatures)
