"""The beams of each input: which part of their histories any two of them have in common, and where it is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.memory import capacity


def rows_of(inputs: Tensor, per_input: int) -> Tensor:
    """The rows of the given inputs, [n] -> [n * per_input], where each has `per_input` rows next to each other."""
    return (inputs.unsqueeze(1) * per_input + torch.arange(per_input, device=inputs.device)).flatten()


class Move(NamedTuple):
    """What a reorder has to move: row `rows[i]` takes positions `start:` of row `sources[i]`; the rest stays."""

    rows: Tensor
    sources: Tensor
    start: int


class Beams:
    """The `per_input` sequences that continue each of `batch` inputs, and the history any two of them share.

    After a reorder, row r continues the history of row `index[r]`, and only what lies behind the point where the two
    rows parted needs to be moved. `common[b, i, j]` is the number of suffix positions, from the first, that sequences i
    and j of input b agree on. Where attention can read through a table, `update_ancestry` changes that instead.
    """

    def __init__(self, batch: int, per_input: int) -> None:
        self.batch = batch
        self.per_input = per_input
        self._common: Tensor | None = None  # [batch, per_input, per_input], on the host; made at the first reorder
        self._index: Tensor | None = None
        self._move: Move | None = None
        self._ancestry: Tensor | None = None  # [rows, capacity], int32; made at the first update
        self._last_update: tuple[Tensor, int] | None = None
        self._checked: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    def check(self, index: Tensor) -> None:
        """Looks at the row indices of a reorder, [rows]: at the same tensor once, and at values on the host alone.

        Raises:
            ValueError: `index` has another length, or crosses from one input to another.
        """
        if index is self._checked:
            return
        if index.shape != (self.rows,):
            raise ValueError(f"expected {self.rows} row indices, got a tensor of shape {tuple(index.shape)}")
        own = torch.arange(self.rows) // self.per_input
        if index.device.type == "cpu" and not torch.equal(index // self.per_input, own):
            raise ValueError("a row cannot continue a sequence of another input")
        self._checked = index

    def reorder(self, index: Tensor, length: int) -> Move | None:
        """What to move, of `length` filled positions, so that every row continues row `index[r]`; None for nothing.

        All layers of a model are reordered by the same `index` object one after another: the answer is worked out once.
        Errors are those of `check`.
        """
        if index is not self._index:
            self._move = self._plan(index, length)
            self._index = index
        return self._move

    def keep(self, inputs: Tensor) -> None:
        """Goes on with the given inputs only, [n] in ascending order; the rows of the others are gone."""
        self.batch = inputs.shape[0]
        self._index = self._move = self._last_update = self._checked = None
        if self._common is not None:
            self._common = self._common[inputs.cpu()]
        if self._ancestry is not None:
            rows = rows_of(inputs, self.per_input)
            moved = (rows - torch.arange(rows.shape[0])).int()  # ancestors are rows of the same input
            self._ancestry = self._ancestry[rows] - moved.unsqueeze(1)

    def update_ancestry(self, index: Tensor, length: int) -> None:
        """`reorder` without moving anything: `ancestry` says where the positions of a row lie. CPU only.

        All layers of a model pass the same `index` object one after another; the first changes the table.

        Raises:
            ValueError: as in `check`, or the lengths of two layers differ.
        """
        if self._last_update is not None and index is self._last_update[0]:
            if length != self._last_update[1]:
                raise ValueError(f"layers of {self._last_update[1]} and of {length} positions cannot share a table")
            return
        self.check(index)
        table = self._reserve(length)
        table[:, :length] = table[:, :length].index_select(0, index)
        self._last_update = index, length

    def ancestry(self, length: int) -> Tensor | None:
        """[rows, length], int32: position t of row r lies in row `ancestry[r, t]`. None while it is row r itself.

        A view, valid until the next `update_ancestry` or `keep`.
        """
        return None if self._ancestry is None else self._reserve(length)[:, :length]

    def _reserve(self, length: int) -> Tensor:
        """The table, with a capacity of `length` positions at least. Those that are new lie in their own row."""
        table = self._ancestry
        have = table.shape[1] if table is not None else 0
        if table is None or have < length:
            own = torch.arange(self.rows, dtype=torch.int32).unsqueeze(1)
            new = own.expand(-1, capacity(length, have) - have)
            self._ancestry = table = new.clone() if table is None else torch.cat([table, new], dim=1)
        return table

    def _plan(self, index: Tensor, length: int) -> Move | None:
        self.check(index)
        if index.device.type != "cpu":
            # Looking at the indices would make the host wait for the device: move everything there.
            return Move(torch.arange(self.rows, device=index.device), index.long(), 0)
        parents = index.long().view(self.batch, self.per_input)
        parents = parents - torch.arange(self.batch).unsqueeze(1) * self.per_input
        own = torch.arange(self.per_input)
        common = self._common
        if common is None:
            common = torch.zeros(self.batch, self.per_input, self.per_input, dtype=torch.long)
        # How much of the history of its parent each row has already.
        known = common.gather(2, parents.unsqueeze(2)).squeeze(2)
        moved = parents != own
        # The histories after the reorder: as long as the parents' common part, whole where the parent is the same.
        common = common.gather(1, parents.unsqueeze(2).expand_as(common))
        common = common.gather(2, parents.unsqueeze(1).expand_as(common))
        self._common = common.masked_fill(parents.unsqueeze(2) == parents.unsqueeze(1), length)
        if not bool(moved.any()):
            return None
        start = int(known[moved].min())
        rows = moved.view(-1).nonzero().squeeze(1)
        return Move(rows, index.long()[rows], start) if start < length else None
