"""How the sequences of one input branch: which part of their histories any two of them have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.growth import capacity


def rows_of(inputs: Tensor, copies: int) -> Tensor:
    """The rows of the given inputs, [n] -> [n * copies], where each has `copies` rows next to each other."""
    return (inputs.unsqueeze(1) * copies + torch.arange(copies, device=inputs.device)).flatten()


@dataclass(frozen=True)
class Move:
    """What a reorder has to move: row `rows[i]` takes positions `start:` of row `sources[i]`; the rest stays."""

    rows: Tensor
    sources: Tensor
    start: int


class Beams:
    """The `copies` sequences that continue each of `batch` inputs, and the history any two of them share.

    After a reorder, row r continues the history of row `index[r]`. Sequences of one input descend from one another, so
    most of their history is the same, and only what lies behind the point where the two rows parted needs to be moved.
    `common[b, i, j]` is the number of suffix positions, from the first, that sequences i and j of input b agree on.
    Where attention can read through a table, nothing is moved at all: `descend` changes the table.
    """

    def __init__(self, batch: int, copies: int) -> None:
        self.batch = batch
        self.copies = copies
        self._common: Tensor | None = None  # [batch, copies, copies], on the host; made at the first reorder
        self._index: Tensor | None = None
        self._move: Move | None = None
        self._ancestry: Tensor | None = None  # [rows, capacity], int32; made at the first descent
        self._descended: tuple[Tensor, int] | None = None

    @property
    def rows(self) -> int:
        return self.batch * self.copies

    def reorder(self, index: Tensor, length: int) -> Move | None:
        """What to move so that every row r continues row `index[r]`; None when nothing has to move.

        All layers of a model are reordered by the same `index` object one after another: the answer is worked out once.

        Args:
            index: [rows], integer; row r must descend from a row of the same input.
            length: suffix positions that are filled.

        Raises:
            ValueError: `index` has another length, or crosses from one input to another.
        """
        if index is not self._index:
            self._move = self._plan(index, length)
            self._index = index
        return self._move

    def keep(self, inputs: Tensor) -> None:
        """Goes on with the given inputs only, [n] in ascending order; the rows of the others are gone."""
        self.batch = inputs.shape[0]
        self._index = self._move = self._descended = None
        if self._common is not None:
            self._common = self._common[inputs.cpu()]
        if self._ancestry is not None:
            rows = rows_of(inputs, self.copies)
            moved = (rows - torch.arange(rows.shape[0])).int()  # ancestors are rows of the same input
            self._ancestry = self._ancestry[rows] - moved.unsqueeze(1)

    def descend(self, index: Tensor, length: int) -> None:
        """Every row r continues row `index[r]`, and nothing is moved: `ancestry` says where its positions lie.

        All layers of a model descend by the same `index` object one after another: it is done once. For the host only.

        Args:
            index, length: as for `reorder`. All layers that descend have the same length.

        Raises:
            ValueError: as in `reorder`, or they have not.
        """
        if self._descended is not None and index is self._descended[0]:
            if length != self._descended[1]:
                raise ValueError(f"layers of {self._descended[1]} and of {length} positions cannot share a table")
            return
        if index.shape != (self.rows,):
            raise ValueError(f"expected {self.rows} row indices, got a tensor of shape {tuple(index.shape)}")
        if not torch.equal(index // self.copies, torch.arange(self.rows) // self.copies):
            raise ValueError("a row cannot continue a sequence of another input")
        table = self._reserve(length)
        table[:, :length] = table[:, :length].index_select(0, index)
        self._descended = index, length

    def ancestry(self, length: int) -> Tensor | None:
        """[rows, length], int32: position t of row r lies in row `ancestry[r, t]`. None while it is row r itself.

        A view, valid until the next `descend` or `keep`.
        """
        return None if self._ancestry is None else self._reserve(length)[:, :length]

    def _reserve(self, length: int) -> Tensor:
        """The table, with room for `length` positions. Those that are new lie in their own row."""
        table = self._ancestry
        have = table.shape[1] if table is not None else 0
        if table is None or have < length:
            own = torch.arange(self.rows, dtype=torch.int32).unsqueeze(1)
            new = own.expand(-1, capacity(length, have) - have)
            self._ancestry = table = new.clone() if table is None else torch.cat([table, new], dim=1)
        return table

    def _plan(self, index: Tensor, length: int) -> Move | None:
        if index.shape != (self.rows,):
            raise ValueError(f"expected {self.rows} row indices, got a tensor of shape {tuple(index.shape)}")
        if index.device.type != "cpu":
            # Looking at the indices would make the host wait for the device: move everything there.
            return Move(torch.arange(self.rows, device=index.device), index.long(), 0)
        parents = index.long().view(self.batch, self.copies)
        parents = parents - torch.arange(self.batch).unsqueeze(1) * self.copies
        if int(parents.min()) < 0 or int(parents.max()) >= self.copies:
            raise ValueError("a row cannot continue a sequence of another input")
        own = torch.arange(self.copies)
        common = self._common
        if common is None:
            common = torch.zeros(self.batch, self.copies, self.copies, dtype=torch.long)
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
