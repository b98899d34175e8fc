"""A part of a step that runs again and again: eagerly at first, then it is captured, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from fastgen.decoding.program_memory import Growing
from fastgen.decoding.retrying import BackOff

# What the host does after a piece, if anything; and a piece, with what the host does after it.
Then = Callable[..., None] | None
Piece = tuple[Callable[[], object], Then]
# Steps between running out of memory and the next attempt: half of the first wait, and the longest wait.
_PAUSES = 16, 512


class CapturedPart:
    """The state machine of a captured part: some eager runs, a capture, and replays.

    A part is split into pieces if the host does something in between. The pieces' functions are not kept, because they
    reference the model, which would never be freed.

    Args:
        warm_ups: runs before the capture, in which kernels are compiled and libraries prepare themselves.

    Attributes:
        made: the recordings of its pieces; empty until it is captured.
        declined: numbers of inputs for which there can be no programs.
        out_of_memory: numbers of inputs for which there was no memory, to be tried again after a back-off.
    """

    def __init__(self, device: torch.device, growing: Growing | None = None, warm_ups: int = 0) -> None:
        self._device, self._growing, self._warm_ups = device, growing, warm_ups
        self.made: list[tuple[graph.Graph | Program, Then]] = []
        self._by_inputs: dict[int, list[tuple[graph.Graph | Program, Then]]] = {}
        self.declined: set[int] = set()
        self.out_of_memory: dict[int, BackOff] = {}

    @property
    def is_captured(self) -> bool:
        return bool(self.made)

    @property
    def is_warm(self) -> bool:
        """Whether the next run may capture it."""
        return self._warm_ups <= 0

    @property
    def follows(self) -> bool:
        """Whether the recordings stay valid when the buffers get other memory."""
        return all(made.follows for pieces in (self.made, *self._by_inputs.values()) for made, _ in pieces)

    def drop(self) -> None:
        """Drops the recordings."""
        self.made = []
        self._by_inputs = {}
        self.declined = set()

    # ---- programs for numbers of inputs

    def is_declined(self, inputs: int) -> bool:
        """Whether programs for this many inputs are not to be made now. To be called once in each step."""
        back_off = self.out_of_memory.get(inputs)
        return inputs in self.declined or (back_off is not None and back_off.waits())

    def decline_for_now(self, inputs: int) -> None:
        """Notes that there was too little memory for programs for this many inputs. There may be more later."""
        self.out_of_memory.setdefault(inputs, BackOff(*_PAUSES)).fail()

    @property
    def is_specialized(self) -> bool:
        """Whether there are programs for fewer inputs than the batch."""
        return bool(self._by_inputs)

    def smallest(self, inputs: int) -> int | None:
        """Returns the smallest number of at least `inputs` inputs that there are programs for, or None."""
        return min((number for number in self._by_inputs if number >= inputs), default=None)

    def use(self, inputs: int) -> bool:
        """Has later replays use the programs for this many inputs. Returns whether there are any."""
        self.made = self._by_inputs.get(inputs, self.made)
        return inputs in self._by_inputs

    def specialize(self, inputs: int, batch: int, programs: Iterable[Program], pieces: Iterable[Piece]) -> None:
        """Uses programs of its pieces for the first `inputs` of the batch, instead of a capture."""
        if self.made and not self._by_inputs:  # it was captured
            self._by_inputs[batch] = self.made
        self._by_inputs[inputs] = [(program, then) for program, (_, then) in zip(programs, pieces, strict=True)]
        self.use(inputs)

    def run(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Runs the part eagerly. What the host does after a piece gets `given`."""
        self._warm_ups -= 1
        is_recorded = graph.is_recorded(self._device)
        run_pieces([(run if is_recorded else graph.capturable(run), then) for run, then in pieces], given)

    def capture(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Captures the part, and runs the recordings. If these fail, the part does not count as captured.

        Raises:
            RuntimeError: the part does something that cannot be captured. Exceptions of the pieces are passed on.
        """
        made = [(self._captured(run), then) for run, then in pieces]
        run_pieces([(each.replay, then) for each, then in made], given)
        self.made = made

    def replay(self, *given: Any) -> None:
        """Replays the recordings."""
        run_pieces([(each.replay, then) for each, then in self.made], given)

    def _captured(self, run: Callable[[], object]) -> graph.Graph | Program:
        made = graph.new(self._device, self._growing)
        made.capture(graph.capturable(run))
        return made


def run_pieces(pieces: Iterable[Piece], given: tuple[Any, ...]) -> None:
    """Runs pieces one after the other, each followed by what the host does after it, which gets `given`."""
    for run, then in pieces:
        run()
        if then is not None:
            then(*given)
