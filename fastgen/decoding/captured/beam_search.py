"""Beam search in buffers of fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured.search import NOTHING, Search
from fastgen.ops import search_step
from fastgen.ops.search_step import Candidates, best_continuations

# Added to the scores of impossible candidates, as in the library.
_NEVER = -1.0e9


class BeamSearch(Search):
    """Beam search, with `early_stopping` as in `generate`. Candidates are the best ones, or they are drawn.

    Args:
        sorts: drawn candidates are sorted, the most probable first.

    Attributes:
        running_scores: [batch, beams], float32: the `running` argument of `best_continuations`.
        running_indices, indices: [batch, beams, new_capacity], int32: the row of the beam at each step.
        sequences, scores: like the running ones: the finished hypotheses, best first.
        finished: [batch, beams], bool: which of these exist.
        candidates: number of candidates of each input that `take` expects.
    """

    parents: Tensor
    _by_position = ("running_sequences", "sequences")
    _by_step = ("running_indices", "indices")
    _shared = ("_positions", "_steps", "_eos", "noise", "_own_rows", "_first_rows", "_best_beams")

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
        self._exponents = [(1.0, 1)] * batch  # by input: of the length, and the maximum number of new tokens
        self._penalties = torch.ones(batch, self.new_capacity + 2, dtype=torch.float32, device=device)
        self._favours_length = torch.zeros_like(self._is_real)
        if self._growing is not None:
            self._growing.add(self.sequences, self.running_indices, self.indices, self._penalties)

    def begin(self, prompt: Tensor, new_tokens: int, *, length_penalty: float = 1.0, **options: Any) -> None:
        """Starts a search like `Search.begin`, with `length_penalty` as in `generate`."""
        super().begin(prompt, new_tokens, **options)
        self.sequences.copy_(self.running_sequences)
        # All beams are equal at first, so only one of them may be continued.
        scores = (self.running_scores, 0), (self.running_scores[:, 1:], _NEVER), (self.scores, _NEVER)
        for buffer, value in (*scores, (self.running_indices, -1), (self.indices, -1), (self.finished, False)):
            buffer.fill_(value)
        self.parents.copy_(self._own_rows)
        self._improvable.copy_(self._is_real)
        self._exponents = [(length_penalty, new_tokens)] * self._batch
        self._penalties.copy_(_length_penalties(self.new_capacity, length_penalty, new_tokens))
        self._favours_length.fill_(length_penalty > 0.0)

    @property
    def _lengthening(self) -> tuple[str, ...]:
        return *super()._lengthening, "_penalties"

    def _larger(self, name: str, prompt_capacity: int, new_capacity: int) -> Tensor:
        if name != "_penalties":
            return super()._larger(name, prompt_capacity, new_capacity)
        by_exponent = {each: _length_penalties(new_capacity, *each) for each in dict.fromkeys(self._exponents)}
        return torch.stack([by_exponent[each] for each in self._exponents]).to(self._penalties.device)

    def _tables(self, prompt_capacity: int, new_capacity: int) -> dict[str, Tensor]:
        steps = torch.arange(new_capacity, device=self.tokens.device)
        return {**super()._tables(prompt_capacity, new_capacity), "_steps": steps}

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

    def proposed(self, proposal: tuple[Tensor, ...], inputs: slice, start: int, end: int) -> Tensor:
        candidates = Candidates(*(part[inputs] for part in proposal))
        sequences = _pick(self.running_sequences[inputs, :, start:end], candidates.beams)
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
        else:
            self._take(Candidates(*proposal), stops)

    def _take(self, candidates: Candidates, stops: Tensor | None) -> None:
        """Does the same as the operator with torch's own operators."""
        length, limit = self.length[:, :1], self.limit[:, :1]
        step = length - self.prompt_capacity

        # The candidates with their histories. In a step after the end, the index is out of range and writes nothing.
        sequences = _pick(self.running_sequences, candidates.beams)
        sequences = torch.where(self._positions == length.unsqueeze(2), candidates.tokens.unsqueeze(2), sequences)
        rows = (candidates.beams + self._first_rows).int()
        indices = _pick(self.running_indices, candidates.beams)
        indices = torch.where(self._steps == step.unsqueeze(2), rows.unsqueeze(2), indices)
        is_last = length + 1 >= limit
        ends = self._ends(candidates.tokens, stops) | is_last

        # The beams that continue.
        open_scores = candidates.scores + ends.float() * _NEVER
        chosen = open_scores.topk(self._per_input, dim=1).indices
        running_scores = open_scores.gather(1, chosen)
        parents = rows.gather(1, chosen).long()
        tokens = candidates.tokens.gather(1, chosen)

        # Finished candidates: only those of the best beams, and only if their input can still be improved.
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

        # Whether anything that is left could become better than the finished hypotheses.
        steps = step + 1
        if self._early_stopping == "never":
            steps = torch.where(self._favours_length, limit - self.prompt_capacity, steps)
        hoped = self._per_length(running_scores[:, :1], steps)
        worst = scores.amin(dim=1, keepdim=True).masked_fill(~finished, _NEVER)
        improvable = self._improvable & (hoped > worst).any(dim=1, keepdim=True)
        unfinished = improvable & ~is_last & ~(ends | ~self._is_real).all()
        if self._early_stopping is True:
            unfinished = unfinished & ~finished.all(dim=1, keepdim=True)

        # Buffers that are read above are written only here. An input that is over continues to its limit, as in the
        # library while other inputs run: nothing that it finds is better.
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

    def results(self, inputs: slice, count: int) -> Tensor:
        start, end = int(self.start[inputs].min()), self.prompt_capacity + self._written(inputs, count)
        return self.sequences[inputs, :count, start:end].flatten(0, 1).clone()

    def result_indices(self, inputs: slice, count: int) -> Tensor:
        """Returns each beam's row at each step of `results`, [inputs * count, generated], int32, padded with -1.

        Rows are counted from the first one of these inputs.
        """
        rows = self.indices[inputs, :count, : self._written(inputs, count)].flatten(0, 1)
        first = (inputs.start or 0) * self._per_input
        return torch.where(rows == NOTHING, rows, rows - first)

    def result_scores(self, inputs: slice, count: int) -> Tensor:
        """Returns the scores of `results`, [inputs * count], float32."""
        return self.scores[inputs, :count].flatten().clone()

    def insert(self, other: Search, source: slice, target: slice = slice(None)) -> None:
        assert isinstance(other, BeamSearch), "a search of the same kind"
        self._exponents[target] = other._exponents[source]
        super().insert(other, source, target)
        moved = ((target.start or 0) - (source.start or 0)) * self._per_input  # rows are counted over the whole batch
        for rows in (self._by_input(self.parents), self.running_indices, self.indices):
            rows[target] += moved * (rows[target] != NOTHING)

    def _written(self, inputs: slice, count: int) -> int:
        return int((self.indices[inputs, :count] >= 0).sum(dim=2).max())

    def _per_length(self, scores: Tensor, steps: Tensor) -> Tensor:
        penalty = self._penalties.gather(1, steps.clamp(0, self._penalties.shape[1] - 1))
        # A GPU divides by a host number, which the library's penalty is, by multiplying with its inverse.
        return scores * penalty.reciprocal() if scores.is_cuda else scores / penalty


def _length_penalties(new_capacity: int, length_penalty: float, new_tokens: int) -> Tensor:
    """Returns the divisors of scores by length, as Python computes them. Index 0 stands for no length, and is unused.

    The last divisor is that of all new tokens, which may be more than there is room for.
    """
    lengths = [*range(1, new_capacity + 1), max(new_capacity + 1, new_tokens)]
    return torch.tensor([1.0] + [float(k) ** length_penalty for k in lengths], dtype=torch.float64).float()


def _pick(x: Tensor, beams: Tensor) -> Tensor:
    """Selects along the second dimension: [batch, n, ...] and [batch, k] -> [batch, k, ...]."""
    return x.gather(1, beams.unsqueeze(2).expand(-1, -1, x.shape[2]))
