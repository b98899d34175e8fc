"""K and V of one attention layer in buffers of a fixed capacity, for the captured step."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.decoding.captured.reader import StepReader
from fastgen.decoding.captured.step_state import StepState
from fastgen.decoding.shared import SharedKV
from fastgen.ops.attention import gather_suffix
from fastgen.ops.triton.kv_write import kv_write


class StaticKV:
    """A prefix per input, and, for self-attention, a suffix of `state.capacity` positions per row.

    Attributes:
        starts, ends: [batch], int32: the prefix positions that count are those in [start, end).
        prefix_capacity: positions of the prefix.
        reader: how attention reads them.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        state: StepState,
        prefix_capacity: int,
        has_suffix: bool,
        window: int | None = None,
    ) -> None:
        """
        Args:
            keys, values: [any, heads, any, dim]: as those that will be stored.
            window: a query sees so many positions, its own included; None for all.
        """
        self._state = state
        self.prefix_capacity = prefix_capacity
        self.starts = torch.zeros(state.batch, dtype=torch.int32, device=keys.device)
        self.ends = torch.zeros_like(self.starts)
        self._prefix = tuple(_zeros(part, state.batch, prefix_capacity) for part in (keys, values))
        self._suffix = tuple(_zeros(part, state.rows, state.capacity) for part in (keys, values) if has_suffix)
        self.reader = StepReader(self.starts, self.ends, state if has_suffix else None, window)

    @property
    def width(self) -> int:
        """Positions that a step stores."""
        return self._state.width

    @property
    def has_suffix(self) -> bool:
        return bool(self._suffix)

    @property
    def length(self) -> int:
        """Positions that the handles have: the whole capacity."""
        return self.prefix_capacity + (self._state.capacity if self._suffix else 0)

    def load(self, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, at_end: bool) -> None:
        """Takes over the prefix of a call: [inputs, heads, N, dim].

        Args:
            starts, ends: [inputs], int64: which of the N positions count.
            at_end: the prefix is put at the end of its capacity, and not at its start.
        """
        inputs, _, length, _ = keys.shape
        first = self.prefix_capacity - length if at_end else 0
        for old, new in zip(self._prefix, (keys, values), strict=True):
            old.zero_()  # what is masked must still be numbers
            old[:inputs, :, first : first + length] = new
        for part in self._suffix:
            part.zero_()
        self.starts.zero_()
        self.ends.zero_()
        self.starts[:inputs] = starts + first
        self.ends[:inputs] = ends + first

    def take_over(self, other: StaticKV) -> None:
        """Goes on with what `other`, whose suffix has a smaller capacity, has stored."""
        self.starts.copy_(other.starts)
        self.ends.copy_(other.ends)
        for old, new in zip(self._prefix, other._prefix, strict=True):
            old.copy_(new)
        for old, new in zip(self._suffix, other._suffix, strict=True):
            old[:, :, : new.shape[2]] = new

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores K and V of the step, [rows, heads, width, dim], and returns what stands for all of them."""
        for number, position in enumerate(self._state.positions):
            kv_write(keys[:, :, number], values[:, :, number], *self._suffix, position)
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """What stands for K and V of all rows: `SharedKV`s, [rows, heads, length, dim]."""
        suffix = self._suffix or (None, None)
        ancestry = self._state.ancestry if self._suffix else None
        return tuple(
            SharedKV.of(prefix, own, self._state.per_input, ancestry, reader=self.reader)
            for prefix, own in zip(self._prefix, suffix, strict=True)
        )

    def materialize(self, inputs: int, length: int, new: int = 0, at_end: bool = False) -> tuple[Tensor, Tensor]:
        """What is stored of the first `inputs` inputs as ordinary tensors, [rows, heads, length + new, dim].

        Args:
            length, at_end: positions of the prefix that `load` was given, and where it put them.
            new: positions of the suffix.
        """
        first = self.prefix_capacity - length if at_end else 0
        per_input = self._state.per_input
        found = [part[:inputs, :, first : first + length].repeat_interleave(per_input, dim=0) for part in self._prefix]
        if self._suffix:
            ancestry = self._state.ancestry
            for place, part in enumerate(self._suffix):
                own = part[:, :, :new] if ancestry is None else gather_suffix(part[:, :, :new], ancestry[:, :new])
                found[place] = torch.cat([found[place], own[: inputs * per_input]], dim=2)
        return found[0], found[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._prefix, *self._suffix))


def _zeros(like: Tensor, rows: int, length: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], length, like.shape[3])
