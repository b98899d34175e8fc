"""The K/V store of one layer: a prefix held once per input, and a suffix that grows in place."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fastgen.decoding.beams import Beams, rows_of
from fastgen.decoding.shared import SharedKV
from fastgen.memory import capacity
from fastgen.ops import attention

# A prefix is shared when it has at least so many positions, and its K and V, repeated for every row, at least so
# many bytes per layer. Below, reading the repetitions takes less time than the additional operations of a split
# attention do, and the prefix is repeated. The sizes are where both take the same time on a CPU with 15 GB/s.
MIN_SHARED_PREFIX = 32
MIN_SHARED_BYTES = 2**20
# A suffix behind a prefix that is not worth sharing is read through a table when a position of K and V has so many
# bytes over all rows. Below, moving what a reorder changes takes less time than an attention that is not the library's.
MIN_TABLE_BYTES = 2**17
# K, or V, of all rows of a layer up to so many bytes is moved whole by a reorder: that takes less time than working out
# which part has to move.
MAX_WHOLE_BYTES = 2**18


def _span(rows: Tensor) -> slice | None:
    """The rows, in ascending order, as a slice, if they lie next to each other. Not looked at on a device: it waits."""
    if rows.device.type != "cpu":
        return None
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == rows.shape[0] - 1 else None


class GrowingTensor:
    """[rows, heads, length, dim], appended to along `length`: the memory is allocated ahead."""

    def __init__(self, first: Tensor, spare: int) -> None:
        rows, heads, self.length, width = first.shape
        self._data = first.new_empty(rows, heads, self.length + max(spare, 1), width)
        self._data[:, :, : self.length] = first

    def view(self) -> Tensor:
        """The filled part, a view: valid until the next `append` or `move`."""
        return self._data[:, :, : self.length]

    def append(self, new: Tensor) -> None:
        end = self.length + new.shape[2]
        if end > self._data.shape[2]:
            rows, heads, present, width = self._data.shape
            data = self._data.new_empty(rows, heads, capacity(end, present), width)
            data[:, :, : self.length] = self.view()
            self._data = data
        self._data[:, :, self.length : end] = new
        self.length = end

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def move_whole(self, index: Tensor) -> None:
        """Row r takes all positions of what row `index[r]` was before the call."""
        self._data = self._data.index_select(0, index)

    def move(self, rows: Tensor, sources: Tensor, start: int) -> None:
        """Row `rows[i]` takes positions `start:` of what row `sources[i]` was before the call."""
        part = self._data[:, :, start : self.length]
        part[rows] = part.index_select(0, sources)

    def keep(self, rows: Tensor) -> None:
        """Goes on with the given rows only, which are at least one and in ascending order."""
        span = _span(rows)
        if span is not None:
            self._data = self._data[span]
            return
        kept = self.view().index_select(0, rows)
        self._data = self._data[: rows.shape[0]]
        self._data[:, :, : self.length] = kept


class LayerKV:
    """K and V of one attention layer through one call of `generate`.

    First the prefix: `extend` is called with [batch, heads, L, dim] (once, or once per chunk of the prompt). Then
    `expand` says that every input is continued by several sequences, and from then on `extend` takes
    [batch * per_input, heads, T, dim]. What it returns stands for [batch * per_input, heads, length, dim]: it is a
    `SharedKV`, or a plain tensor where nothing is shared: one sequence per input, or a prefix too short to pay.

    A reorder moves the part of the suffix that changes. Where the attention operator can read through a table
    (`Beams.ancestry`) it moves nothing, until something else wants the suffix.

    Args:
        initial_capacity: suffix positions to allocate at first.
        window: a query sees so many positions, its own included; None for all. What no later query can see is dropped
            from the prefix. The suffix is kept whole: what a mask leaves out of it is the caller's business.
    """

    def __init__(self, initial_capacity: int, window: int | None = None) -> None:
        self._initial_capacity = initial_capacity
        self._window = window
        self.dropped = 0
        self._beams: Beams | None = None
        self._prefix: tuple[Tensor, Tensor] | None = None
        self._suffix: tuple[GrowingTensor, GrowingTensor] | None = None
        # Positions at the front of the suffix that belong to the prefix: the same in all rows of an input.
        self._repeated = 0
        self._is_short = False  # the prefix is not worth sharing
        self._is_small = True  # a reorder may move all of the suffix
        self._uses_ancestry = False  # reorders change the table of `Beams`; the suffix stays where it is
        # Positions of the suffix at the last reorder: up to there, `Beams` knows what the rows have in common.
        self._length_at_reorder = 0
        self._handles: tuple[Tensor, Tensor] | None = None
        # For the handles, which must not hold what holds them. Made with the suffix: an empty layer may be copied.
        self._materialize_suffix: weakref.WeakMethod | None = None

    @property
    def length(self) -> int:
        """Positions seen, prefix and suffix together, those that were dropped included."""
        return self.dropped + self.stored

    @property
    def stored(self) -> int:
        """Positions that `keys` and `values` have."""
        prefix = self._prefix[0].shape[2] if self._prefix is not None else 0
        return prefix + (self._suffix[0].length if self._suffix is not None else 0)

    def expand(self, beams: Beams) -> None:
        """From now on every input is continued by `beams.per_input` sequences."""
        self._beams = beams
        self._handles = None
        if self._prefix is None or beams.per_input == 1:
            return
        keys, values = self._prefix
        if self._window is not None:
            self.dropped = max(keys.shape[2] - self._window + 1, 0)
            keys, values = keys[:, :, self.dropped :], values[:, :, self.dropped :]
        repeated_bytes = (keys.nbytes + values.nbytes) * beams.per_input
        self._is_short = keys.shape[2] < MIN_SHARED_PREFIX or repeated_bytes < MIN_SHARED_BYTES
        # Projections come with heads and positions swapped in memory; batched products would copy that every step.
        self._prefix = keys.contiguous(), values.contiguous()

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds positions, and returns what stands for all of K and all of V."""
        if self._beams is None:
            if self._prefix is not None:
                keys = torch.cat([self._prefix[0], keys], dim=2)
                values = torch.cat([self._prefix[1], values], dim=2)
            self._prefix = keys, values
            self._handles = None
            return keys, values
        if self._suffix is None:
            self._store_in_suffix(self._beams, keys, values)
        else:
            self._suffix[0].append(keys)
            self._suffix[1].append(values)
        self._handles = None
        return self.read()

    def _store_in_suffix(self, beams: Beams, keys: Tensor, values: Tensor) -> None:
        """Starts the suffix; a prefix that is not shared (one row per sequence already) moves into it."""
        self._uses_ancestry = self._may_use_ancestry(beams, keys, values)
        self._materialize_suffix = weakref.WeakMethod(self.materialize_suffix)
        if self._is_short and not self._uses_ancestry:
            self._repeat_prefix()
        if self._uses_ancestry and self._prefix is None:  # nothing came before the first position of the sequences
            batch = beams.batch
            self._prefix = keys[:batch, :, :0].contiguous(), values[:batch, :, :0].contiguous()
        if self._prefix is not None and not self._is_shared:
            self._move_prefix(self._prefix, keys, values)
        else:
            self._start_suffix(keys, values, max(self._initial_capacity - keys.shape[2], 0))

    def _start_suffix(self, keys: Tensor, values: Tensor, spare: int) -> tuple[GrowingTensor, GrowingTensor]:
        suffix = self._suffix = GrowingTensor(keys, spare), GrowingTensor(values, spare)
        return suffix

    def _move_prefix(self, prefix: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """The suffix is the prefix, which has a row per sequence, and these."""
        self._prefix, self._repeated = None, prefix[0].shape[2]
        suffix = self._start_suffix(*prefix, self._initial_capacity)
        suffix[0].append(keys)
        suffix[1].append(values)

    def _may_use_ancestry(self, beams: Beams, keys: Tensor, values: Tensor) -> bool:
        """Whether reorders are to change a table, for a suffix that starts with these."""
        is_worth_sharing = self._is_shared and not self._is_short
        return (
            beams.per_input > 1
            and (self._prefix is None or self._is_shared)
            and keys.dtype is torch.float32
            and attention.reads_ancestry(keys.device.type)
            and not torch.is_grad_enabled()
            and (is_worth_sharing or keys.nbytes + values.nbytes >= MIN_TABLE_BYTES * keys.shape[2])
        )

    def _repeat_prefix(self) -> tuple[Tensor, Tensor]:
        """Gives a prefix that is not worth sharing one row per sequence."""
        assert self._beams is not None and self._prefix is not None, "`expand` has found a short prefix"
        keys, values = (part.repeat_interleave(self._beams.per_input, dim=0) for part in self._prefix)
        self._prefix, self._is_short = (keys, values), False
        return keys, values

    def prefix(self) -> tuple[Tensor, Tensor]:
        """K and V of the prompt, [batch, heads, N, dim]. ValueError if that is not all that is stored."""
        if self._prefix is None or self._suffix is not None:
            raise ValueError("this layer does not hold a prompt and nothing else")
        return self._prefix

    def release(self) -> None:
        self._prefix = self._suffix = self._handles = None

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Has these in the place of what was stored, [rows, heads, positions, dim]. Nothing is added to them."""
        self.release()
        self._prefix, self._is_short, self._uses_ancestry = (keys, values), False, False

    def materialize_suffix(self) -> None:
        """The suffix row by row: something else than the attention operator needs it, and will again."""
        if not self._uses_ancestry:
            return
        assert self._beams is not None and self._suffix is not None, "a table is of the suffix of beams"
        ancestry, self._uses_ancestry = self._beams.ancestry(self._suffix[0].length), False
        keys, values = (part.view() for part in self._suffix)
        if ancestry is not None:
            keys, values = attention.gather_suffix(keys, ancestry), attention.gather_suffix(values, ancestry)
        if self._is_short:
            self._move_prefix(self._repeat_prefix(), keys, values)
            self._length_at_reorder += self._repeated
        else:
            self._start_suffix(keys, values, self._initial_capacity)
        self._handles = None

    def crop(self, count: int) -> None:
        """Forgets the last `count` positions: what a step only looks at.

        Raises:
            ValueError: not so many were added since `expand` and the last `reorder`.
        """
        self._handles = None
        if self._prefix is not None and self._suffix is None and self._beams is None and self.stored > count:
            keys, values = self._prefix
            self._prefix = keys[:, :, :-count], values[:, :, :-count]
            return
        suffix = self._suffix or ()
        grown = suffix[0].length if suffix else 0
        if grown - count < max(self._length_at_reorder, self._repeated):
            raise ValueError(f"{count} positions cannot be forgotten: not so many were added since the last reorder")
        for part in suffix:
            part.length -= count

    @property
    def _is_shared(self) -> bool:
        """Whether one row of the prefix stands for several sequences."""
        return self._beams is not None and self._prefix is not None and self._prefix[0].shape[0] != self._beams.rows

    def read(self) -> tuple[Tensor, Tensor]:
        """What stands for K and V of all rows, as from `extend`. ValueError if nothing has been stored yet."""
        if self._handles is None:
            if self._is_short and self._suffix is None:
                self._repeat_prefix()
            self._handles = self._view(0), self._view(1)
        return self._handles

    def _view(self, which: int) -> Tensor:
        suffix = self._suffix[which].view() if self._suffix is not None else None
        prefix = self._prefix[which] if self._prefix is not None else None
        if prefix is None:
            if suffix is None:
                raise ValueError("this layer holds no keys and values yet")
            return suffix
        if self._beams is None or not self._is_shared:
            return prefix
        ancestry = materialize_suffix = None
        if suffix is not None and self._uses_ancestry:
            ancestry, materialize_suffix = self._beams.ancestry(suffix.shape[2]), self._materialize_suffix
        return SharedKV.of(prefix, suffix, self._beams.per_input, ancestry, materialize_suffix)

    def reorder(self, index: Tensor) -> None:
        """Row r continues the sequence of row `index[r]`. Moves at most the part of the suffix in which they differ."""
        if self._beams is None or self._suffix is None or self._beams.per_input == 1:
            return
        self._length_at_reorder = self._suffix[0].length
        if self._uses_ancestry:
            self._beams.update_ancestry(index, self._length_at_reorder)
            self._handles = None
            return
        if self._moves_whole(self._suffix):
            self._beams.check(index)
            self._handles = None
            for part in self._suffix:
                part.move_whole(index)
            return
        grown = self._length_at_reorder - self._repeated
        # Without a position of its own a row equals the other rows of its input.
        move = self._beams.reorder(index, grown) if grown else None
        if move is None:
            return
        self._handles = None
        device = self._suffix[0].view().device
        for part in self._suffix:
            part.move(move.rows.to(device), move.sources.to(device), move.start + self._repeated)

    def _moves_whole(self, suffix: tuple[GrowingTensor, GrowingTensor]) -> bool:
        """Whether a reorder moves all positions. Once it does not, it never does again."""
        if self._is_small:
            small = not self._is_shared and max(part.nbytes for part in suffix) <= MAX_WHOLE_BYTES
            self._is_small = small and suffix[0].view().device.type == "cpu"
        return self._is_small

    def keep(self, inputs: Tensor) -> None:
        """Goes on with the given inputs only, [n] in ascending order. To be called before `Beams.keep`."""
        if self._beams is None:
            raise ValueError("inputs can leave only after the beams are expanded")
        rows = rows_of(inputs, self._beams.per_input)
        if self._prefix is not None:
            kept = inputs if self._is_shared else rows
            span = _span(kept)
            keys, values = (part[span] if span else part.index_select(0, kept) for part in self._prefix)
            self._prefix = keys, values
        for part in self._suffix or ():
            part.keep(rows)
        self._handles = None

    def materialize(self) -> tuple[Tensor, Tensor]:
        """K and V as ordinary contiguous tensors [rows, heads, length, dim], for who takes the cache over."""
        keys, values = (part.materialize() if isinstance(part, SharedKV) else part for part in self.read())
        return keys.contiguous(), values.contiguous()
