"""Where a captured step is: what all layers read, and the step changes once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.triton.beam_step import advance_ancestry


class StepState:
    """Positions of a step over `batch` inputs with `per_input` rows each, on the device.

    Attributes:
        batch, per_input, capacity: inputs, rows of each, and positions of the suffix at the most.
        width: positions that a step stores. The first of them stays; what is behind it, the next step writes over.
        position: one int64: where the K/V of this step goes in the suffix.
        positions: `width` of them: the same for each position of the step.
        filled: one int64: positions of the suffix that attention reads, those of this step included.
        ancestry: [rows, capacity], int32: position t of row r lies in row `ancestry[r, t]`; None for one row per input.
    """

    def __init__(self, batch: int, per_input: int, capacity: int, device: torch.device, width: int = 1) -> None:
        self.batch, self.per_input, self.capacity, self.width = batch, per_input, capacity, width
        self._positions = torch.arange(width, device=device)
        self.positions = self._positions.unbind()
        self.position = self.positions[0]
        self.filled = torch.full((), width, dtype=torch.int64, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._own = torch.arange(self.rows, dtype=torch.int32, device=device).unsqueeze(1)
        self.ancestry = self._own.repeat(1, capacity) if per_input > 1 else None
        self._orders: dict[tuple[int, int], Tensor] = {}

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    def begin(self) -> None:
        """Nothing has been written to the suffix yet."""
        self._positions.copy_(torch.arange(self.width, device=self._positions.device))
        self.filled.fill_(self.width)
        if self.ancestry is not None:
            self.ancestry.copy_(self._own.expand_as(self.ancestry))
        self._write_orders()

    def advance(self, parents: Tensor | None) -> None:
        """The step is done, and its rows continue `parents`, [rows] (None: themselves). Changes all in place."""
        self._positions.add_(1)
        self.filled.add_(1)
        if self.ancestry is not None and parents is not None:
            advance_ancestry(self.ancestry, parents, self.position)
            if self.width > 1:  # the other positions of the next step lie in the row itself, too
                self.ancestry.copy_(torch.where(self._columns >= self.position, self._own, self.ancestry))
        self._write_orders()

    def take_over(self, other: StepState) -> None:
        """Goes on where `other`, which has a smaller capacity, is."""
        self._positions.copy_(other._positions)
        self.filled.copy_(other.filled)
        if self.ancestry is not None and other.ancestry is not None:
            self.ancestry[:, : other.capacity] = other.ancestry
            self.ancestry[:, other.capacity :] = self._own
        self._write_orders()

    def order(self, heads: int, prefix: int) -> Tensor:
        """What is added to the scores so that a position of the step does not see those of the step behind it.

        A buffer that goes along with the steps: one for all layers of a shape.

        Returns:
            [1, heads * width, prefix + capacity], float32: the positions of the step one by one for each head.
        """
        if (heads, prefix) not in self._orders:
            made = torch.zeros(1, heads * self.width, prefix + self.capacity, device=self._own.device)
            self._orders[heads, prefix] = made
            self._write_orders()
        return self._orders[heads, prefix]

    def _write_orders(self) -> None:
        for (heads, prefix), order in self._orders.items():
            behind = self._columns > self._positions.unsqueeze(1)
            part = order.view(heads, self.width, -1)[:, :, prefix:]
            part.copy_(torch.zeros_like(behind, dtype=order.dtype).masked_fill_(behind, -torch.inf))
