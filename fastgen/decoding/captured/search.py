"""The bookkeeping of a search in buffers of fixed sizes. Nothing in it waits for the device.

The rules are exactly those of Transformers' loops (5.x). In the library, shapes grow with the length, and the host
reads a flag in every step. Here, lengths are on the device and every step runs the same operations. A step after the
end changes nothing, so the host may read the flag late. Every input has its own length, and may begin at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgen.decoding.program_memory import Growing
from fastgen.ops import search_step

# Precedes a prompt that is shorter than its part of the buffer; it is no token.
NOTHING = -1
# The error of a search whose probabilities are NaN.
NOT_NUMBERS = "probabilities to draw from are not numbers"


class Search:
    """Sequences in buffers, and their lengths: at most `batch` inputs with `per_input` sequences each.

    Each sequence is continued independently, with the most probable token or with one that is drawn.

    The buffers have prompt_capacity + new_capacity positions. A prompt is at the end of its part, so that new tokens
    begin at the same position whatever the prompt's length. Tokens of `eos` end a sequence; `begin` may set others, at
    most as many.

    Args:
        growing: of the step, if its buffers may grow.

    Attributes:
        prompt_capacity, new_capacity: positions for the prompt and for new tokens.
        running_sequences: [batch, per_input, prompt_capacity + new_capacity], int64: filled up to `length`.
        start, length, limit: [batch, per_input], int64: where sequences begin, where they end now, and where at most.
        prompt: int64 scalar: where all prompts end.
        unfinished: [batch, per_input], bool: sequences that continue; in beam search, those of inputs that continue.
        tokens: [rows], int64: the token that continues each row.
        parents: [rows], int64: the row that each row continues; None: itself.
        taken: [batch, per_input], int64: how many tokens the step has added to each sequence.
        done: bool scalar: the whole search is over.
        has_nan: bool scalar: probabilities to draw from were NaN, and the whole search is over.
        nan_inputs: [batch, 1], bool: the same by input if inputs come and go: only these inputs are over.
        noise: [rows, vocabulary], float32, exponentially distributed: the noise of the next step's draws if inputs have
            their own generators; None: torch draws.
        draws: [batch, 1], bool: inputs whose tokens are drawn. With `noise`, others take the most probable token.
    """

    parents: Tensor | None = None
    noise: Tensor | None = None
    # Buffers with a column for each position of the sequences, and buffers with a column for each step.
    _by_position: tuple[str, ...] = ("running_sequences",)
    _by_step: tuple[str, ...] = ()

    def __init__(
        self,
        batch: int,
        per_input: int,
        prompt_capacity: int,
        new_capacity: int,
        device: torch.device,
        eos: Sequence[int] = (),
        *,
        samples: bool = False,
        growing: Growing | None = None,
    ) -> None:
        self._batch, self._per_input, self._samples = batch, per_input, samples
        self.prompt_capacity, self.new_capacity = prompt_capacity, new_capacity
        self._growing = growing
        self._eos = torch.tensor(list(eos), dtype=torch.int64, device=device)
        self._positions = torch.arange(prompt_capacity + new_capacity, device=device)
        self.running_sequences = self._positions.new_zeros(batch, per_input, prompt_capacity + new_capacity)
        self.tokens = self._positions.new_zeros(batch * per_input)
        self.prompt = torch.full((), prompt_capacity, dtype=torch.int64, device=device)
        self.start, self.length, self.limit = self._positions.new_zeros(3, batch, per_input).unbind()
        self.unfinished = torch.ones_like(self.length, dtype=torch.bool)
        self.taken = torch.zeros_like(self.length)
        self._fill = torch.zeros_like(self.tokens)
        self.done = torch.zeros((), dtype=torch.bool, device=device)
        self.has_nan = torch.zeros_like(self.done)
        self.nan_inputs = torch.zeros(batch, 1, dtype=torch.bool, device=device)
        self.draws = torch.ones_like(self.nan_inputs)
        # Inputs of the call; the others only fill the batch.
        self._is_real = torch.ones(batch, 1, dtype=torch.bool, device=device)
        if growing is not None:
            growing.add(self.running_sequences)

    @property
    def running_tokens(self) -> Tensor:
        """The running sequences as processors get them, [rows, prompt_capacity + new_capacity]."""
        return self.running_sequences.flatten(0, 1)

    def begin(self, prompt: Tensor, new_tokens: int, *, fill: int = 0, eos: Sequence[int] | None = None) -> None:
        """Starts a search from `prompt`, [n, length], int64. `fill` pads sequences after their ends.

        The prompts are those of the first n inputs; the rest only fills the batch. `eos` ends all inputs from now on.

        With more new tokens than the capacity, the search has to grow in time, or another search has to take over.

        Raises:
            ValueError: there is nothing to generate, or the prompt is too long.
        """
        count, width = prompt.shape
        if new_tokens < 1:
            raise ValueError("there is nothing to generate: the prompt is as long as the sequences may become")
        if count > self._batch or width > self.prompt_capacity:
            raise ValueError(
                f"{count} prompts of {width} into buffers for {self._batch} prompts of {self.prompt_capacity} positions"
            )
        if eos is not None:
            self.put_ends(eos)
        start = self.prompt_capacity - width
        sequences = self.running_sequences
        sequences.fill_(fill)
        sequences[:, :, :start] = NOTHING
        sequences[:count, :, start : self.prompt_capacity] = prompt.unsqueeze(1)
        self.tokens.copy_(sequences[:, :, self.prompt_capacity - 1].clamp(min=0).flatten())
        self._is_real.copy_((torch.arange(self._batch, device=prompt.device) < count).unsqueeze(1))
        self.unfinished.copy_(self._is_real)
        begin, end = self.prompt_capacity, self.prompt_capacity + new_tokens
        for buffer, value in ((self._fill, fill), (self.start, start), (self.length, begin), (self.limit, end)):
            buffer.fill_(value)
        for flag in (self.nan_inputs, self.done, self.has_nan):
            flag.fill_(False)

    def put_ends(self, eos: Sequence[int]) -> None:
        """Sets the tokens that end sequences from now on: at most as many as there is room for."""
        self._eos.fill_(NOTHING)
        self._eos[: len(eos)] = torch.tensor(list(eos), dtype=torch.int64)

    def reserve(self, prompt_capacity: int, new_capacity: int) -> Callable[[], None]:
        """Allocates memory for more positions. Returns a function that replaces the buffers, and allocates nothing. The
        sequences keep their contents.
        """
        larger = {name: self._larger(name, prompt_capacity, new_capacity) for name in self._lengthening}
        more = prompt_capacity - self.prompt_capacity
        for name, new in larger.items():
            old = getattr(self, name)
            if name in self._by_position:
                new[..., :more] = NOTHING
                new[..., more : more + old.shape[-1]] = old
            elif name in self._by_step:
                new[..., : old.shape[-1]] = old
        tables = self._tables(prompt_capacity, new_capacity)
        return partial(self._put, prompt_capacity, new_capacity, larger, tables)

    def _put(
        self, prompt_capacity: int, new_capacity: int, larger: dict[str, Tensor], tables: dict[str, Tensor]
    ) -> None:
        assert self._growing is not None, "the buffers of this search do not grow"
        more = prompt_capacity - self.prompt_capacity
        self.prompt_capacity, self.new_capacity = prompt_capacity, new_capacity
        vars(self).update(tables)
        for name, new in larger.items():
            self._growing.exchange(getattr(self, name), new)
        for place in (self.start, self.length, self.limit, self.prompt):
            place.add_(more)

    @property
    def _lengthening(self) -> tuple[str, ...]:
        """Names of the buffers whose sizes depend on the capacities."""
        return *self._by_position, *self._by_step

    def _larger(self, name: str, prompt_capacity: int, new_capacity: int) -> Tensor:
        """Returns a buffer for these capacities, with the value of positions that have not been written."""
        old = getattr(self, name)
        if name in self._by_position:
            fill = self._fill.view(self._batch, self._per_input, 1)
            return fill.repeat(1, 1, prompt_capacity + new_capacity)
        return old.new_full((*old.shape[:-1], new_capacity), NOTHING)

    def _tables(self, prompt_capacity: int, new_capacity: int) -> dict[str, Tensor]:
        """Returns other tensors that depend on the capacities, by name."""
        return {"_positions": torch.arange(prompt_capacity + new_capacity, device=self.tokens.device)}

    def propose(self, scores: Tensor, normalise: bool) -> tuple[Tensor, ...]:
        """Returns continuations for `take`, by scores, [rows, vocabulary]: logits if `normalise`, else processed ones.

        A row gets its best token, or one that is drawn; after the end of its sequence, the padding token.
        """
        tokens = (self._drawn(scores) if self._samples else scores).argmax(dim=-1)
        return (torch.where(self.unfinished.view(-1), tokens, self._fill) if len(self._eos) else tokens,)

    def proposed(self, proposal: tuple[Tensor, ...], inputs: slice, start: int, end: int) -> Tensor:
        """Returns [inputs * continuations, end - start + 1]: sequences at [start, end), with the proposed tokens."""
        sequences, tokens = self.running_sequences[inputs, :, start:end], self._by_input(proposal[0])[inputs]
        return torch.cat([sequences, tokens.unsqueeze(2)], dim=2).flatten(0, 1)

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        """Continues with the proposal, in place. Continuations of `stops`, bools, end whatever their token is."""
        if search_step.available(self.tokens):
            torch.ops.fastgen.take_rows_(
                *proposal, stops, self._eos, self.limit, self.has_nan, self.running_sequences, self.tokens,
                self.length, self.taken, self.unfinished, self.done,
            )  # fmt: skip
            return
        tokens = self._by_input(proposal[0])
        is_next = self._positions == self.length.unsqueeze(2)
        written = torch.where(is_next, tokens.unsqueeze(2), self.running_sequences)
        ends = self._ends(tokens, stops) | (self.length + 1 >= self.limit)
        changes = (self.running_sequences, written), (self._by_input(self.tokens), tokens)
        self._change(self.unfinished & ~ends, *changes)

    def choose(self, scores: Tensor, normalise: bool) -> None:
        """Chooses the step's tokens from the scores, which are those of `propose`."""
        self.take(self.propose(scores, normalise))

    def sequences_of(self, place: int) -> Tensor:
        """Returns a view of one input's sequences, [per_input, length of the first]. Waits for the device."""
        return self.running_sequences[place, :, int(self.start[place, 0]) : int(self.length[place, 0])]

    def results(self, inputs: slice, count: int) -> Tensor:
        """Returns the `count` best sequences of each input, padded, [inputs * count, length of the longest].

        Waits for the device.
        """
        start, end = int(self.start[inputs].min()), int(self.length[inputs].max())
        return self.running_sequences[inputs, :count, start:end].flatten(0, 1).clone()

    # ---- inputs that come and go while others continue

    def insert(self, other: Search, source: slice, target: slice = slice(None)) -> None:
        """Has the inputs at `source` in `other`, a search of the same kind and prompt capacity, continue at `target`.

        `other` may have more room for new tokens. By default its inputs replace all inputs of this search.
        """
        for name, buffer in vars(self).items():
            if isinstance(buffer, Tensor) and buffer.dim() and name not in (*self._shared, *self._lengthening):
                self._by_input(buffer)[target] = other._by_input(getattr(other, name))[source]
        for name in self._lengthening:
            buffer, old = getattr(self, name), getattr(other, name)
            is_as_long = buffer.shape[-1] == old.shape[-1]
            if not is_as_long:
                buffer[target] = self._larger(name, self.prompt_capacity, self.new_capacity)[target]
            if is_as_long or name in (*self._by_position, *self._by_step):
                buffer[target, ..., : old.shape[-1]] = old[source]
        self.done.fill_(False)
        if target == slice(None):
            for whole, before in ((self.done, other.done), (self.has_nan, other.has_nan), (self._eos, other._eos)):
                whole.copy_(before)

    def leave(self, inputs: slice) -> None:
        """Ends these inputs: they keep their contents until others take their place."""
        self.unfinished[inputs] = False
        self._is_real[inputs] = False
        self.limit[inputs] = self.length[inputs]

    def fork(self, source: int, inputs: slice, draft: Tensor) -> None:
        """Makes inputs copies of the input `source`, of one sequence, each one draft token longer than the one before.

        Args:
            draft: [number of inputs], int64.
        """
        count, length = len(draft), int(self.length[source])
        self.insert(self, slice(source, source + 1), inputs)
        behind = torch.where(torch.ones(count, count, dtype=torch.bool).tril(), draft, self._fill[source])
        self.running_sequences[inputs, 0, length : length + count] = behind
        self.length[inputs, 0] += torch.arange(1, count + 1)
        self.tokens[inputs] = draft

    def _ends(self, tokens: Tensor, stops: Tensor | None) -> Tensor:
        """Returns which tokens end a sequence, in the shape of `tokens`."""
        ends = (tokens.unsqueeze(-1) == self._eos).any(dim=-1)
        return ends if stops is None else ends | stops.view_as(ends)

    def _drawn(self, scores: Tensor) -> Tensor:
        """Returns [rows, vocabulary], of which the largest is the token drawn."""
        race = self._exponential_race(scores)
        if self.noise is None:
            return race
        self.nan_inputs.logical_and_(self.draws)
        return torch.where(self.draws.expand(-1, self._per_input).reshape(-1, 1), race, scores)

    def _exponential_race(self, scores: Tensor) -> Tensor:
        """Returns p / e for the probabilities p of each row and exponentially distributed e. An input has some rows.

        The k largest of a row are k draws without replacement, as in `torch.multinomial`. On a CPU, where no row only
        fills the batch, the same seed therefore gives the same samples.
        """
        probabilities = torch.softmax(scores.float(), dim=-1)
        # A single NaN score makes its whole row NaN, whether the sequence is finished or not.
        is_real = self._is_real.expand(-1, scores.shape[0] // self._batch).reshape(-1)
        is_nan = probabilities[:, 0].isnan() & is_real & ~self.done
        if self.noise is not None:
            self.nan_inputs.logical_or_(self._by_input(is_nan).any(dim=1, keepdim=True))
            return probabilities / self.noise.view_as(probabilities)
        self.has_nan.logical_or_(is_nan.any())
        return probabilities / torch.empty_like(probabilities).exponential_()

    def _by_input(self, rows: Tensor) -> Tensor:
        return rows.view(self._batch, -1)

    def _change(self, unfinished: Tensor, *changes: tuple[Tensor, Tensor]) -> Tensor:
        """Ends a step with new contents of buffers, [batch, per_input, ...]. Returns where they changed, as bools.

        At its limit, and after the end of the search, a sequence does not change.
        """
        moves = ~(self.done | (self.length >= self.limit))
        for old, new in changes:
            old.copy_(torch.where(moves if old.dim() == 2 else moves.unsqueeze(2), new, old))
        self.taken.copy_(moves)
        self.length.add_(self.taken)
        self.unfinished.copy_(unfinished)
        over = ~unfinished.any()
        self.done.logical_or_(over | self.has_nan if self._samples else over)
        return moves

    # Buffers that belong to no input, or hold the index of each row.
    _shared: tuple[str, ...] = ("_positions", "_eos", "noise")
