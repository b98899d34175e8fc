"""K and V of one attention layer in buffers of a fixed capacity, and how attention of a captured step reads them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fastgen.decoding import host_memory
from fastgen.decoding.captured.growing import Growing
from fastgen.decoding.captured.streams import StreamKV
from fastgen.decoding.shared import CannotBeCaptured, Parts, SharedKV
from fastgen.ops.attention import decode_attention, gather_suffix
from fastgen.ops.kv_write import kv_write


class StepState:
    """Where a step is, on the device: all layers read it, and the step changes it once.

    Attributes:
        capacity: positions of the suffix at the most.
        width: positions that a step stores. The first of them stays; what is behind it, the next step writes over.
        numbers: [width + 1, rows], int64: `positions` and `filled`.
        position: [rows], int64: where the K/V of this step goes in the suffix of each row.
        positions: `width` of them: the same for each position of the step.
        filled: [rows], int64: positions of the suffix that attention reads, those of this step included.
        ancestry: [rows, capacity], int32: position t of row r lies in row `ancestry[r, t]`; None for one row per input.
    """

    def __init__(
        self,
        batch: int,
        per_input: int,
        capacity: int,
        device: torch.device,
        width: int = 1,
        growing: Growing | None = None,
    ) -> None:
        self.batch, self.per_input, self.capacity, self.width = batch, per_input, capacity, width
        self.rows = batch * per_input
        self._first = torch.arange(width + 1, device=device).unsqueeze(1)
        self.numbers = self._first.repeat(1, self.rows)
        *self.positions, self.filled = self.numbers.unbind()
        self.position = self.positions[0]
        self._columns = torch.arange(capacity, device=device)
        self._own = torch.arange(self.rows, dtype=torch.int32, device=device).unsqueeze(1)
        self.ancestry = self._own.repeat(1, capacity) if per_input > 1 else None
        self._reached = 0  # before rows went back
        self._growing = growing
        if growing is not None and self.ancestry is not None:
            growing.add(self.ancestry)

    def of_width(self, width: int) -> StepState:
        """The same place, for a step that stores fewer positions. It goes where this one goes."""
        return self._with(self.numbers[: width + 1], width)

    def beside(self, width: int) -> StepState:
        """A place of its own on the same rows, for steps that run ahead of this one or behind it."""
        return self._with(self.numbers[: width + 1].clone(), width)

    def _with(self, numbers: Tensor, width: int) -> StepState:
        other = copy.copy(self)
        other.width, other.numbers = width, numbers
        *other.positions, other.filled = numbers.unbind()
        other.position = other.positions[0]
        return other

    def grow(self, capacity: int) -> None:
        """Gives the suffix more positions. What is stored stays where it is."""
        if self._growing is not None and self.ancestry is not None:
            larger = self._own.repeat(1, capacity)
            larger[:, : self.capacity] = self.ancestry
            self._growing.exchange(self.ancestry, larger)
        self.capacity = capacity
        self._columns = torch.arange(capacity, device=self._own.device)

    def reach(self) -> int:
        """Positions of the suffix that something may be stored in, of any row. Waits for the device."""
        return min(max(int(self.filled.max()), self._reached), self.capacity)

    def keep_reach(self) -> None:
        """To be called before rows go back: what they have stored stays where it is."""
        self._reached = self.reach()

    def begin(self, inputs: slice = slice(None)) -> None:
        """Nothing is stored of these inputs; the others go on."""
        rows = slice(*(inputs.indices(self.batch)[end] * self.per_input for end in range(2)))
        self.numbers[:, rows] = self._first
        if inputs == slice(None):
            self._reached = 0
        if self.ancestry is not None:
            self.ancestry[rows] = self._own[rows]

    def advance(self, parents: Tensor | None, count: Tensor | int = 1) -> None:
        """The step is done, and its rows continue `parents`, [rows] (None: themselves). Changes all in place.

        That is all there is to a reorder: no K or V is moved. What the next step stores lies in the row itself.

        Of what it has stored, `count` positions stay, [rows], int64, or so many of all. The rows that change places are
        as long as each other.
        """
        self.numbers.add_(count)
        if self.ancestry is not None and parents is not None:
            moved = self.ancestry.index_select(0, parents)
            self.ancestry.copy_(torch.where(self._columns >= self.position.unsqueeze(1), self._own, moved))

    def take_over(self, other: StepState, rows: Tensor | slice) -> None:
        """Goes on where these rows of `other`, which has no larger capacity, are: all those of some inputs."""
        self.numbers.copy_(other.numbers[:, rows])
        self._reached, count = other.reach(), self.per_input
        if self.ancestry is not None and other.ancestry is not None:
            self.ancestry[:, : other.capacity] = self._own // count * count + other.ancestry[rows] % count
            self.ancestry[:, other.capacity :] = self._own


class StaticKV:
    """A prefix per input, and, for self-attention, a suffix of `state.capacity` positions per row.

    The masks that models build mostly say what the lengths on the device say; then they are not read. Whether it is so
    is found out in a step that is not captured: while `host_may_wait` is set, a mask is compared with the lengths. One
    that is added to the scores is always read: the model may have learned it, as T5's.

    Attributes:
        starts, ends: [batch], int32: the prefix positions that count are those in [start, end).
        prefix_capacity, length: positions of the prefix, and of both.
        width: positions of a step that are stored, and that a mask tells apart.

    Args:
        keys, values: [any, heads, any, dim]: as those that will be stored.
        window: a query sees so many positions, its own included; None for all.
        growing: of the step, if its buffers may grow.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        state: StepState,
        prefix_capacity: int,
        has_suffix: bool,
        window: int | None = None,
        growing: Growing | None = None,
    ) -> None:
        self._state, self._window, self._growing = state, window, growing
        self._owners: Tensor | None = None  # the row that each one reads, where it is not its own
        self.prefix_capacity, self.has_suffix = prefix_capacity, has_suffix
        self.length = prefix_capacity + (state.capacity if has_suffix else 0)
        self.width = state.width if has_suffix else 1
        self.host_may_wait = False
        # Whether masks say what the lengths say, once that is known; one list for all views.
        self._says_nothing_new: list[bool] = []
        self.starts = torch.zeros(state.batch, dtype=torch.int32, device=keys.device)
        self.ends = torch.zeros_like(self.starts)

        self._shapes = [(part.shape[1], part.shape[3]) for part in (keys, values)]
        self._dtype = keys.dtype
        self._most = 0, 0  # positions of the prefix and of the suffix that something was written to
        self._loaded = (prefix_capacity, 0)  # from which position of the prefix to which something may be
        self._prefix = self._zeros(state.batch, prefix_capacity)
        self._suffix = self._zeros(state.rows, state.capacity) if has_suffix else ()
        if growing is not None:
            growing.add(*self._prefix, *self._suffix)

    def _zeros(self, rows: int, length: int) -> tuple[Tensor, ...]:
        shapes = [(rows, heads, length, dim) for heads, dim in self._shapes]
        return tuple(host_memory.zeros(shape, self._dtype, self.starts.device) for shape in shapes)

    def grow_prefix(self, capacity: int) -> None:
        """Gives the prefix more positions. What it holds is lost: `load` follows."""
        assert self._growing is not None, "the buffers of this step do not grow"
        for old, new in zip(self._prefix, self._zeros(self._state.batch, capacity), strict=True):
            self._growing.exchange(old, new)
        self._loaded = (capacity, 0)
        self.length += capacity - self.prefix_capacity
        self.prefix_capacity = capacity

    def grow_suffix(self, capacity: int) -> None:
        """Gives the suffix more positions, before the state has them. What is stored stays where it is."""
        assert self._growing is not None, "the buffers of this step do not grow"
        stored = self._state.reach()
        for old, new in zip(self._suffix, self._zeros(self._state.rows, capacity), strict=True):
            new[:, :, :stored] = old[:, :, :stored]
            self._growing.exchange(old, new)
        self.length += capacity - self._state.capacity

    def view(self, state: StepState) -> StaticKV:
        """The same memory for another step, which is where `state` is."""
        other = copy.copy(self)
        other._state, other.width, other.host_may_wait = state, state.width, False
        return other

    def load(
        self, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, at_end: bool, inputs: slice = slice(None)
    ) -> None:
        """Takes over the prefix of a call, [inputs, heads, N, dim], of which [starts, ends) count, [inputs] each.

        It is put at the start of its capacity, or at the end. Those of `inputs` that are left over have none.
        """
        count, _, length, _ = keys.shape
        first = self.prefix_capacity - length if at_end else 0
        begin, end = self._loaded
        for old, new in zip(self._prefix, (keys, values), strict=True):
            if begin < end:
                old[inputs, :, begin:end] = 0  # what is masked must still be numbers
            old[inputs][:count, :, first : first + length] = new
        self._loaded = (min(begin, first), max(end, first + length))
        if inputs == slice(None):
            self._loaded = (first, first + length)
        stored = self._state.reach() if self._suffix else 0
        for part in self._suffix:  # what nothing was written to is zero, and on a CPU takes no memory
            part.unflatten(0, (self._state.batch, -1))[inputs, :, :, :stored] = 0
        for bound, new in zip((self.starts, self.ends), (starts, ends), strict=True):
            bound[inputs] = 0
            bound[inputs][:count] = new + first

    def clear(self) -> bool:
        """What is stored is of no use any more: on a CPU, large buffers take no memory until they are written to.

        Returns:
            whether nothing is stored in the suffix then. The next `load` clears what is.
        """
        prefix, suffix = ([host_memory.give_back(part) for part in parts] for parts in (self._prefix, self._suffix))
        if all(prefix):
            self._loaded = (self.prefix_capacity, 0)
        if all(prefix + suffix):
            self._most = 0, 0
        return all(suffix)

    def take_over(self, other: StaticKV, inputs: Tensor | slice, rows: Tensor | slice) -> None:
        """Goes on with what `other`, of no larger capacity, has stored of `inputs`, that is `rows`. Then the state."""
        self._loaded = other._loaded
        pairs = zip(self._prefix, other._prefix, strict=True)
        for old, new in (*pairs, (self.starts, other.starts), (self.ends, other.ends)):
            old.copy_(new[inputs])
        self._says_nothing_new[:] = other._says_nothing_new or self._says_nothing_new
        stored, new_stored = self._state.reach(), other._state.reach()
        for old, new in zip(self._suffix, other._suffix, strict=True):
            old[:, :, :new_stored] = new[:, :, :new_stored][rows]
            old[:, :, new_stored:stored] = 0

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores K and V of the step, [rows, heads, width, dim], and returns what stands for all of them."""
        key_cache, value_cache = self._suffix
        for number, position in enumerate(self._state.positions):
            kv_write(keys[:, :, number], values[:, :, number], key_cache, value_cache, position)
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """What stands for K and V of all rows: `SharedKV`s, [rows, heads, length, dim]."""
        suffix = self._suffix or (None, None)
        ancestry = self._state.ancestry if self._suffix else None
        keys, values = (
            SharedKV.of(prefix, own, self._state.per_input, ancestry, reader=self)
            for prefix, own in zip(self._prefix, suffix, strict=True)
        )
        return keys, values

    def materialize(self, inputs: int, length: int, new: int = 0, at_end: bool = False) -> tuple[Tensor, Tensor]:
        """What is stored of the first inputs as ordinary tensors, [rows, heads, length + new, dim].

        `load` was given the first `length` of these positions, and `at_end`. The others are of the suffix.
        """
        first = self.prefix_capacity - length if at_end else 0
        per_input = self._state.per_input
        parts = [part[:inputs, :, first : first + length].repeat_interleave(per_input, dim=0) for part in self._prefix]
        if self._suffix:
            own, ancestry = [part[:, :, :new] for part in self._suffix], self._state.ancestry
            if ancestry is not None:
                own = [gather_suffix(part, ancestry[:, :new]) for part in own]
            parts = [
                torch.cat([part, more[: inputs * per_input]], dim=2) for part, more in zip(parts, own, strict=True)
            ]
        return parts[0], parts[1]

    @property
    def nbytes(self) -> int:
        """What the buffers take: on the CPU, pages that nothing was written to take no memory."""
        if not self._prefix[0].is_cpu:
            return sum(part.nbytes for part in (*self._prefix, *self._suffix))
        begin, end = self._loaded
        self._most = max(self._most[0], end - begin), max(self._most[1], self._state.reach() if self._suffix else 0)
        position = sum(heads * dim for heads, dim in self._shapes) * self._dtype.itemsize
        return position * (self._state.batch * self._most[0] + self._state.rows * self._most[1])

    def attend(self, query: Tensor, keys: Parts, values: Parts, mask: Tensor | None, scale: float | None) -> Tensor:
        """Attention of the step's queries, as `torch.nn.functional.scaled_dot_product_attention` has it.

        Args:
            query: [rows, heads, 1, dim], or [rows, kv heads, heads per kv head, dim]. Of a step that stores several
                positions: [rows, heads, positions, dim].
            keys, values: prefix [batch, kv heads, N, dim] and suffix [rows, kv heads, capacity, dim].
            mask: broadcastable to [*query.shape[:3], N + capacity]: bool (True counts), or added to the scores.

        Returns:
            [*query.shape[:3], dim of the values].
        """
        return decode_attention(
            query,
            keys.prefix,
            values.prefix,
            keys.suffix,
            values.suffix,
            self._needed(mask, query.shape[2]),
            scale,
            starts=self.starts,
            ends=self.ends,
            suffix_lengths=self._state.filled if self._suffix else None,
            ancestry=keys.ancestry,
            window=self._window,
            causal=self.width > 1,
            row_map=self._owners,
        )

    def leave_out(self, scores: Tensor) -> Tensor:
        """Takes what does not count out of the scores of a model, [rows, heads, queries, prefix + capacity], in place.

        A model without padding, or with a single query, may have no mask that does it.
        """
        self._check(scores.shape[2])
        return scores.masked_fill_(~self._counts().unsqueeze(1), torch.finfo(scores.dtype).min)

    def with_own(self, shared: SharedKV, own: Tensor) -> Tensor:
        """K or V of one stream: `shared`, then its own, [rows, heads, own length, dim]. Nothing is copied."""
        return StreamKV.of(shared, [own], None)

    def _check(self, queries: int) -> None:
        """With one position per step, queries are heads of a group. With several there is one for each."""
        if self.width not in (1, queries):
            raise CannotBeCaptured(f"{queries} queries in a step that stores {self.width} positions")

    def _counts(self) -> Tensor:
        """[rows, width, prefix + capacity], bool: the positions that count for each position of the step."""
        position = torch.arange(self.length, device=self.starts.device)
        counts = (position >= self.starts.unsqueeze(1)) & (position < self.ends.unsqueeze(1))
        counts = counts.repeat_interleave(self._state.per_input, dim=0).unsqueeze(1)
        if not self._suffix:
            return counts
        # Its own position, and all of the suffix in front of it.
        own = torch.stack(self._state.positions, 1).unsqueeze(2) + self.prefix_capacity
        seen = counts | ((position >= self.prefix_capacity) & (position <= own))
        return seen if self._window is None else seen & (position > own - self._window)

    def _needed(self, mask: Tensor | None, queries: int) -> Tensor | None:
        """The mask, with four dimensions; None if lengths say it all."""
        self._check(queries)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        if self.host_may_wait:
            # A mask that is left out because everything counts is made all the same where the host may not look at it.
            self._says_nothing_new[:] = [mask is None or self._equals_lengths(mask)]
        return None if self._says_nothing_new == [True] else mask

    def _equals_lengths(self, mask: Tensor) -> bool:
        rows, _, queries, length = mask.shape
        if mask.dtype != torch.bool:
            return False
        if length != self.length or rows not in (1, self._state.rows) or self.width not in (1, queries):
            return False
        # An input that only fills the batch up counts for nothing, whatever a mask says of it.
        real = (self.ends > self.starts).repeat_interleave(self._state.per_input).view(-1, 1, 1, 1)
        return bool(torch.where(real, mask == self._counts().unsqueeze(1), True).all())
