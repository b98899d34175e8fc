"""The bookkeeping of a search in buffers of fixed sizes, with nothing that waits for the device.

The rules are those of Transformers' loops (5.x), number by number. There, shapes grow with the length and the host
looks at a flag in every step; here, the lengths are on the device, every step does the same, and a step after the end
changes nothing, so that the flag may be looked at late. Every input has its own length, and may begin at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured.growing import Growing
from fastgen.ops import search_step
from fastgen.ops.best_candidates import Candidates, best_continuations

# Stands in front of a prompt that is shorter than its part of the buffer: no token.
NOTHING = -1
_NEVER = -1.0e9


class Search:
    """Sequences in buffers, and how far they are: at most `batch` inputs with `per_input` sequences each.

    The buffers have prompt_capacity + new_capacity positions. A prompt is at the end of its part, so that what is
    generated begins at the same position whatever the prompt's length. Tokens of `eos` end a sequence; `begin` may name
    others, as many or fewer.

    Args:
        growing: of the step, if its buffers may grow.

    Attributes:
        prompt_capacity, new_capacity: positions for the prompt and for what is generated.
        running_sequences: [batch, per_input, prompt_capacity + new_capacity], int64: filled up to `length`.
        start, length, limit: [batch, per_input], int64: where sequences begin, up to where they are filled, and may go.
        prompt: one int64: where all prompts end.
        unfinished: [batch, per_input], bool: sequences that go on; of beam search, those of inputs that do.
        tokens: [rows], int64: what each row is continued with.
        parents: [rows], int64: the row that each row continues; None: itself.
        taken: [batch, per_input], int64: by how many tokens the step has continued each sequence.
        done: one bool: all of the search is over.
        has_nan: one bool: probabilities to draw from were NaN.
    """

    parents: Tensor | None = None
    # Buffers with a column for each position of sequences, and for each step.
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
        # Inputs that are there; the others fill the batch up.
        self._is_real = torch.ones(batch, 1, dtype=torch.bool, device=device)
        if growing is not None:
            growing.add(self.running_sequences)

    @property
    def running_tokens(self) -> Tensor:
        """[rows, prompt_capacity + new_capacity]: the running sequences, for processors."""
        return self.running_sequences.flatten(0, 1)

    def begin(
        self,
        prompt: Tensor,
        new_tokens: int,
        *,
        fill: int = 0,
        eos: Sequence[int] | None = None,
        inputs: slice = slice(None),
    ) -> None:
        """Starts a search from `prompt`, [n, length], int64; `fill` stands behind the end of a sequence.

        It is that of the first n of `inputs`. The rest of these fill the batch up, and all others go on. `eos` ends all
        of them from now on.

        With more new tokens than the capacity, the search has to `grow` in time, or another one to take over.

        Raises:
            ValueError: there is nothing to generate, the prompt is too long, or too many tokens end a sequence.
        """
        count, width = prompt.shape
        room = len(range(self._batch)[inputs])
        if new_tokens < 1:
            raise ValueError("there is nothing to generate: the prompt is as long as the sequences may become")
        if count > room or width > self.prompt_capacity:
            raise ValueError(
                f"{count} prompts of {width} into buffers for {room} prompts of {self.prompt_capacity} positions"
            )
        if eos is not None:
            self._put_ends(eos)
        start = self.prompt_capacity - width
        sequences = self.running_sequences[inputs]
        sequences.fill_(fill)
        sequences[:, :, :start] = NOTHING
        sequences[:count, :, start : self.prompt_capacity] = prompt.unsqueeze(1)
        self._by_input(self.tokens)[inputs] = sequences[:, :, self.prompt_capacity - 1].clamp(min=0)
        self._by_input(self._fill)[inputs] = fill
        self.start[inputs] = start
        self.length[inputs] = self.prompt_capacity
        self.limit[inputs] = self.prompt_capacity + new_tokens
        self._is_real[inputs] = (torch.arange(room, device=prompt.device) < count).unsqueeze(1)
        self.unfinished[inputs] = self._is_real[inputs]
        self.done.fill_(False)
        if inputs == slice(None):
            self.has_nan.fill_(False)

    def _put_ends(self, eos: Sequence[int]) -> None:
        if len(eos) > len(self._eos):
            raise ValueError(f"{len(eos)} tokens that end a sequence, in a buffer for {len(self._eos)}")
        self._eos.fill_(NOTHING)
        self._eos[: len(eos)] = torch.tensor(list(eos), dtype=torch.int64)

    def grow(self, prompt_capacity: int, new_capacity: int) -> None:
        """Gives the buffers more positions. The sequences stay what they are."""
        assert self._growing is not None, "the buffers of this search do not grow"
        more = prompt_capacity - self.prompt_capacity
        larger = [(name, self._larger(name, prompt_capacity, new_capacity)) for name in self._lengthening]
        self._resize(prompt_capacity, new_capacity)
        for name, new in larger:
            old = getattr(self, name)
            if name in self._by_position:
                new[..., :more] = NOTHING
                new[..., more : more + old.shape[-1]] = old
            elif name in self._by_step:
                new[..., : old.shape[-1]] = old
            self._growing.exchange(old, new)
        for place in (self.start, self.length, self.limit, self.prompt):
            place.add_(more)

    @property
    def _lengthening(self) -> tuple[str, ...]:
        """The buffers whose size is a matter of capacities."""
        return *self._by_position, *self._by_step

    def _larger(self, name: str, prompt_capacity: int, new_capacity: int) -> Tensor:
        """A buffer for these capacities, with what is there where nothing has been written."""
        old = getattr(self, name)
        if name in self._by_position:
            fill = self._fill.view(self._batch, self._per_input, 1)
            return fill.repeat(1, 1, prompt_capacity + new_capacity)
        return old.new_full((*old.shape[:-1], new_capacity), NOTHING)

    def _resize(self, prompt_capacity: int, new_capacity: int) -> None:
        self.prompt_capacity, self.new_capacity = prompt_capacity, new_capacity
        self._positions = torch.arange(prompt_capacity + new_capacity, device=self.tokens.device)

    def propose(self, scores: Tensor, normalise: bool) -> tuple[Tensor, ...]:
        """Continuations for `take`, by scores [rows, vocabulary]: logits, or (not normalised) what was made of them."""
        raise NotImplementedError

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        """Those proposed for the first inputs, which are at [start, end): [inputs * continuations, end - start + 1]."""
        raise NotImplementedError

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        """Goes on with what was proposed, in place. Continuations of `stops`, bools, end whatever their token is."""
        raise NotImplementedError

    def choose(self, scores: Tensor, normalise: bool) -> None:
        """A step's choice from the scores, which are those of `propose`."""
        self.take(self.propose(scores, normalise))

    def results(self, inputs: int, count: int) -> Tensor:
        """The `count` best sequences of each of the first inputs, [inputs * count, length of the longest], filled up.

        Waits for the device.
        """
        raise NotImplementedError

    def take_over(self, other: Search, inputs: Tensor | slice = slice(None)) -> None:
        """Goes on where `other`, a search of the same kind and prompt capacity, is; without beams, maybe with `inputs`.

        It may have more room for what is generated.
        """
        for name, buffer in vars(self).items():
            if isinstance(buffer, Tensor) and name not in (*self._lengthening, *self._constant):
                old = getattr(other, name)
                buffer.copy_(old if old.shape == buffer.shape else old.view(other._batch, -1)[inputs].view_as(buffer))
        for name in self._lengthening:
            old, buffer = getattr(other, name)[inputs], getattr(self, name)
            buffer.copy_(self._larger(name, self.prompt_capacity, self.new_capacity))
            if name in (*self._by_position, *self._by_step):
                buffer[..., : old.shape[-1]] = old

    def _ends(self, tokens: Tensor, stops: Tensor | None) -> Tensor:
        """Which tokens end a sequence, in the shape of `tokens`."""
        ends = (tokens.unsqueeze(-1) == self._eos).any(dim=-1)
        return ends if stops is None else ends | stops.view_as(ends)

    def _exponential_race(self, scores: Tensor) -> Tensor:
        """p / e for the probabilities p of each row, some rows for each input, and exponentially distributed e.

        The k largest of a row are k draws without replacement, as in `torch.multinomial`. So on the CPU, where no row
        is added, the same seed gives the same samples.
        """
        probabilities = torch.softmax(scores.float(), dim=-1)
        # One score that is not a number spoils its whole row, be the sequence finished or not.
        is_real = self._is_real.expand(-1, scores.shape[0] // self._batch).reshape(-1)
        self.has_nan.logical_or_((probabilities[:, 0].isnan() & is_real & ~self.done).any())
        return probabilities / torch.empty_like(probabilities).exponential_()

    def _by_input(self, rows: Tensor) -> Tensor:
        return rows.view(self._batch, -1)

    def _change(self, unfinished: Tensor, *changes: tuple[Tensor, Tensor]) -> Tensor:
        """The end of a step: new contents of buffers, [batch, per_input, ...]. Says where, [batch, per_input], bool.

        At its limit, and after the end of the search, a sequence stays what it is.
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

    # Buffers of what the capacities alone say.
    _constant: tuple[str, ...] = ("_positions",)


class RowSearch(Search):
    """Every row is continued for itself: with the most probable token, or with one that is drawn."""

    def propose(self, scores: Tensor, normalise: bool) -> tuple[Tensor]:
        """The largest of each row, or one that is drawn; behind the end of a sequence, what fills it up."""
        tokens = (self._exponential_race(scores) if self._samples else scores).argmax(dim=-1)
        return (torch.where(self.unfinished.view(-1), tokens, self._fill) if len(self._eos) else tokens,)

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        rows = inputs * self._per_input
        return torch.cat([self.running_tokens[:rows, start:end], proposal[0][:rows].unsqueeze(1)], dim=1)

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
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

    def results(self, inputs: int, count: int) -> Tensor:
        start, end = int(self.start[:inputs].min()), int(self.length[:inputs].max())
        return self.running_sequences[:inputs, :count, start:end].flatten(0, 1).clone()


class BeamSearch(Search):
    """Beam search; `early_stopping` as in `generate`. Candidates are the best ones, or they are drawn.

    Args:
        sorts: drawn candidates are put in order, the most probable first.

    Attributes:
        running_scores: [batch, beams], float32: what `best_continuations` takes as `running`.
        running_indices, indices: [batch, beams, new_capacity], int32: the row of the beam at each step.
        sequences, scores: like the running ones: the finished hypotheses, best first.
        finished: [batch, beams], bool: which of those are there.
        candidates: how many candidates of each input `take` takes.
    """

    parents: Tensor
    _by_position = ("running_sequences", "sequences")
    _by_step = ("running_indices", "indices")
    _constant = ("_positions", "_steps")

    def __init__(self, *sizes: Any, early_stopping: bool | str = False, sorts: bool = False, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._sorts = sorts
        batch, beams, device = self._batch, self._per_input, self.tokens.device
        self._early_stopping = early_stopping
        self.candidates = max(2, 1 + len(self._eos)) * beams

        self.sequences = torch.zeros_like(self.running_sequences)
        self.running_scores = torch.zeros(batch, beams, dtype=torch.float32, device=device)
        self.scores = torch.zeros_like(self.running_scores)
        self.running_indices = torch.zeros(batch, beams, self.new_capacity, dtype=torch.int32, device=device)
        self.indices = torch.zeros_like(self.running_indices)
        self.finished = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self._own_rows = torch.arange(batch * beams, device=device)
        self.parents = self._own_rows.clone()
        self._improvable = torch.ones_like(self._is_real)

        self._steps = torch.arange(self.new_capacity, device=device)
        self._first_rows = torch.arange(batch, device=device).unsqueeze(1) * beams
        self._best_beams = torch.arange(self.candidates, device=device) < beams
        self._exponents = [(1.0, 1)] * batch  # of the length, and the most new tokens, by input
        self._penalties = torch.ones(batch, self.new_capacity + 2, dtype=torch.float32, device=device)
        self._favours_length = torch.zeros_like(self._is_real)
        if self._growing is not None:
            self._growing.add(self.sequences, self.running_indices, self.indices, self._penalties)

    def begin(self, prompt: Tensor, new_tokens: int, *, length_penalty: float = 1.0, **options: Any) -> None:
        """Starts a search, as `Search.begin`; `length_penalty` as in `generate`."""
        super().begin(prompt, new_tokens, **options)
        inputs = options.get("inputs", slice(None))
        self.sequences[inputs] = self.running_sequences[inputs]
        # All beams are the same at first: only one of them may be continued.
        scores = (self.running_scores, 0), (self.running_scores[:, 1:], _NEVER), (self.scores, _NEVER)
        for buffer, value in (*scores, (self.running_indices, -1), (self.indices, -1), (self.finished, False)):
            buffer[inputs] = value
        self._by_input(self.parents)[inputs] = self._by_input(self._own_rows)[inputs]
        self._improvable[inputs] = self._is_real[inputs]
        self._exponents[inputs] = [(length_penalty, new_tokens)] * len(range(self._batch)[inputs])
        penalties = _length_penalties(self.new_capacity, length_penalty, new_tokens)
        self._penalties[inputs] = penalties.to(self._penalties.device)
        self._favours_length[inputs] = length_penalty > 0.0

    @property
    def _lengthening(self) -> tuple[str, ...]:
        return *super()._lengthening, "_penalties"

    def _larger(self, name: str, prompt_capacity: int, new_capacity: int) -> Tensor:
        if name != "_penalties":
            return super()._larger(name, prompt_capacity, new_capacity)
        by_exponent = {each: _length_penalties(new_capacity, *each) for each in dict.fromkeys(self._exponents)}
        return torch.stack([by_exponent[each] for each in self._exponents]).to(self._penalties.device)

    def _resize(self, prompt_capacity: int, new_capacity: int) -> None:
        super()._resize(prompt_capacity, new_capacity)
        self._steps = torch.arange(new_capacity, device=self.tokens.device)

    def take_over(self, other: Search, inputs: Tensor | slice = slice(None)) -> None:
        assert isinstance(other, BeamSearch), "a search of the same kind"
        self._exponents = list(other._exponents)
        super().take_over(other, inputs)

    def propose(self, scores: Tensor, normalise: bool) -> Candidates:
        if not self._samples:
            return best_continuations(scores, self.running_scores, self.candidates, normalise=normalise)
        scores = torch.log_softmax(scores, dim=-1, dtype=torch.float32) if normalise else scores
        scores = (scores.view(*self.running_scores.shape, -1) + self.running_scores.unsqueeze(2)).flatten(1)
        drawn = self._exponential_race(scores).topk(self.candidates, dim=1).indices
        vocabulary = scores.shape[1] // self._per_input
        found = scores.gather(1, drawn)
        if self._sorts:
            found, order = found.sort(dim=1, descending=True)
            drawn = drawn.gather(1, order)
        return Candidates(found, drawn // vocabulary, drawn % vocabulary)

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        candidates = Candidates(*(part[:inputs] for part in proposal))
        sequences = _pick(self.running_sequences[:inputs, :, start:end], candidates.beams)
        return torch.cat([sequences, candidates.tokens.unsqueeze(2)], dim=2).flatten(0, 1)

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        if search_step.available(self.tokens):
            torch.ops.fastgen.take_beams_(
                *proposal, stops, self._eos, self._penalties, self._favours_length, self._is_real, self.limit,
                self.has_nan, self.running_sequences, self.running_indices, self.running_scores, self.sequences,
                self.indices, self.scores, self.finished, self._improvable, self.tokens, self.parents, self.length,
                self.taken, self.unfinished, self.done, self.prompt,
                search_step.EARLY_STOPPING[self._early_stopping],
            )  # fmt: skip
            return
        candidates = Candidates(*proposal)
        length, limit = self.length[:, :1], self.limit[:, :1]
        step = length - self.prompt_capacity

        # The candidates with their histories; an index behind the end (in a step after it) writes nothing.
        sequences = _pick(self.running_sequences, candidates.beams)
        sequences = torch.where(self._positions == length.unsqueeze(2), candidates.tokens.unsqueeze(2), sequences)
        rows = (candidates.beams + self._first_rows).int()
        indices = _pick(self.running_indices, candidates.beams)
        indices = torch.where(self._steps == step.unsqueeze(2), rows.unsqueeze(2), indices)
        is_last = length + 1 >= limit
        ends = self._ends(candidates.tokens, stops) | is_last

        # Those that go on.
        open_scores = candidates.scores + ends.float() * _NEVER
        chosen = open_scores.topk(self._per_input, dim=1).indices
        running_scores = open_scores.gather(1, chosen)
        parents = rows.gather(1, chosen).long()
        tokens = candidates.tokens.gather(1, chosen)

        # Those that are finished: of the best only, if their input can still be improved.
        just_finished = ends & self._best_beams
        scores = self._per_length(candidates.scores, step + 1)
        if self._early_stopping is True:
            scores = scores + self.finished.all(dim=1, keepdim=True).float() * _NEVER
        scores = scores + (~self._improvable).float() * _NEVER
        scores = scores + (~just_finished).float() * _NEVER
        scores = torch.cat([self.scores, scores], dim=1)
        kept = scores.topk(self._per_input, dim=1).indices
        scores = scores.gather(1, kept)
        finished = torch.cat([self.finished, just_finished], dim=1).gather(1, kept)

        # Is there anything left that could become better than what is there?
        steps = step + 1
        if self._early_stopping == "never":
            steps = torch.where(self._favours_length, limit - self.prompt_capacity, steps)
        hoped = self._per_length(running_scores[:, :1], steps)
        worst = scores.amin(dim=1, keepdim=True).masked_fill(~finished, _NEVER)
        improvable = self._improvable & (hoped > worst).any(dim=1, keepdim=True)
        unfinished = improvable & ~is_last & ~(ends | ~self._is_real).all()
        if self._early_stopping is True:
            unfinished = unfinished & ~finished.all(dim=1, keepdim=True)

        # What is read above is written below, and only here. An input that is over goes on to its limit, as in the
        # library while there are others: nothing that it finds is any better.
        self._improvable.copy_(improvable)
        moves = self._change(
            unfinished,
            (self.sequences, _pick(torch.cat([self.sequences, sequences], dim=1), kept)),
            (self.indices, _pick(torch.cat([self.indices, indices], dim=1), kept)),
            (self.running_sequences, _pick(sequences, chosen)),
            (self.running_indices, _pick(indices, chosen)),
            (self.running_scores, running_scores),
            (self.scores, scores),
            (self.finished, finished),
            (self._by_input(self.tokens), tokens),
        )
        self._by_input(self.parents).copy_(torch.where(moves, parents, self._by_input(self._own_rows)))

    def results(self, inputs: int, count: int) -> Tensor:
        start, end = int(self.start[:inputs].min()), self.prompt_capacity + self._written(inputs, count)
        return self.sequences[:inputs, :count, start:end].flatten(0, 1).clone()

    def result_indices(self, inputs: int, count: int) -> Tensor:
        """The row of the beam at each step of what `results` returns, [inputs * count, generated], int32; -1 behind."""
        return self.indices[:inputs, :count, : self._written(inputs, count)].flatten(0, 1).clone()

    def result_scores(self, inputs: int, count: int) -> Tensor:
        """Of what `results` returns, [inputs * count], float32."""
        return self.scores[:inputs, :count].flatten().clone()

    def _written(self, inputs: int, count: int) -> int:
        return int((self.indices[:inputs, :count] >= 0).sum(dim=2).max())

    def _per_length(self, scores: Tensor, steps: Tensor) -> Tensor:
        penalty = self._penalties.gather(1, steps.clamp(0, self._penalties.shape[1] - 1))
        # A GPU divides by a number from the host, which the library's penalty is, by multiplying with its inverse.
        return scores * penalty.reciprocal() if scores.is_cuda else scores / penalty


def _length_penalties(new_capacity: int, length_penalty: float, new_tokens: int) -> Tensor:
    """What scores are divided by at each length, as Python computes it; 0 stands for no length, where none is used.

    The last one is that of all new tokens, which may be more than there is room for.
    """
    lengths = [*range(1, new_capacity + 1), max(new_capacity + 1, new_tokens)]
    return torch.tensor([1.0] + [float(k) ** length_penalty for k in lengths], dtype=torch.float64).float()


def _pick(x: Tensor, beams: Tensor) -> Tensor:
    """[batch, n, ...] and [batch, k] -> [batch, k, ...]: those of the second dimension."""
    return x.gather(1, beams.unsqueeze(2).expand(-1, -1, x.shape[2]))
