"""Batch compaction of a plain step: finished inputs leave it, and the others continue in its first places.

Nothing is computed for the places after these. This takes a program for so few inputs, which is specialized once the
rows of finished inputs have cost as much time as that takes.
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

# With at most this many rows, the time of a step is that of reading the weights.
_FEW_ROWS = 8
# Steps between two checks for finished inputs.
_EVERY = 4
# Time of moving an input, in steps.
_MOVE = 1.0


class Compaction:
    """The batch compaction of one call.

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
        self._is_over = not any_batch.is_symbolic(key) or reads_sources(key)  # no input can leave any more

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
            is_recorded = any_batch.is_recorded(self._model, step.key, step.sizes, left)
            cost += self._ledger.steps_of_specializing(seconds, is_recorded)
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
        self._is_over = not any_batch.specialize(self._model, step, left)

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


def selected(processors: Iterable[Any], rows: Tensor) -> list[Any]:
    """Returns the processors of a call that continues with these of its rows."""
    found = []
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # one per row
            processor = copy.copy(processor)
            given = processor.prompt_ignore_length
            processor.prompt_ignore_length = given[rows.to(given.device)]
        found.append(processor)
    return found


def reads_sources(key: Key) -> bool:
    """Whether a processor holds the encoder's input of each sequence, so that no input may leave."""
    signatures: Any = key.processors or ()
    return any(kind.reads_source for kind, *_ in signatures)
