"""Where a captured step is: what all layers read, and the step changes once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.triton.beam_step import advance_ancestry


class Places:
    """Positions of a step over `batch` inputs with `copies` rows each, on the device.

    Attributes:
        batch, copies, capacity: inputs, rows of each, and positions that the suffix has room for.
        position: one int64: where the K/V of this step goes in the suffix.
        filled: one int64: positions of the suffix that attention reads, that of this step included.
        ancestry: [rows, capacity], int32: position t of row r lies in row `ancestry[r, t]`; None for one row per input.
    """

    def __init__(self, batch: int, copies: int, capacity: int, device: torch.device) -> None:
        self.batch, self.copies, self.capacity = batch, copies, capacity
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.filled = torch.ones((), dtype=torch.int64, device=device)
        self._own = torch.arange(self.rows, dtype=torch.int32, device=device).unsqueeze(1)
        self.ancestry = self._own.repeat(1, capacity) if copies > 1 else None

    @property
    def rows(self) -> int:
        return self.batch * self.copies

    def begin(self) -> None:
        """Nothing has been written to the suffix yet."""
        self.position.zero_()
        self.filled.fill_(1)
        if self.ancestry is not None:
            self.ancestry.copy_(self._own.expand_as(self.ancestry))

    def advance(self, parents: Tensor | None) -> None:
        """The step is done, and its rows continue `parents`, [rows] (None: themselves). Changes all in place."""
        self.position.add_(1)
        self.filled.add_(1)
        if self.ancestry is not None and parents is not None:
            advance_ancestry(self.ancestry, parents, self.position)

    def take_over(self, other: Places) -> None:
        """Goes on where `other`, which has less room, is."""
        self.position.copy_(other.position)
        self.filled.copy_(other.filled)
        if self.ancestry is not None and other.ancestry is not None:
            self.ancestry[:, : other.capacity] = other.ancestry
            self.ancestry[:, other.capacity :] = self._own
