"""The rows of a batch in the KV cache: their number, their lengths, and the row in which each of their positions lies.

One object serves all layers of a model. In hooks the host knows everything (`Beams`). A captured step reads it from the
device (`StepState`), also if the step's rows are tokens that belong to arbitrary rows of the cache (`RaggedState`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgen.decoding.program_memory import Growing
from fastgen.memory import capacity as larger_capacity


def rows_of(inputs: Tensor, per_input: int) -> Tensor:
    """Returns the rows of the given inputs, [n] -> [n * per_input], if each input has `per_input` adjacent rows."""
    return (inputs.unsqueeze(1) * per_input + torch.arange(per_input, device=inputs.device)).flatten()


class Rows:
    """The rows that continue each of `batch` inputs, `per_input` adjacent ones each, and their ancestry."""

    def __init__(self, batch: int, per_input: int, device: torch.device | None = None) -> None:
        self.batch, self.per_input, self._device = batch, per_input, device

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    def _own(self, positions: int) -> Tensor:
        """Returns [rows, positions], int32: the ancestry of positions that lie in their own row."""
        return torch.arange(self.rows, dtype=torch.int32, device=self._device).unsqueeze(1).repeat(1, positions)

    def _longer(self, table: Tensor, capacity: int) -> Tensor:
        """Returns the ancestry table with more positions, which lie in their own row."""
        return torch.cat([table, self._own(capacity - table.shape[1])], dim=1)


class Beams(Rows):
    """The rows of a call with hooks, on the host.

    In a reorder, each layer in turn passes the same index object, which is read only once.
    """

    def __init__(self, batch: int, per_input: int) -> None:
        super().__init__(batch, per_input)
        self._ancestry: Tensor | None = None  # [rows, capacity], int32; made at the first update
        self._last_update: tuple[Tensor, int] | None = None
        self._checked: tuple[Tensor, int, bool] | None = None

    def check(self, index: Tensor) -> bool:
        """Checks the row indices of a reorder, [rows], whose values are only read if they are on the host.

        Returns:
            whether a row continues another row than itself; True if the indices are on another device.

        Raises:
            ValueError: `index` has another length, or crosses from one input to another.
        """
        known = self._checked
        if known is not None and index is known[0] and index._version == known[1]:
            return known[2]
        if index.shape != (self.rows,):
            raise ValueError(f"expected {self.rows} row indices, got a tensor of shape {tuple(index.shape)}")
        moves = True
        if index.device.type == "cpu":
            own = torch.arange(self.rows, dtype=index.dtype)
            if not torch.equal(index // self.per_input, own // self.per_input):
                raise ValueError("a row cannot continue a sequence of another input")
            moves = not torch.equal(index, own)
        # Inference tensors have no version, so a later write to them cannot be noticed.
        self._checked = None if index.is_inference() else (index, index._version, moves)
        return moves

    def update_ancestry(self, index: Tensor, length: int) -> None:
        """Has row r continue row `index[r]`, of `length` positions, by updating `ancestry`. CPU only.

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
        """Returns [rows, length], int32: position t of row r lies in row `ancestry[r, t]`; None while all lie in row r.

        The result is a view, valid until the next `update_ancestry` or `keep`.
        """
        return None if self._ancestry is None else self._reserve(length)[:, :length]

    def keep(self, inputs: Tensor) -> None:
        """Continues with the given inputs only, [n] in ascending order, and drops the rows of the others."""
        self.batch = inputs.shape[0]
        self._last_update = self._checked = None
        if self._ancestry is not None:
            rows = rows_of(inputs, self.per_input)
            moved = (rows - torch.arange(rows.shape[0])).int()  # ancestors are rows of the same input
            self._ancestry = self._ancestry[rows] - moved.unsqueeze(1)

    def _reserve(self, length: int) -> Tensor:
        """Returns the table, with a capacity of at least `length` positions."""
        if self._ancestry is None:
            self._ancestry = self._own(larger_capacity(length, 0))
        elif (have := self._ancestry.shape[1]) < length:
            self._ancestry = self._longer(self._ancestry, larger_capacity(length, have))
        return self._ancestry


