"""What a captured step reads and writes besides its sequences: K and V, masks, positions, and the rows' lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastgen.decoding.captured.capturable import RowLengths, SymbolicLength
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.kv.states import FixedStates, Name
from fastgen.decoding.program_memory import LEAST_LENGTH, Growing
from fastgen.ops import search_step
from fastgen.optimizer.transformers.cache import cache_of
from fastgen.optimizer.transformers.captured.key import AXES, MASKS, POSITIONS, Key, Prompt, Sizes
from fastgen.optimizer.transformers.special_models import DELAYS


class StepBuffers:
    """The buffers of a step.

    Nothing of `prompt` is stored; it may be any prompt of the key's kind.

    Attributes:
        sizes: the numbers of positions that there is room for; they may grow if the key has no sizes.
        growing: those of the buffers that may grow; None if the key has sizes.
        position: the position of each row.
        own, cross: KV caches of the layers of self- and of cross-attention.
        states: of each layer that has states.
        inputs: the model's inputs, by name.
        prefix_length, cache_length: int64 scalars: positions for the prompt, and the length of the cache as the model
            sees it, which is that of the longest row.
        bounds: `cache_length`, with what the host knows of it.
        present: number of inputs of the call; the others only fill the batch.
        start: index at which the sequences begin in their buffers.
    """

    def __init__(self, key: Key, prompt: Prompt, sizes: Sizes) -> None:
        self._key, self.sizes = key, sizes
        self.device = device = prompt.tokens.device
        self.growing = growing = Growing() if key.sizes.new == 0 else None
        capacity = sizes.new + key.width - 1
        self.position = StepState(
            key.codebooks.rows(key.batch), key.per_input, capacity, device, key.width, growing, key.maps_rows
        )
        self.own = [
            FixedKV(*kv, self.position, sizes.cached, has_suffix=True, window=window, growing=growing)
            for kv, window in zip(prompt.own, key.windows, strict=True)
        ]
        self.cross = [
            FixedKV(*kv, self.position, sizes.source, has_suffix=False, growing=growing) for kv in prompt.cross
        ]
        self.states = [FixedStates(each, key.batch, key.per_input) for each in prompt.states]
        self.prefix_length = torch.full((), sizes.cached, dtype=torch.int64, device=device)
        self.cache_length = torch.zeros((), dtype=torch.int64, device=device)
        self.bounds = SymbolicLength.of(self.cache_length, sizes.cached, sizes.cached + 1)
        # The maximum over the calls so far, because a model's table of positions may be shorter than the buffers.
        self._most_new = 1
        # Positions that each step unmasks in the masks of the sequences: those that the next step may store.
        self._marked = 1 if key.draft is None else key.width
        self.inputs = {name: self._input(name, prompt.tensors[name]) for name in key.tensors}
        self.present = self.start = 0
        self._delays: dict[str, Tensor] = {}  # the call's delay masks (`DELAYS`), for all positions
        self._lengths: tuple[list[int], list[int]] = ([], [])  # positions that the prefill has stored in each layer

    @property
    def layers(self) -> list[FixedKV]:
        """The KV caches of self-attention, then those of cross-attention."""
        return [*self.own, *self.cross]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for parts in (self.layers, self.inputs.values(), self.states) for each in parts)

    @property
    def rows(self) -> int:
        """Number of rows of the inputs that are present."""
        return self.present * self._key.per_input

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt among the present inputs, without padding."""
        return max(int((kv.ends - kv.starts).max()) for kv in self.own)

    @property
    def reads_masks_of_windows(self) -> bool:
        """Whether a layer with a sliding window needs its mask besides the lengths, once the step has been watched."""
        layers = zip(self.own, self._key.windows, strict=True)
        return any(kv.says_nothing_new != [True] for kv, window in layers if window)

    def _input(self, name: str, first: Tensor) -> Tensor:
        """Returns the buffer of a model input: [rows, width]; a mask's width has room for positions to come."""
        width = self._width_of(name, self.sizes)
        rows = self._key.rows if name in DELAYS else self._key.rows_of_model
        buffer = torch.zeros(rows, width, dtype=first.dtype, device=first.device)
        if self.growing is not None and name in (*MASKS, *DELAYS):
            self.growing.add(buffer)
        return buffer

    def _width_of(self, name: str, sizes: Sizes) -> int:
        if self._key.is_sequences_mask(name):
            return sizes.cached + sizes.new + self._marked - 1
        if name == "attention_mask":
            return sizes.source
        if name in DELAYS:
            return sizes.prompt + sizes.new
        return self._key.axes if name == AXES else 1

    @property
    def _masks(self) -> list[Tensor]:
        return [buffer for name, buffer in self.inputs.items() if self._key.is_sequences_mask(name)]

    def of_step(self, length: Tensor) -> dict[str, Tensor]:
        """Returns the model's inputs in a step that reads the last of `length` tokens, [rows], of each sequence."""
        last = (length - 1).unsqueeze(1)
        delays = {name: buffer.gather(1, last) for name, buffer in self.inputs.items() if name in DELAYS}
        return self.inputs | delays

    def _put_delay(self, name: str, buffer: Tensor) -> None:
        """Stores the call's inputs for all positions, as far as the buffers reach."""
        given = self._delays[name][:, : buffer.shape[1] - self.start]
        buffer[:, self.start : self.start + given.shape[1]] = given

    # ---- the model's cache

    def cache(self, search: Search, cache_length: int | None = None) -> Cache:
        """Returns the cache for the model. With an int as its length, the model runs faster than with `bounds`."""
        given = self.bounds if cache_length is None else cache_length
        of_rows = self._lengths_at(self.position, self.bounds, search)
        return cache_of(self.own, self.cross, given, of_rows, self._key.forms, self.states)

    def cache_at(self, position: StepState, length: Tensor, search: Search) -> Cache:
        """Returns the cache for a step at another position, whose longest row has `length` positions before it."""
        bounds = SymbolicLength.of(length, self.sizes.cached, self.sizes.cached + self.sizes.new)
        own = [kv.view(position) for kv in self.own]
        return cache_of(own, self.cross, bounds, self._lengths_at(position, bounds, search), self._key.forms)

    def _lengths_at(
        self, position: StepState, bounds: SymbolicLength, search: Search
    ) -> Callable[[], RowLengths] | None:
        """Returns a function that gives the rows' lengths, if the model computes positions from them.

        A finished row gets length 0: its results do not count, and its position must not pass its limit.
        """
        if not self._key.has_own_lengths:
            return None
        prefix = self.sizes.cached

        def lengths_of_rows() -> RowLengths:
            own = torch.where(search.unfinished.view(-1), position.position, 0)
            return RowLengths.of(own + prefix, bounds)

        return lengths_of_rows

    def put_masks(self, say_nothing_new: Sequence[Sequence[bool]]) -> None:
        """Takes over what is known of the masks of each of `layers`."""
        for kv, says in zip(self.layers, say_nothing_new, strict=True):
            kv.says_nothing_new[:] = says

    def like(self, other: StepBuffers) -> None:
        """For a recording: tells the model the same as in `other`, whose buffers may be larger."""
        self.put_masks([kv.says_nothing_new for kv in other.layers])
        self.bounds.move(other.bounds.low, other.bounds.high)

    # ---- sizes

    def reserve(self, sizes: Sizes) -> Callable[[], bool]:
        """Allocates memory for buffers of these sizes, none of which is smaller than now. On a CPU it takes no pages
        until they are written to, which happens to one layer after another.

        Returns:
            a function that grows the buffers, and allocates nothing. Generated positions stay; with slots, all contents
            stay. It returns whether what the model was told about the length of the cache still holds.
        """
        have, keeps, growth = self.sizes, self._key.slots, list[Callable[[], object]]()
        assert self.growing is not None, "a key without sizes is one of buffers that grow"
        if sizes.cached > have.cached:
            growth += [kv.reserve_prefix(sizes.cached, "end" if keeps else None) for kv in self.own]
            growth.append(partial(self.prefix_length.fill_, sizes.cached))
        if sizes.source > have.source:
            growth += [kv.reserve_prefix(sizes.source, "start" if keeps else None) for kv in self.cross]
        if sizes.new > have.new:
            capacity = sizes.new + self._key.width - 1
            growth += [each.reserve_suffix(capacity) for each in self.own]
            growth.append(self.position.reserve(capacity))
        for name, buffer in self.inputs.items():
            if (width := self._width_of(name, sizes)) != buffer.shape[1]:
                larger = buffer.new_zeros(len(buffer), width)
                first = sizes.cached - have.cached if self._key.is_sequences_mask(name) else 0
                if name in self._delays:
                    self._put_delay(name, larger)
                else:
                    larger[:, first : first + buffer.shape[1]] = buffer
                growth.append(partial(self.growing.exchange, buffer, larger))
        return partial(self._grow, sizes, growth)

    def _grow(self, sizes: Sizes, growth: Sequence[Callable[[], object]]) -> bool:
        self.sizes = sizes
        for each in growth:
            each()
        return self._move_bounds()

    def _move_bounds(self) -> bool:
        """Updates the bounds of the cache length. Returns whether what the model was told about it still holds."""
        return self.bounds.move(self.sizes.cached, self.sizes.cached + min(self._most_new, self.sizes.new))

    def begin_capture(self, is_first: bool = True) -> None:
        """Prepares for a capture, which depends on what the model is told of the cache length from now on, and on what
        other captured parts of the step were told, unless this is the first.
        """
        if is_first:
            self.bounds.answers.clear()
        if self.growing is not None:
            # Lengths that a program must have in buffers that grow, and nowhere else.
            exact = {size for size in self._key.sizes if size}
            lengths = self._key.lengths(self.sizes)
            self.growing.lengths = frozenset(size for size in lengths if size >= LEAST_LENGTH) - exact

    # ---- a call

    def begin(self, prompt: Prompt, inputs: slice = slice(None)) -> bool:
        """Takes over what the prefill has stored for these inputs. Returns the same as the function of `reserve`."""
        key = self._key
        for kv, (keys, values) in zip(self.own, prompt.own, strict=True):
            dropped = prompt.cached - keys.shape[2]
            starts, ends = ((bound - dropped).clamp(min=0) for bound in prompt.span)
            kv.load(keys, values, starts, ends, at_end=not key.source_in_front, inputs=inputs)
        for kv, (keys, values) in zip(self.cross, prompt.cross, strict=True):
            assert prompt.cross_span is not None, "what is stored of the encoder's output has a span"
            kv.load(keys, values, *prompt.cross_span, at_end=False, inputs=inputs)
        for states, given_states in zip(self.states, prompt.states, strict=True):
            states.load(given_states, inputs)
        if inputs == slice(None):
            self.present, self.start = prompt.inputs, self.sizes.prompt - prompt.tokens.shape[1]
            self._delays = {name: prompt.tensors[name] for name in self.inputs if name in DELAYS}
        for name in self._delays:
            self._put_delay(name, self.inputs[name])
        for name, buffer in self.inputs.items():
            if name in self._delays:
                continue
            part = buffer.unflatten(0, (-1, key.per_input))[inputs].flatten(0, 1)
            given = prompt.tensors[name].repeat_interleave(key.per_input, dim=0)
            end = self.sizes.cached if key.is_sequences_mask(name) else given.shape[1]
            part.zero_()
            part[: given.shape[0], end - given.shape[1] : end] = given
        if inputs == slice(None):
            self._lengths = [kv[0].shape[2] for kv in prompt.own], [kv[0].shape[2] for kv in prompt.cross]
        self.position.begin(inputs)
        self._measure()
        self._mark()
        self._most_new = max(self._most_new, prompt.new_tokens)
        return self._move_bounds()

    def advance(self, parents: Tensor | None, taken: Tensor) -> None:
        """Advances the rows by `taken` positions. They continue what `parents`, [rows], have stored; None: themselves.

        All changes are in place, and may be captured.
        """
        taken = self._key.codebooks.of_rows(taken)
        if parents is not None and self._key.per_input > 1:
            for each in self.states:
                each.reorder(parents)
        state, masks = self.position, self._masks
        positions = [buffer for name, buffer in self.inputs.items() if name in POSITIONS]
        if search_step.available(taken) and search_step.serves(positions, masks):
            torch.ops.fastgen.advance_(
                parents,
                taken,
                self.prefix_length,
                state.position_table,
                state.ancestry,
                self.cache_length,
                positions,
                masks,
                self._marked,
            )
            return
        state.advance(parents, taken)
        self._measure()
        for buffer in positions:
            buffer.add_(taken.unsqueeze(1))
        self._mark()

    def _measure(self) -> None:
        torch.amax(self.position.position, 0, out=self.cache_length)
        self.cache_length.add_(self.prefix_length)

    def _mark(self) -> None:
        """Unmasks the positions of the next step. Attention itself excludes positions after a query."""
        columns = torch.arange(self._marked, device=self.device)
        for mask in self._masks:
            at = self.sizes.cached + self.position.position.unsqueeze(1) + columns
            mask.scatter_(1, at.clamp(max=mask.shape[1] - 1), 1)

    def insert(self, other: StepBuffers, source: slice, target: slice = slice(None)) -> bool:
        """Has the inputs at `source` in `other`, which has no more capacity, continue at `target`.

        Returns:
            the same as the function of `reserve`.
        """
        if target == slice(None):
            self.start, self.present, self._lengths = other.start, other.present, other._lengths
            self._delays = other._delays
        for kv, old in zip(self.layers, other.layers, strict=True):
            kv.insert(old, source, target)
        for states, others in zip(self.states, other.states, strict=True):
            states.insert(others, source, target)
        self.position.insert(other.position, source, target)
        self._insert_inputs(other, source, target)
        self._measure()
        self._mark()
        self._most_new = max(self._most_new, other._most_new)
        return self._move_bounds()

    def _insert_inputs(self, other: StepBuffers, source: slice, target: slice) -> None:
        for name, buffer in self.inputs.items():
            part, given = (each.view(-1, self._key.per_input, each.shape[1]) for each in (buffer, other.inputs[name]))
            part[target] = 0
            part[target, :, : given.shape[2]] = given[source]
        for name in self._delays:
            self._put_delay(name, self.inputs[name])

    def leave(self, inputs: slice) -> None:
        """Ends these inputs: attention reads nothing of them, and the model gets inputs valid at any position."""
        for kv in self.layers:
            kv.leave(inputs)
        for states in self.states:
            states.leave(inputs)
        self.empty(inputs)

    def empty(self, inputs: slice) -> None:
        """Ends inputs that have stored nothing themselves, such as rows that have verified the draft of another row."""
        self.position.begin(inputs)
        for buffer in self.inputs.values():
            buffer.view(self._key.batch, self._key.per_input, -1)[inputs] = 0
        self._measure()
        self._mark()

    # ---- rows that verify the draft of another row

    def fork(self, source: int, rows: slice) -> None:
        """Makes free rows copies of the row `source`, each one position after the row before."""
        count, first = rows.stop - rows.start, self.sizes.cached + int(self.position.position[source])
        self.position.fork(source, rows)
        self._insert_inputs(self, slice(source, source + 1), rows)
        for name, buffer in self.inputs.items():
            if name in POSITIONS:
                buffer[rows] += torch.arange(1, count + 1).unsqueeze(1)
            elif self._key.is_sequences_mask(name):
                marked = buffer[rows, first : first + count + 1]
                marked.copy_(torch.ones(count, count + 1).tril(1)[:, : marked.shape[1]])
        self._measure()

    def join(self, row: slice, target: slice) -> None:
        """Has the row `target` continue where its fork `row` is. K and V stay, as forks share those of `target`."""
        self.position.insert(self.position, row, target)
        self._insert_inputs(self, row, target)

    def clear(self) -> None:
        """Discards K and V of the last call, which take no memory on a CPU from then on."""
        if not self.present:  # already cleared since the last call
            return
        self.present = 0
        if all([kv.clear() for kv in self.layers]):
            self.position.begin()

    def materialized(
        self, new: int
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]], list[dict[Name, Tensor]]]:
        """Returns K and V of self- and of cross-attention by layer, [rows present, heads, positions, dim], and states.

        Self-attention has the positions of the prompt and of `new` tokens after it.
        """
        own, cross = self._lengths
        at_end, present = not self._key.source_in_front, self._key.codebooks.rows(self.present)
        return (
            [kv.materialize(present, length, new, at_end) for kv, length in zip(self.own, own, strict=True)],
            [kv.materialize(present, length) for kv, length in zip(self.cross, cross, strict=True)],
            [each.first(self.rows) for each in self.states],
        )
