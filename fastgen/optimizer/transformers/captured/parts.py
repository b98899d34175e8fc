"""The parts of a step: its draft, and what verifies so many positions. Each is captured for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fastgen.decoding.captured import graph
from fastgen.decoding.captured.part import CapturedPart, Piece
from fastgen.interrupts import undoing
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.forward import Forward
from fastgen.optimizer.transformers.captured.key import Key

# Runs of a part on a GPU before it is captured: of a step with drafts, which has several, each runs less often.
_WARM_UPS, _WARM_UPS_WITH_DRAFT = 2, 1


class Parts:
    """All on the same buffers, and replayed one after the other.

    Attributes:
        by_number: a positive number is that of the positions that a part verifies.
    """

    def __init__(self, key: Key, buffers: StepBuffers, forward: Forward) -> None:
        self._key, self._buffers, self._forward = key, buffers, forward
        self._is_recorded = graph.is_recorded(buffers.device)
        self.by_number: dict[int, CapturedPart] = {}

    def __getitem__(self, number: int) -> CapturedPart:
        if number not in self.by_number:
            on_gpu = _WARM_UPS if self._key.draft is None else _WARM_UPS_WITH_DRAFT
            warm_ups = 0 if self._is_recorded else on_gpu
            self.by_number[number] = CapturedPart(self._buffers.device, self._buffers.growing, warm_ups)
        return self.by_number[number]

    @property
    def is_captured(self) -> bool:
        return any(part.is_captured for part in self.by_number.values())

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be captured, so that what fails may work the next time."""
        return bool(self.by_number) and all(part.is_captured for part in self.by_number.values())

    @property
    def follows(self) -> bool:
        """Whether what has been captured goes on when the buffers get other memory."""
        return all(part.follows for part in self.by_number.values())

    def drop(self) -> None:
        """Forgets what has been captured."""
        for part in self.by_number.values():
            part.drop()

    def run(
        self, number: int, pieces: Callable[[], list[Piece]], cache: Any, *given: Any, captures: bool = True
    ) -> bool:
        """Runs a part; says whether it was replayed, and so took as long as it will from now on.

        One that is not captured yet is captured now, if it may be. Before, one of all parts has run as it is: while the
        rows are as long as each other, the host may look at masks.

        Args:
            pieces: those of the part, where it is not captured yet.
            cache: what the model gets in it.
            given: to what the host does behind a piece.
        """
        part = self[number]
        if part.is_captured:
            part.replay(*given)
            return True
        if captures and part.is_warm and self._forward.is_watched:
            self._buffers.begin_capture()
            part.capture(pieces(), *given)
            return False
        self._run_as_it_is(part, pieces(), cache, given)
        return False

    def _run_as_it_is(self, part: CapturedPart, pieces: list[Piece], cache: Any, given: tuple[Any, ...]) -> None:
        with undoing(self._end_eager):
            self._forward.is_eager = self._is_recorded and self._key.draft is None
            with contextlib.nullcontext() if self._forward.is_watched else self._forward.watched(cache):
                part.run(pieces, *given)

    def _end_eager(self) -> None:
        self._forward.is_eager = False
