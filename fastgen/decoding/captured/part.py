"""What is done over and over: it runs as it is at first, is captured, and is replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastgen.decoding.back_off import BackOff
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from fastgen.decoding.kv.exchange import Growing

# What the host does behind a piece, if anything; and such a piece, with that.
Then = Callable[..., None] | None
Piece = tuple[Callable[[], object], Then]
# Steps from a lack of memory to the next trial: half of what it is at first, and at the most.
_PAUSES = 16, 512


class CapturedPart:
    """The state machine of what is captured: some runs as it is, a capture, and replays.

    A part is cut into pieces where the host does something between them. Their functions are not kept: they have the
    model, which would never be freed then.

    Args:
        warm_ups: runs before it is captured: kernels are compiled, and libraries prepare what they need.

    Attributes:
        made: the recordings of its pieces; none until it is captured.
        declined: numbers of inputs that there are no programs for: not to be asked for once more.
        out_of_memory: numbers of inputs that there was no memory for, to be asked for again by and by.
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
        """Whether it may be captured in the next run."""
        return self._warm_ups <= 0

    @property
    def follows(self) -> bool:
        """Whether it goes on when the buffers get other memory."""
        return all(made.follows for pieces in (self.made, *self._by_inputs.values()) for made, _ in pieces)

    def drop(self) -> None:
        """Forgets what was captured."""
        self.made = []
        self._by_inputs = {}
        self.declined = set()

    # ---- programs for numbers of inputs

    def is_declined(self, inputs: int) -> bool:
        """Whether programs for so many inputs are not to be asked for now. To be asked once in each step."""
        back_off = self.out_of_memory.get(inputs)
        return inputs in self.declined or (back_off is not None and back_off.waits())

    def decline_for_now(self, inputs: int) -> None:
        """There was too little memory for programs for so many inputs. Later there may be more."""
        self.out_of_memory.setdefault(inputs, BackOff(*_PAUSES)).fail()

    @property
    def is_specialized(self) -> bool:
        """Whether what is replayed may be for fewer inputs than all."""
        return bool(self._by_inputs)

    def smallest(self, inputs: int) -> int | None:
        """The smallest number of inputs, so many at least, that there are programs for; None for none."""
        return min((number for number in self._by_inputs if number >= inputs), default=None)

    def use(self, inputs: int) -> bool:
        """Replays what is there for so many inputs from now on; whether there is such."""
        self.made = self._by_inputs.get(inputs, self.made)
        return inputs in self._by_inputs

    def specialize(self, inputs: int, batch: int, programs: Iterable[Program], pieces: Iterable[Piece]) -> None:
        """Takes programs of its pieces for the first inputs, of all in the batch, in place of a capture."""
        if self.made and not self._by_inputs:  # it was captured
            self._by_inputs[batch] = self.made
        self._by_inputs[inputs] = [(program, then) for program, (_, then) in zip(programs, pieces, strict=True)]
        self.use(inputs)

    def run(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Runs it as it is. What the host does behind a piece gets `given`."""
        self._warm_ups -= 1
        is_recorded = graph.is_recorded(self._device)
        run_pieces([(run if is_recorded else graph.capturable(run), then) for run, then in pieces], given)

    def capture(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Captures it, and runs what was captured. One that cannot be replayed is not captured.

        Raises:
            RuntimeError: it does what cannot be captured. What the pieces raise is passed on.
        """
        made = [(self._captured(run), then) for run, then in pieces]
        run_pieces([(each.replay, then) for each, then in made], given)
        self.made = made

    def replay(self, *given: Any) -> None:
        """Runs what was captured."""
        run_pieces([(each.replay, then) for each, then in self.made], given)

    def _captured(self, run: Callable[[], object]) -> graph.Graph | Program:
        made = graph.new(self._device, self._growing)
        made.capture(graph.capturable(run))
        return made


def run_pieces(pieces: Iterable[Piece], given: tuple[Any, ...]) -> None:
    """Runs pieces one after the other, with what the host does behind each, which gets `given`."""
    for run, then in pieces:
        run()
        if then is not None:
            then(*given)
