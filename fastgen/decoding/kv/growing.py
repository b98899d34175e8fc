"""The KV cache of hooks: a prefix stored once per input, and a suffix that grows in place."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fastgen.decoding.kv import Pair
from fastgen.decoding.kv.rows import Beams, rows_of
from fastgen.decoding.kv.view import KVView
from fastgen.memory import capacity
from fastgen.ops import attention

# A prefix is shared if it has at least this many positions, and its K and V, repeated for every row, at least this many
# bytes per layer. Below that, reading the repetitions takes less time than the additional operations of a split
# attention, and the prefix is repeated. At these sizes, both take the same time on a CPU with 15 GB/s.
MIN_SHARED_PREFIX = 32
MIN_SHARED_BYTES = 2**20
# A suffix after a prefix that is not worth sharing is read through the ancestry table if one position of K and V has so
# many bytes over all rows. Below that, moving the suffix takes less time than an attention other than the library's.
MIN_TABLE_BYTES = 2**17


def _span(rows: Tensor) -> slice | None:
    """Returns ascending rows as a slice, if they are adjacent. Never on a device, which would have to be waited for."""
    if rows.device.type != "cpu":
        return None
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == rows.shape[0] - 1 else None


def _allocated(like: Pair, positions: int) -> Pair:
    """Returns memory for K and V of this many positions."""
    keys, values = (part.new_empty(*part.shape[:2], positions, part.shape[3]) for part in like)
    return keys, values


class GrowingKV:
    """K and V of one attention layer during one call of `generate`.

    The prefix comes first: `extend` is called with [batch, heads, L, dim], once or once per chunk of the prompt. After
    `expand`, every input is continued by several sequences, and `extend` takes [batch * per_input, heads, T, dim]. It
    returns K and V of [batch * per_input, heads, length, dim]: as a `KVView`, or as plain tensors if nothing is shared,
    because there is one sequence per input, or the prefix is too short to pay.

    If the attention operator can read the suffix through a table (`Beams.ancestry`), a reorder moves nothing, until
    something else needs the suffix. Otherwise a reorder moves the suffix, as the library does.

    Args:
        initial_capacity: suffix positions to allocate at first.
        window: number of positions that a query sees, including its own; None for all. Positions that no later query
            can see are dropped from the prefix. The suffix is kept whole, and the caller has to mask it.

    Attributes:
        prefix: K and V, [batch, heads, N, dim] each; values may have another dim. None before it is stored.
        suffix: K and V, [rows, heads, capacity, dim] each; None before it is begun.
        suffix_length: positions of the suffix.
    """

    prefix: Pair | None = None
    suffix: Pair | None = None

    def __init__(self, initial_capacity: int, window: int | None = None) -> None:
        self._initial_capacity = max(initial_capacity, 1)
        self._window = window
        self.dropped = self.suffix_length = 0
        self._beams: Beams | None = None
        # Positions at the front of the suffix that belong to the prefix, and are the same in all rows of an input.
        self._repeated = 0
        self._is_short = False  # the prefix is not worth sharing
        self._uses_ancestry = False  # reorders change the table of `Beams`, and leave the suffix in place
        # Positions of the suffix at the last reorder, whose rows the table holds.
        self._length_at_reorder = 0
        self._views: Pair | None = None
        # Weak, because views must not keep this cache alive. Made with the suffix, as an empty layer may be copied.
        self._materialize_suffix: weakref.WeakMethod | None = None

    @property
    def length(self) -> int:
        """Positions of the cache, prefix and suffix together, including dropped ones."""
        return self.dropped + self.cached

    @property
    def cached(self) -> int:
        """Positions that are in `keys` and `values`."""
        return (self.prefix[0].shape[2] if self.prefix is not None else 0) + self.suffix_length

    def expand(self, beams: Beams) -> None:
        """Continues every input by `beams.per_input` sequences from now on."""
        self._beams = beams
        self._views = None
        if self.prefix is None or beams.per_input == 1:
            return
        keys, values = self.prefix
        if self._window is not None:
            unseen = max(keys.shape[2] - self._window + 1, 0)
            keys, values = keys[:, :, unseen:], values[:, :, unseen:]
            self.dropped += unseen
        repeated_bytes = (keys.nbytes + values.nbytes) * beams.per_input
        self._is_short = keys.shape[2] < MIN_SHARED_PREFIX or repeated_bytes < MIN_SHARED_BYTES
        # Projections have heads and positions swapped in memory, which batched products would copy in every step.
        self.prefix = keys.contiguous(), values.contiguous()

    def extend(self, keys: Tensor, values: Tensor) -> Pair:
        """Adds positions, and returns all of K and all of V."""
        self._views = None
        if self._beams is None:
            if self.prefix is not None:
                keys = torch.cat([self.prefix[0], keys], dim=2)
                values = torch.cat([self.prefix[1], values], dim=2)
            self.prefix = keys, values
            return keys, values
        if self.suffix is None:
            self._begin_suffix(self._beams, keys, values)
        else:
            self._append(keys, values)
        return self.read()

    def _begin_suffix(self, beams: Beams, keys: Tensor, values: Tensor) -> None:
        """Starts the suffix. A prefix that is not shared, which already has a row per sequence, moves into it."""
        self._uses_ancestry = self._may_use_ancestry(beams, keys, values)
        self._materialize_suffix = weakref.WeakMethod(self.materialize_suffix)
        if self._is_short and not self._uses_ancestry:
            self._repeat_prefix()
        if self._uses_ancestry and self.prefix is None:  # nothing precedes the first position of the sequences
            batch = beams.batch
            self.prefix = keys[:batch, :, :0].contiguous(), values[:batch, :, :0].contiguous()
        if self.prefix is not None and not self._is_shared:
            self._move_prefix(self.prefix, keys, values)
        else:
            self._start_suffix(keys, values, max(self._initial_capacity, keys.shape[2] + 1))

    def _start_suffix(self, keys: Tensor, values: Tensor, positions: int) -> None:
        self.suffix, self.suffix_length = _allocated((keys, values), positions), 0
        self._append(keys, values)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        assert self.suffix is not None, "positions are appended to a suffix"
        end, present = self.suffix_length + keys.shape[2], self.suffix[0].shape[2]
        if end > present:
            longer, stored = _allocated(self.suffix, capacity(end, present)), slice(self.suffix_length)
            for old, new in zip(self.suffix, longer, strict=True):
                new[:, :, stored] = old[:, :, stored]
            self.suffix = longer
        for part, new in zip(self.suffix, (keys, values), strict=True):
            part[:, :, self.suffix_length : end] = new
        self.suffix_length = end

    def _move_prefix(self, prefix: Pair, keys: Tensor, values: Tensor) -> None:
        """Makes the suffix of the prefix, which has a row per sequence, followed by these."""
        self.prefix, self._repeated = None, prefix[0].shape[2]
        self._start_suffix(*prefix, self._repeated + self._initial_capacity)
        self._append(keys, values)

    def _may_use_ancestry(self, beams: Beams, keys: Tensor, values: Tensor) -> bool:
        """Whether reorders change a table instead of the suffix, if the suffix starts with these."""
        is_worth_sharing = self._is_shared and not self._is_short
        return (
            beams.per_input > 1
            and (self.prefix is None or self._is_shared)
            and keys.dtype is torch.float32
            and attention.reads_ancestry(keys.device.type)
            and not torch.is_grad_enabled()
            and (is_worth_sharing or keys.nbytes + values.nbytes >= MIN_TABLE_BYTES * keys.shape[2])
        )

    def _repeat_prefix(self) -> Pair:
        """Repeats a prefix that is not worth sharing, so that it has a row per sequence."""
        assert self._beams is not None and self.prefix is not None, "`expand` has found a short prefix"
        keys, values = (part.repeat_interleave(self._beams.per_input, dim=0) for part in self.prefix)
        self.prefix, self._is_short = (keys, values), False
        return keys, values

    def prompt(self) -> Pair:
        """Returns K and V of the prompt, [batch, heads, N, dim]."""
        assert self.prefix is not None and self.suffix is None, "nothing else is stored"
        return self.prefix

    def release(self) -> None:
        self.prefix = self.suffix = self._views = None
        self.suffix_length = 0

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Replaces everything stored by these, [rows, heads, positions, dim], to which nothing is added."""
        self.release()
        self.prefix, self._is_short, self._uses_ancestry = (keys, values), False, False

    def materialize_suffix(self) -> None:
        """Puts the suffix in row order for good, because something other than the attention operator needs it."""
        if not self._uses_ancestry:
            return
        assert self._beams is not None and self.suffix is not None, "a table is of the suffix of beams"
        ancestry = self._beams.ancestry(self.suffix_length)
        keys, values = (part[:, :, : self.suffix_length] for part in self.suffix)
        if ancestry is not None:
            keys, values = attention.gather_suffix(keys, ancestry), attention.gather_suffix(values, ancestry)
        self._uses_ancestry, self._views = False, None
        if self._is_short:
            self._move_prefix(self._repeat_prefix(), keys, values)
            self._length_at_reorder += self._repeated
        else:
            self._start_suffix(keys, values, self.suffix_length + self._initial_capacity)

    def crop(self, count: int) -> None:
        """Forgets the last `count` positions, which a step has only looked at.

        Raises:
            ValueError: fewer positions were added since `expand` and the last `reorder`.
        """
        self._views = None
        if self.prefix is not None and self.suffix is None and self._beams is None and self.cached > count:
            keys, values = self.prefix
            self.prefix = keys[:, :, :-count], values[:, :, :-count]
            return
        if self.suffix_length - count < max(self._length_at_reorder, self._repeated):
            raise ValueError(f"{count} positions cannot be forgotten: not so many were added since the last reorder")
        self.suffix_length -= count

    @property
    def _is_shared(self) -> bool:
        """Whether one row of the prefix serves several sequences."""
        return self._beams is not None and self.prefix is not None and self.prefix[0].shape[0] != self._beams.rows

    def read(self) -> Pair:
        """Returns K and V of all rows, like `extend`. Raises ValueError if nothing has been stored yet."""
        if self._views is None:
            if self._is_short and self.suffix is None:
                self._repeat_prefix()
            self._views = self._view(0), self._view(1)
        return self._views

    def _view(self, which: int) -> Tensor:
        suffix = self.suffix[which][:, :, : self.suffix_length] if self.suffix is not None else None
        prefix = self.prefix[which] if self.prefix is not None else None
        if prefix is None:
            if suffix is None:
                raise ValueError("this layer holds no keys and values yet")
            return suffix
        if self._beams is None or not self._is_shared:
            return prefix
        ancestry = materialize_suffix = None
        if suffix is not None and self._uses_ancestry:
            ancestry, materialize_suffix = self._beams.ancestry(self.suffix_length), self._materialize_suffix
        return KVView.of(prefix, suffix, self._beams.per_input, ancestry, materialize_suffix)

    def reorder(self, index: Tensor) -> None:
        """Has row r continue the sequence of row `index[r]`, [rows]. Raises ValueError as `Beams.check` does."""
        if self._beams is None or self.suffix is None or self._beams.per_input == 1:
            return
        if self._uses_ancestry:
            self._beams.update_ancestry(index, self.suffix_length)
        elif self._beams.check(index) and self.suffix_length > self._repeated:
            self._move(self.suffix, index)
        self._length_at_reorder, self._views = self.suffix_length, None

    def _move(self, suffix: Pair, index: Tensor) -> None:
        """Replaces row r of the suffix by row `index[r]`."""
        if torch.is_grad_enabled() or not suffix[0].is_cpu:
            for part in suffix:
                cached = part[:, :, : self.suffix_length]
                cached.copy_(cached.index_select(0, index.to(part.device)))
            return
        index = index.to(suffix[0].device)
        # Written once, to new memory. This takes one more layer's memory: the next layer gets this one's.
        moved = _allocated(suffix, suffix[0].shape[2])
        for part, new in zip(suffix, moved, strict=True):
            torch.index_select(part[:, :, : self.suffix_length], 0, index, out=new[:, :, : self.suffix_length])
        self.suffix = moved

    def keep(self, inputs: Tensor) -> None:
        """Continues with the given inputs only, [n] in ascending order. To be called before `Beams.keep`."""
        if self._beams is None:
            raise ValueError("inputs can leave only after the beams are expanded")
        rows = rows_of(inputs, self._beams.per_input)
        if self.prefix is not None:
            kept = inputs if self._is_shared else rows
            span = _span(kept)
            keys, values = (part[span] if span else part.index_select(0, kept) for part in self.prefix)
            self.prefix = keys, values
        if self.suffix is not None:
            keys, values = (self._kept(part, rows) for part in self.suffix)
            self.suffix = keys, values
        self._views = None

    def _kept(self, part: Tensor, rows: Tensor) -> Tensor:
        """Returns these rows of the suffix, at least one and in ascending order, in the memory that it has."""
        span = _span(rows)
        if span is not None:
            return part[span]
        kept = part[:, :, : self.suffix_length].index_select(0, rows)
        part = part[: rows.shape[0]]
        part[:, :, : self.suffix_length] = kept
        return part

    def materialize(self) -> Pair:
        """Returns K and V as ordinary contiguous tensors, [rows, heads, length, dim], for code that takes them over."""
        keys, values = (part.materialize() if isinstance(part, KVView) else part for part in self.read())
        return keys.contiguous(), values.contiguous()
