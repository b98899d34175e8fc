"""The KV cache of captured steps, in buffers of a fixed capacity, and how attention reads it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastgen.decoding import host_memory
from fastgen.decoding.kv import Pair
from fastgen.decoding.kv.parts import Parts
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.kv.streams import StreamKVView
from fastgen.decoding.kv.view import CannotBeCaptured, KVView
from fastgen.decoding.program_memory import Growing
from fastgen.ops.attention import decode_attention
from fastgen.ops.kv_write import kv_write


def _zeros(like: Pair, rows: int, length: int) -> Pair:
    """Returns buffers for K and V, [rows, heads, length, dim] each."""
    keys, values = (
        host_memory.zeros((rows, part.shape[1], length, part.shape[3]), part.dtype, part.device) for part in like
    )
    return keys, values


class FixedKV:
    """A prefix per input and, for self-attention, a suffix of `state.capacity` positions per row.

    The masks that models build usually exclude the same positions as the lengths on the device. Then they are not read.
    To find that out, an eager step compares each mask with the lengths while `host_may_wait` is set. A mask that is
    added to the scores is always read, because the model may have learned it, as T5's position bias.

    K and V of multi-head latent attention, the latents and their rotated part, are joined in one tensor on a CPU, and V
    is empty. On a GPU they are not: the kernel keeps whole heads in shared memory, and latents are long.

    Attributes:
        prefix: K and V, [batch, heads, prefix_capacity, dim] each; values may have another dim.
        suffix: K and V, [rows, heads, state.capacity, dim] each; None if there is none, as in cross-attention.
        says_nothing_new: whether masks equal the lengths, as one bool; empty while unknown. All views share the list.
        starts, ends: [batch], int32: the prefix positions in [start, end) count.
        firsts: [batch], int64: where each input's prefix begins, with the padding before the positions that count.
        prefix_capacity, length: positions of the prefix, and of prefix and suffix.
        width: positions that a step stores, and that masks distinguish.
        has_drafts: whether some steps store several positions, and rows have lengths of their own.

    Args:
        keys, values: [any, heads, any, dim]: like those that will be stored.
        window: number of positions that a query sees, including its own; None for all.
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
        self.prefix_capacity, self.has_suffix = prefix_capacity, has_suffix
        self.length = prefix_capacity + (state.capacity if has_suffix else 0)
        self.width = state.width if has_suffix else 1
        self.has_drafts = self.width > 1
        self.host_may_wait = False
        self.says_nothing_new: list[bool] = []
        self.starts = torch.zeros(state.batch, dtype=torch.int32, device=keys.device)
        self.ends = torch.zeros_like(self.starts)
        self.firsts = torch.zeros_like(self.starts, dtype=torch.int64)
        self._reads_masks = False

        self._most = 0, 0  # most positions of the prefix and of the suffix that were written to
        # Inputs that have stored something. A finished one writes to its first position, as its successor will.
        self._stored: set[int] = set()
        self._loaded = (prefix_capacity, 0)  # range of the prefix that may have been written to
        # If K and V are joined, the size of K. Latents have one head, and another size than the rotated part.
        is_joined = keys.is_cpu and keys.shape[1] == 1 and keys.shape[3] != values.shape[3]
        self._split = keys.shape[3] if is_joined else None
        like = self._stored_as(keys[:, :, :0], values[:, :, :0])
        self.prefix = _zeros(like, state.batch, prefix_capacity)
        self.suffix = _zeros(like, state.rows, state.capacity) if has_suffix else None
        if growing is not None:
            growing.add(*self.prefix, *(self.suffix or ()))

    def _stored_as(self, keys: Tensor, values: Tensor) -> Pair:
        return (keys, values) if self._split is None else (torch.cat([keys, values], dim=-1), values[..., :0])

    def _apart(self, keys: Tensor, values: Tensor) -> Pair:
        """Undoes `_stored_as`."""
        return (keys, values) if self._split is None else (keys[..., : self._split], keys[..., self._split :])

    def like(self) -> Pair:
        """Returns empty K and V, of the shapes and dtypes of those that are stored."""
        keys, values = (part[:, :, :0] for part in self.prefix)
        return self._apart(keys, values)

    def _exchange(self, pair: Pair, longer: Pair, source: slice, target: slice) -> None:
        """Gives a pair the memory of a longer one, which gets the positions `source` at `target`."""
        assert self._growing is not None, "the buffers of this step do not grow"
        for old, new in zip(pair, longer, strict=True):
            new[:, :, target] = old[:, :, source]
        for old, new in zip(pair, longer, strict=True):
            self._growing.exchange(old, new)

    def reserve_prefix(self, capacity: int, keeps: str | None = None) -> Callable[[], None]:
        """Allocates memory for more positions of the prefix. Returns a function that replaces the buffers and allocates
        nothing. Positions at the "start" or "end" of the prefix are kept there; otherwise `load` must follow.
        """
        return partial(self._put_prefix, _zeros(self.prefix, len(self.ends), capacity), self.ends > self.starts, keeps)

    def _put_prefix(self, longer: Pair, is_loaded: Tensor, keeps: str | None) -> None:
        (begin, end), capacity = self._loaded, longer[0].shape[2]
        more = capacity - self.prefix_capacity
        moved, end = more if keeps == "end" else 0, end if keeps is not None else begin
        is_kept = begin < end
        kept = slice(begin, end) if is_kept else slice(0)
        target = slice(begin + moved, end + moved) if is_kept else slice(0)
        self._exchange(self.prefix, longer, kept, target)
        self._loaded = (begin + moved, end + moved) if is_kept else (capacity, 0)
        for bound in (self.starts, self.ends, self.firsts) if is_kept else ():
            bound.add_(is_loaded, alpha=moved)
        self.length += more
        self.prefix_capacity = capacity

    def reserve_suffix(self, capacity: int) -> Callable[[], None]:
        """Does the same for the suffix, before the state has the positions. Stored positions stay where they are."""
        assert self.suffix is not None, "there is no suffix that could grow"
        longer = _zeros(self.suffix, len(self.suffix[0]), capacity)
        return partial(self._put_suffix, longer, slice(self._state.max_length()))

    def _put_suffix(self, longer: Pair, stored: slice) -> None:
        assert self.suffix is not None, "as when the memory was reserved"
        self._exchange(self.suffix, longer, stored, stored)
        self.length += longer[0].shape[2] - self._state.capacity

    def view(self, state: StepState) -> FixedKV:
        """Returns the same memory for another step, at the positions of `state`.

        With a `RaggedState`, only the attention operator can read it: a model's own scores would be of other rows.
        """
        other = copy.copy(self)
        other._state, other.width, other.host_may_wait = state, state.width, False
        return other

    def load(
        self, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, at_end: bool, inputs: slice = slice(None)
    ) -> None:
        """Stores the prefix of a call, [inputs, heads, N, dim], of which positions in [starts, ends), [inputs], count.

        It goes to the start of the capacity, or to the end. The remaining `inputs` get no prefix.
        """
        count, _, length, _ = keys.shape
        first = self.prefix_capacity - length if at_end else 0
        begin, end = self._loaded
        if inputs == slice(None):
            self._clear_written()
            self._loaded = (first, first + length)
        else:
            self._clear(inputs)
            self._loaded = (min(begin, first), max(end, first + length))
        self._stored |= set(self._numbers(inputs))
        for old, new in zip(self.prefix, self._stored_as(keys, values), strict=True):
            old[inputs][:count, :, first : first + length] = new
        for bound, new in zip((self.starts, self.ends), (starts, ends), strict=True):
            bound[inputs] = 0
            bound[inputs][:count] = new + first
        self.firsts[inputs] = first

    def _numbers(self, inputs: slice) -> range:
        return range(*inputs.indices(self._state.batch))

    def _written(self) -> tuple[tuple[tuple[Tensor, ...], int, slice], ...]:
        """Returns buffers, their rows per input, and the positions that may have been written to.

        All other positions are zero, and take no memory on a CPU.
        """
        length = self._state.max_length() if self.suffix else 0
        return (self.prefix, 1, slice(*self._loaded)), (self.suffix or (), self._state.per_input, slice(length))

    def _clear_written(self) -> None:
        """Zeroes all written positions: masked positions must hold finite values, because 0 * NaN is NaN."""
        for parts, _, positions in self._written():
            for part in parts:
                part[:, :, positions] = 0

    def _clear(self, inputs: slice) -> None:
        """Zeroes the stored positions of these inputs. On a CPU, large buffers take no memory for them then."""
        numbers = self._stored.intersection(self._numbers(inputs))
        for parts, rows, positions in self._written() if numbers else ():
            for part, number in itertools.product(parts, numbers):
                first = number * rows
                if not host_memory.give_back(part, first, rows):
                    part[first : first + rows, :, positions] = 0
        self._stored -= numbers

    def clear(self) -> bool:
        """Discards all contents. On a CPU, large buffers then take no memory until they are written to.

        Returns:
            whether the suffix is empty now. The next `load` clears the rest.
        """
        prefix, suffix = (
            [host_memory.give_back(part) for part in parts or () if part.numel()]
            for parts in (self.prefix, self.suffix)
        )
        if all(prefix):
            self._loaded = (self.prefix_capacity, 0)
        if all(prefix + suffix):
            self._most = 0, 0
            self._stored.clear()
        return all(suffix)

    def insert(self, other: FixedKV, source: Tensor | slice, target: slice) -> None:
        """Has the inputs at `source` in `other`, of no larger capacity, continue at `target`. Then insert the state."""
        self._clear(target)
        self._stored |= set(self._numbers(target))
        begin, end = self._loaded
        if isinstance(source, slice) and source == slice(None):  # a returned cache includes the padding
            first, last = other._loaded
        else:
            first, last = int(other.starts[source].min()), int(other.ends[source].max())
        for old, new in zip(self.prefix, other.prefix, strict=True):
            old[target, :, first:last] = new[source, :, first:last]
        self._loaded = (min(begin, first), max(end, last))
        length = other._state.length_of(source) if self.suffix else 0
        for old, new in zip(self.suffix or (), other.suffix or (), strict=True):
            rows, new_rows = (part.unflatten(0, (-1, self._state.per_input)) for part in (old, new))
            rows[target, :, :, :length] = new_rows[source, :, :, :length]
        bounds = (self.starts, other.starts), (self.ends, other.ends), (self.firsts, other.firsts)
        for bound, new in bounds:
            bound[target] = new[source]
        self.says_nothing_new[:] = other.says_nothing_new or self.says_nothing_new

    def leave(self, inputs: slice) -> None:
        """Ends these inputs: none of their positions count until others are loaded. On a CPU they take no memory."""
        self.starts[inputs] = self.ends[inputs] = 0
        if self.starts.is_cpu:
            self._clear(inputs)

    def write(self, keys: Tensor, values: Tensor) -> Pair:
        """Stores K and V of the step, [rows, heads, width, dim]. Returns views of all K and V."""
        state, suffix = self._state, self.suffix
        assert suffix is not None, "the keys of the encoder's output are not written in a step"
        keys, values = self._stored_as(keys, values)
        for number, position in enumerate(state.positions):
            kv_write(keys[:, :, number], values[:, :, number], *suffix, position, state.row_map)
        return self.read()

    def read(self) -> Pair:
        """Returns `KVView`s of K and V of all rows, [rows, heads, length, dim]."""
        state, suffix = self._state, self.suffix or (None, None)
        ancestry = state.ancestry if self.suffix else None
        queries = state.rows if state.row_map is not None else None
        keys, values = (
            KVView.of(prefix, own, state.per_input, ancestry, backend=self, queries=queries)
            for prefix, own in zip(self.prefix, suffix, strict=True)
        )
        return (keys, values) if self._split is None else keys.cut(self._split)

    def materialize(self, inputs: int, length: int, new: int = 0, at_end: bool = False) -> Pair:
        """Returns K and V of the first inputs as ordinary tensors, [rows, heads, length + new, dim].

        The first `length` positions are those of `load`, with the same `at_end`. The others come from the suffix.
        """
        first, state = self.prefix_capacity - length if at_end else 0, self._state
        rows, ancestry = inputs * state.per_input, None
        suffix: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.suffix is not None:
            suffix = self.suffix[0][:rows, :, :new], self.suffix[1][:rows, :, :new]
            ancestry = None if state.ancestry is None else state.ancestry[:rows, :new]
        keys, values = (
            KVView.of(prefix[:inputs, :, first : first + length], own, state.per_input, ancestry).materialize()
            for prefix, own in zip(self.prefix, suffix, strict=True)
        )
        return self._apart(keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers. On a CPU, pages that nothing was written to take no memory."""
        if not self.prefix[0].is_cpu:
            return sum(part.nbytes for part in (*self.prefix, *(self.suffix or ())))
        begin, end = self._loaded
        self._most = max(self._most[0], end - begin), max(self._most[1], self._state.max_length() if self.suffix else 0)
        position = sum(part.shape[1] * part.shape[3] * part.itemsize for part in self.prefix)
        return position * (self._state.batch * self._most[0] + self._state.rows * self._most[1])

    # ---- attention of the step

    def always_read_masks(self) -> None:
        """Has attention read each mask: one step may choose all positions, and a later one some."""
        self._reads_masks, self.says_nothing_new[:] = True, [False]

    def firsts_of_rows(self) -> Tensor:
        """Returns `firsts` of the input that each row reads, [rows]."""
        return self.firsts.repeat_interleave(self._state.per_input)

    def attend(self, query: Tensor, keys: Parts, values: Parts, mask: Tensor | None, scale: float | None) -> Tensor:
        """Computes attention of the step's queries, like `torch.nn.functional.scaled_dot_product_attention`.

        Args:
            query: [rows, heads, 1, dim], or [rows, kv heads, heads per kv head, dim]. In a step that stores several
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
            suffix_lengths=self._state.suffix_lengths if self.suffix else None,
            ancestry=keys.ancestry,
            window=self._window,
            causal=self.width > 1,
            row_map=self._state.row_map,
        )

    def leave_out(self, scores: Tensor) -> Tensor:
        """Masks positions that do not count in a model's scores, [rows, heads, queries, prefix + capacity], in place.

        A model without padding, or with a single query, may have no mask for that.
        """
        self._check(scores.shape[2])
        return scores.masked_fill_(~self.counts().unsqueeze(1), torch.finfo(scores.dtype).min)

    def with_own(self, shared: KVView, own: Tensor) -> Tensor:
        """Returns K or V of one stream: `shared`, then its own, [rows, heads, own length, dim]. Copies nothing."""
        return StreamKVView.of(shared, [own], None)

    def _check(self, queries: int) -> None:
        """Checks the number of queries: heads of a group if the step stores one position, else one per position."""
        if self.width not in (1, queries):
            raise CannotBeCaptured(f"{queries} queries in a step that stores {self.width} positions")

    def _bounds(self) -> Pair:
        """Returns [rows] each: `starts` and `ends` of the input that each row reads."""
        state = self._state
        if state.row_map is None:
            starts, ends = (part.repeat_interleave(state.per_input) for part in (self.starts, self.ends))
            return starts, ends
        copies = len(self.suffix[0]) // len(self.starts) if self.suffix else 1
        return self.starts[state.row_map // copies], self.ends[state.row_map // copies]

    def counts(self) -> Tensor:
        """Returns [rows, width, prefix + capacity], bool: the positions that count for each position of the step."""
        position = torch.arange(self.length, device=self.starts.device)
        starts, ends = self._bounds()
        counts = ((position >= starts.unsqueeze(1)) & (position < ends.unsqueeze(1))).unsqueeze(1)
        if not self.suffix:
            return counts
        # A position sees itself, and all of the suffix before it.
        own = torch.stack(self._state.positions, 1).unsqueeze(2) + self.prefix_capacity
        reads = counts | ((position >= self.prefix_capacity) & (position <= own))
        return reads if self._window is None else reads & (position > own - self._window)

    def _needed(self, mask: Tensor | None, queries: int) -> Tensor | None:
        """Returns the mask with four dimensions; None if it only repeats the lengths."""
        self._check(queries)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        if self.host_may_wait and not self._reads_masks:
            # Eagerly, a model leaves out a mask that is all True. If the host may not look at it, the model makes it.
            self.says_nothing_new[:] = [mask is None or self._equals_lengths(mask)]
        return None if self.says_nothing_new == [True] else mask

    def _equals_lengths(self, mask: Tensor) -> bool:
        rows, _, queries, length = mask.shape
        if mask.dtype != torch.bool:
            return False
        if length != self.length or rows not in (1, self._state.rows) or self.width not in (1, queries):
            return False
        # An input that only fills the batch does not count, whatever its mask says.
        starts, ends = self._bounds()
        real = (ends > starts).view(-1, 1, 1, 1)
        return bool(torch.where(real, mask == self.counts().unsqueeze(1), True).all())
