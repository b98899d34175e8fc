"""Chooses how many slots a decode step computes: as few as it can without specializing too often."""

from __future__ import annotations

from typing import Any

from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers.captured import any_batch
from fastgen.optimizer.transformers.captured.pays import STEPS_OF_SPECIALIZING, Ledger
from fastgen.optimizer.transformers.captured.step import DecodeStep

# Numbers of slots that steps compute, between one power of two and the next.
_STEPS_OF_PLACES = 8


class Places:
    """The numbers of slots that the steps of one kind have computed.

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
        if not any_batch.is_symbolic(step.key):
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
        places = there if any_batch.specialize(self._model, step, there) else batch
        self._paid.add(places)
        return places


def _rounded(count: int, batch: int) -> int:
    every = max(power_of_two(count) // _STEPS_OF_PLACES, 1)
    return min(-(-count // every) * every, batch)
