"""A step in which each row has its own number of tokens: K, V and attention of tokens that belong to any rows.

To the model each token is a row of one position. Its K and V are stored in the row that it belongs to, behind those of
the tokens in front of it, and it sees that row as far as itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured.kv import StaticKV, StepState
from fastgen.decoding.shared import SharedKV
from fastgen.ops.kv_write import kv_write


class RaggedState(StepState):
    """Where each token of a step is, beside the `rows` that it is a step of.

    Attributes:
        owners, offsets: [tokens], int64: the row of each token, and how many tokens of that row are in front of it.
    """

    def __init__(self, tokens: int, rows: StepState) -> None:
        device = rows.numbers.device
        super().__init__(tokens, 1, rows.capacity, device)
        self._of = rows
        self.owners, self.offsets = torch.zeros(2, tokens, dtype=torch.int64, device=device).unbind()
        self._places: dict[int, Tensor] = {}

    def spread(self, counts: Sequence[int]) -> None:
        """Says how many tokens each row has. Those that are left over are the first one once more, which does no harm.

        Raises:
            ValueError: these are no tokens, or more than there are.
        """
        found = [(row, offset) for row, count in enumerate(counts) for offset in range(count)]
        if not 0 < len(found) <= self.rows:
            raise ValueError(f"{len(found)} tokens in a step of {self.rows}")
        found += found[:1] * (self.rows - len(found))
        for buffer, numbers in zip((self.owners, self.offsets), zip(*found, strict=True), strict=True):
            buffer.copy_(torch.tensor(numbers))

    def locate(self) -> None:
        """Finds the positions. To be called at the beginning of a step, as a part of it."""
        self.numbers.copy_(self._of.position.index_select(0, self.owners) + self.offsets + self._first)
        self._places = {}

    def places(self, size: int) -> Tensor:
        """[tokens]: where each token is stored if a row has so many positions and all rows are one."""
        if size not in self._places:
            self._places[size] = self.owners * size + self.position
        return self._places[size]


class RaggedKV(StaticKV):
    """The memory of another one, for a step that is where a `RaggedState` is.

    Only the attention operator reads it: scores that a model computes by itself would be of other rows.
    """

    def __init__(self, kv: StaticKV, state: RaggedState) -> None:
        vars(self).update(vars(kv.view(state)))
        self._tokens, self._owners = state, state.owners

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        heads, capacity = self._suffix[0].shape[1:3]
        key_cache, value_cache = (_in_one_row(part, self._tokens.rows) for part in self._suffix)
        kv_write(keys[:, :, 0], values[:, :, 0], key_cache, value_cache, self._tokens.places(heads * capacity))
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        parts = zip(self._prefix, self._suffix, strict=True)
        keys, values = (SharedKV.of(*part, 1, reader=self, queries=self._tokens.rows) for part in parts)
        return keys, values

    def _equals_lengths(self, mask: Tensor) -> bool:
        by_token: Any = copy.copy(self)
        inputs = self._tokens.owners // (len(self._suffix[0]) // len(self._prefix[0]))
        by_token.starts, by_token.ends = self.starts[inputs], self.ends[inputs]
        return StaticKV._equals_lengths(by_token, mask)


def _in_one_row(cache: Tensor, tokens: int) -> Tensor:
    """[tokens, heads, positions of all rows, dim]: all memory of [rows, heads, capacity, dim], from any row on.

    Position t of row r is position r * heads * capacity + t here.
    """
    rows, heads, capacity, dim = cache.shape
    size = (tokens, heads, ((rows - 1) * heads + 1) * capacity, dim)
    return cache.as_strided(size, (0, capacity * dim, dim, 1))
