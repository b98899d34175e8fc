"""What a `KVView` represents: the stored parts of K or V, and the view of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.attention import gather_suffix
from fastgen.ops.linear.choose import upcast

_EXPAND = partial(torch.einsum, "rhqk,hdk->rhqd")
_ABSORB = partial(torch.einsum, "rhqd,hdk->rhqk")


@dataclass(frozen=True)
class Parts:
    """The stored tensors, and the view of them that a `KVView` represents."""

    prefix: Tensor  # [batch, kv heads, N, dim]
    suffix: Tensor | None  # [rows, kv heads, T, dim]
    per_input: int
    # [rows, T]: position t of row r of the suffix lies in row `ancestry[r, t]`; None: in row r.
    ancestry: Tensor | None = None
    # Refers to a method that makes the suffix contiguous by row, for users other than the attention operator.
    materialize_suffix: weakref.WeakMethod | None = None
    backend: Any = None  # the `FixedKV` of a captured step, which knows which positions of prefix and suffix count
    queries: int | None = None  # number of rows that read, if the backend maps them to rows of the cache
    tiles: int = 1  # all kv heads, one after the other, are repeated this many times
    group: int = 1  # each of these is repeated this many times (grouped-query attention)
    ungrouped: bool = False  # [rows, kv heads, group, length, dim], half-way through such a repetition
    folded: bool = False  # heads are folded into rows: [rows * heads, length, dim]
    transposed: bool = False  # the last two dimensions are swapped
    by_query: bool = False  # one head, of which a left factor has its queries before the heads that read it
    columns: slice | None = None  # the range of the last stored dimension that counts; None: all
    # [heads, any, rank]: each head multiplies the first `rank` columns by this, and appends the other columns.
    weight: Tensor | None = None
    # The suffix in row order once it was needed, shared by all views of the tensor.
    gathered: list[Tensor] = field(default_factory=list, compare=False)

    @property
    def rows(self) -> int:
        return self.prefix.shape[0] * self.per_input if self.queries is None else self.queries

    def own(self) -> Tensor | None:
        """Returns the suffix with the positions of row r in row r."""
        if self.materialize_suffix is not None and (materialize := self.materialize_suffix()) is not None:
            materialize()
        if self.suffix is None or self.ancestry is None:
            return self.suffix
        if not self.gathered:
            self.gathered.append(gather_suffix(self.suffix, self.ancestry))
        return self.gathered[0]

    @property
    def kv_heads(self) -> int:
        return self.prefix.shape[1]

    @property
    def heads(self) -> int:
        return self.tiles * self.kv_heads * self.group

    @property
    def length(self) -> int:
        return self.prefix.shape[2] + (self.suffix.shape[2] if self.suffix is not None else 0)

    @property
    def width(self) -> int:
        stored = len(range(self.prefix.shape[3])[self.columns or slice(None)])
        return stored if self.weight is None else stored + self.weight.shape[1] - self.weight.shape[2]

    def expand(self, x: Tensor) -> Tensor:
        """Expands stored values, [rows, heads, any, stored], to those of the heads."""
        x = x if self.columns is None else x[..., self.columns]
        if self.weight is None:
            return x
        rank = self.weight.shape[2]
        return torch.cat([upcast(_EXPAND, x[..., :rank], self.weight), x[..., rank:]], dim=-1)

    def heads_of(self, part: slice) -> Parts:
        """Returns the parts of some kv heads."""
        suffix = None if self.suffix is None else self.suffix[:, part]
        return replace(self, prefix=self.prefix[:, part], suffix=suffix, gathered=[])

    def absorb(self, query: Tensor) -> Tensor:
        """Returns the query whose products with stored values equal those of `query` with the heads' values.

        The query is [rows, heads, queries, dim].
        """
        if self.weight is None:
            return query
        dim = self.weight.shape[1]
        return torch.cat([upcast(_ABSORB, query[..., :dim], self.weight), query[..., dim:]], dim=-1)

    def shape(self) -> tuple[int, ...]:
        last = (self.length, self.width)
        if self.transposed:
            last = last[::-1]
        if self.ungrouped:
            return (self.rows, self.tiles * self.kv_heads, self.group, *last)
        return (self.rows * self.heads, *last) if self.folded else (self.rows, self.heads, *last)