class StepState(Rows):
    """The position of a captured step, on the device: all layers read it, and each step advances it once.

    Attributes:
        capacity: the maximum number of positions of the suffix.
        width: positions that a step stores. The first one stays; the next step overwrites those after it.
        position_table: [width + 1, rows], int64: `positions` and `suffix_lengths`.
        position: [rows], int64: the index in each row's suffix at which this step stores K and V.
        positions: `width` such tensors, one for each position of the step.
        suffix_lengths: [rows], int64: positions of the suffix that attention reads, including this step's.
        ancestry: [rows, capacity], int32: position t of row r lies in row `ancestry[r, t]`; None for one row per input.
        row_map: [rows], int64: the row of the cache that each row reads and writes; None: its own.

    Args:
        maps_rows: rows may read and write the K and V of another row. Requires one row per input.
    """

    row_map: Tensor | None = None

    def __init__(
        self,
        batch: int,
        per_input: int,
        capacity: int,
        device: torch.device,
        width: int = 1,
        growing: Growing | None = None,
        maps_rows: bool = False,
    ) -> None:
        super().__init__(batch, per_input, device)
        self.capacity, self.width = capacity, width
        self._first = torch.arange(width + 1, device=device).unsqueeze(1)
        self._put_table(self._first.repeat(1, self.rows))
        self._columns = torch.arange(capacity, device=device)
        self._own_row = self._own(1)
        self.ancestry = self._own(capacity) if per_input > 1 else None
        if maps_rows:
            self.row_map = torch.arange(self.rows, device=device)
        self._max_before = 0  # the maximum length before rows were set back
        self._growing = growing
        if growing is not None and self.ancestry is not None:
            growing.add(self.ancestry)

    def _put_table(self, table: Tensor) -> None:
        self.position_table = table
        *self.positions, self.suffix_lengths = table.unbind()
        self.position = self.positions[0]

    def of_width(self, width: int) -> StepState:
        """Returns the same positions for a step that stores fewer. They advance together with these."""
        return self._with(self.position_table[: width + 1], width)

    def beside(self, width: int) -> StepState:
        """Returns separate positions for the same rows, for steps that run ahead of this one or behind it."""
        return self._with(self.position_table[: width + 1].clone(), width)

    def _with(self, table: Tensor, width: int) -> StepState:
        other = copy.copy(self)
        other.width = width
        other._put_table(table)
        return other

    def reserve(self, capacity: int) -> Callable[[], None]:
        """Allocates memory for more positions of the suffix. Returns a function that replaces the tables, and allocates
        nothing. Stored positions stay where they are.
        """
        ancestry = None if self.ancestry is None else self._longer(self.ancestry, capacity)
        return partial(self._put, ancestry, torch.arange(capacity, device=self._device))

    def _put(self, ancestry: Tensor | None, columns: Tensor) -> None:
        if self._growing is not None and self.ancestry is not None and ancestry is not None:
            self._growing.exchange(self.ancestry, ancestry)
        self.capacity, self._columns = len(columns), columns

    def max_length(self) -> int:
        """Returns the number of suffix positions that any row may have stored. Waits for the device."""
        return self._stored(self.suffix_lengths)

    def length_of(self, inputs: Tensor | slice) -> int:
        """Returns the same for these inputs only."""
        return self._stored(self.suffix_lengths.view(self.batch, -1)[inputs])

    def _stored(self, lengths: Tensor) -> int:
        return min(max(int(lengths.max()), self._max_before), self.capacity)

    def keep_max_length(self) -> None:
        """Remembers the maximum length. To be called before rows are set back, as their stored positions stay."""
        self._max_before = self.max_length()

    def begin(self, inputs: slice = slice(None)) -> None:
        """Sets the suffix of these inputs to empty; the others continue."""
        rows = slice(*(inputs.indices(self.batch)[end] * self.per_input for end in range(2)))
        self.position_table[:, rows] = self._first
        if inputs == slice(None):
            self._max_before = 0
        if self.ancestry is not None:
            self.ancestry[rows] = self._own_row[rows]
        if self.row_map is not None:
            self.row_map[rows] = self._own_row[rows, 0].long()

    def fork(self, source: int, rows: slice) -> None:
        """Makes rows copies of the row `source` that share its K and V, each one position after the row before."""
        assert self.row_map is not None, "rows of this step read what is their own"
        self.insert(self, slice(source, source + 1), rows)
        self.row_map[rows] = source
        self.position_table[:, rows] += torch.arange(1, rows.stop - rows.start + 1, device=self._device)

    def insert(self, other: StepState, source: Tensor | slice, target: slice) -> None:
        """Has the inputs at `source` in `other`, of no larger capacity, continue at `target`."""
        count = self.per_input
        own, new = (each.position_table.unflatten(1, (-1, count)) for each in (self, other))
        own[:, target] = new[:, source]
        self._max_before = max(self._max_before, other._max_before)
        if self.ancestry is not None and other.ancestry is not None:
            own, new, row = (x.unflatten(0, (-1, count)) for x in (self.ancestry, other.ancestry, self._own_row))
            own[target] = row[target]
            own[target, :, : other.capacity] = row[target] // count * count + new[source] % count

    def advance(self, parents: Tensor | None, count: Tensor | int = 1) -> None:
        """Advances to the next step, whose rows continue `parents`, [rows] (None: themselves). Changes all in place.

        A reorder is nothing more: no K or V is moved. The next step stores its positions in each row itself.

        Of the positions stored by this step, `count` stay, [rows], int64, or one number for all. Rows that change
        places must be equally long.
        """
        self.position_table.add_(count)
        if self.ancestry is not None and parents is not None:
            moved = self.ancestry.index_select(0, parents)
            self.ancestry.copy_(torch.where(self._columns >= self.position.unsqueeze(1), self._own_row, moved))


class RaggedState(StepState):
    """The position of a step whose rows are tokens: each row of the cache may have a different number of them.

    K and V of a token are stored in the row that it belongs to, after those of the tokens before it. It reads that row
    up to itself.

    Attributes:
        row_map, offsets: [tokens], int64: the row of each token, and the number of that row's tokens before it.

    Args:
        rows: the positions of the rows that the tokens belong to.
    """

    row_map: Tensor

    def __init__(self, tokens: int, rows: StepState) -> None:
        device = rows.position_table.device
        super().__init__(tokens, 1, rows.capacity, device)
        self._of = rows
        self.row_map, self.offsets = torch.zeros(2, tokens, dtype=torch.int64, device=device).unbind()

    def spread(self, counts: Sequence[int]) -> None:
        """Sets how many tokens each row has. Surplus tokens repeat the first one, which does no harm.

        Raises:
            ValueError: there are no tokens, or more than the step has.
        """
        found = [(row, offset) for row, count in enumerate(counts) for offset in range(count)]
        if not 0 < len(found) <= self.rows:
            raise ValueError(f"{len(found)} tokens in a step of {self.rows}")
        found += found[:1] * (self.rows - len(found))
        for buffer, values in zip((self.row_map, self.offsets), zip(*found, strict=True), strict=True):
            buffer.copy_(torch.tensor(values))

    def locate(self) -> None:
        """Computes the positions. To be called at the beginning of a step, as a part of it."""
        self.position_table.copy_(self._of.position.index_select(0, self.row_map) + self.offsets + self._first)
