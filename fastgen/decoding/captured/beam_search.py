"""The bookkeeping of beam search in buffers of fixed sizes, with nothing that waits for the device.

What becomes of the best candidates of a step: which of them are finished hypotheses, which go on, and whether the
search is over. The rules are those of Transformers' beam search (5.x), number by number. There, shapes grow with the
length and the host looks at a flag in every step; here, the length is on the device, every step does the same, and a
step after the end changes nothing, so that the flag may be looked at late. It is all plain torch on small tensors: it
can be captured in a CUDA graph as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.decoding.captured.sequences import SequenceBuffers
from fastgen.ops.triton.beam_step import Candidates, best_continuations

_NEVER = -1.0e9


class BeamSearch(SequenceBuffers):
    """The state of searches over at most `batch` inputs with `beams` beams each, one search after the other.

    Attributes:
        running_sequences: [batch, beams, prompt_capacity + new_capacity], int64: the beams, filled up to `length`.
        running_scores: [batch, beams], float32: what `best_continuations` takes as `running`.
        running_indices, indices: [batch, beams, new_capacity], int32: the row of the beam at each step.
        sequences, scores: like the running ones: the finished hypotheses, best first.
        finished: [batch, beams], bool: which of those are there.
        parents: [batch * beams], int64: the row that each row continues.
        candidates: how many candidates of each input `take` takes.

    The other attributes are those of `SequenceBuffers`.
    """

    def __init__(
        self,
        batch: int,
        beams: int,
        prompt_capacity: int,
        new_capacity: int,
        device: torch.device,
        eos: Sequence[int] = (),
        *,
        early_stopping: bool | str = False,
    ) -> None:
        """
        Args:
            prompt_capacity, new_capacity: positions for the prompt and for what is generated.
            eos: tokens that end a sequence.
            early_stopping: as in `generate`.
        """
        super().__init__(batch, beams, prompt_capacity, new_capacity, device, eos)
        self._early_stopping = early_stopping
        self.candidates = max(2, 1 + len(eos)) * beams

        self.running_sequences = torch.zeros(
            batch, beams, prompt_capacity + new_capacity, dtype=torch.int64, device=device
        )
        self.sequences = torch.zeros_like(self.running_sequences)
        self.running_scores = torch.zeros(batch, beams, device=device)
        self.scores = torch.zeros_like(self.running_scores)
        self.running_indices = torch.zeros(batch, beams, new_capacity, dtype=torch.int32, device=device)
        self.indices = torch.zeros_like(self.running_indices)
        self.finished = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self._own_rows = torch.arange(batch * beams, device=device)
        self.parents = self._own_rows.clone()
        self._improvable = torch.ones(batch, 1, dtype=torch.bool, device=device)

        self._steps = torch.arange(new_capacity, device=device)
        self._first_rows = torch.arange(batch, device=device).unsqueeze(1) * beams
        self._best_beams = torch.arange(self.candidates, device=device) < beams
        self._penalties = torch.ones(new_capacity + 2, device=device)
        self._favours_length = torch.zeros((), dtype=torch.bool, device=device)

    def begin(self, prompt: Tensor, new_tokens: int, *, fill: int = 0, length_penalty: float = 1.0) -> None:
        """Starts a search.

        Args:
            prompt: [inputs, prompt length], int64, on the device: of encoder-decoder models the decoder's. Inputs may
                be fewer than the capacity.
            new_tokens: at the most, at least one.
            fill: what stands behind the end of a sequence.
            length_penalty: as in `generate`.

        Raises:
            ValueError: there is nothing to generate, or more than the capacity.
        """
        self._begin(prompt, new_tokens, self.running_sequences, fill)
        self.sequences.copy_(self.running_sequences)
        # All beams are the same at first: only one of them may be continued.
        self.running_scores.zero_()
        self.running_scores[:, 1:] = _NEVER
        self.scores.fill_(_NEVER)
        self.running_indices.fill_(-1)
        self.indices.fill_(-1)
        self.finished.fill_(False)
        self.parents.copy_(self._own_rows)
        self._improvable.copy_(self._is_real)
        # What scores are divided by at each length, as Python computes it; 0 stands for no length, where none is used.
        penalties = [1.0] + [float(k) ** length_penalty for k in range(1, self.new_capacity + 2)]
        self._penalties.copy_(torch.tensor(penalties, dtype=torch.float64).float())
        self._favours_length.fill_(length_penalty > 0.0)

    @property
    def running_tokens(self) -> Tensor:
        """[rows, prompt_capacity + new_capacity]: the running sequences, for processors."""
        return self.running_sequences.flatten(0, 1)

    def propose(self, scores: Tensor, normalise: bool) -> Candidates:
        return best_continuations(scores, self.running_scores, self.candidates, normalise=normalise)

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        candidates = Candidates(*(part[:inputs] for part in proposal))
        sequences = _pick(self.running_sequences[:inputs, :, start:end], candidates.beams)
        return torch.cat([sequences, candidates.tokens.unsqueeze(2)], dim=2).flatten(0, 1)

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        candidates = Candidates(*proposal)
        new_length = self.length + 1
        step = self.length - self.prompt_capacity
        at_end = new_length >= self.limit

        # The candidates with their histories; an index behind the end (in a step after it) writes nothing.
        sequences = _pick(self.running_sequences, candidates.beams)
        sequences = torch.where(self._positions == self.length, candidates.tokens.unsqueeze(2), sequences)
        rows = (candidates.beams + self._first_rows).int()
        indices = _pick(self.running_indices, candidates.beams)
        indices = torch.where(self._steps == step, rows.unsqueeze(2), indices)
        ends = self.ends(candidates.tokens) | at_end
        if stops is not None:
            ends = ends | stops.view_as(ends)

        # Those that go on.
        open_scores = candidates.scores + ends.float() * _NEVER
        chosen = open_scores.topk(self._per_input, dim=1).indices
        running_scores = open_scores.gather(1, chosen)
        parents = rows.gather(1, chosen).long().reshape(-1)
        tokens = candidates.tokens.gather(1, chosen).reshape(-1)

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
            steps = torch.where(self._favours_length, self.limit - self.prompt_capacity, steps)
        hoped = self._per_length(running_scores[:, :1], steps)
        worst = scores.amin(dim=1, keepdim=True).masked_fill(~finished, _NEVER)
        improvable = self._improvable & (hoped > worst).any(dim=1, keepdim=True)
        over = ~improvable.any() | (ends | ~self._is_real).all()
        if self._early_stopping is True:
            over = over | (finished | ~self._is_real).all()

        # A step after the end leaves everything as it is. What is read above is written below, and only here.
        changes = (
            (self.sequences, _pick(torch.cat([self.sequences, sequences], dim=1), kept)),
            (self.indices, _pick(torch.cat([self.indices, indices], dim=1), kept)),
            (self.running_sequences, _pick(sequences, chosen)),
            (self.running_indices, _pick(indices, chosen)),
            (self.running_scores, running_scores),
            (self.scores, scores),
            (self.finished, finished),
            (self._improvable, improvable),
            (self.tokens, tokens),
            (self.length, new_length),
        )
        for old, new in changes:
            old.copy_(torch.where(self.done, old, new))
        self.parents.copy_(torch.where(self.done, self._own_rows, parents))
        self.done.logical_or_(over)

    def results(self, inputs: int, count: int) -> Tensor:
        """The `count` best sequences of each of the first `inputs` inputs, [inputs * count, length].

        As long as the longest of them, those that are shorter filled. Waits for the device.
        """
        start, end = int(self.start), self.prompt_capacity + self._written(inputs, count)
        return self.sequences[:inputs, :count, start:end].flatten(0, 1).clone()

    def result_indices(self, inputs: int, count: int) -> Tensor:
        """The row of the beam at each step of what `results` returns, [inputs * count, generated], int32; -1 behind."""
        return self.indices[:inputs, :count, : self._written(inputs, count)].flatten(0, 1).clone()

    def _written(self, inputs: int, count: int) -> int:
        return int((self.indices[:inputs, :count] >= 0).sum(dim=2).max())

    def _per_length(self, scores: Tensor, steps: Tensor) -> Tensor:
        penalty = self._penalties.index_select(0, steps.clamp(0, self._penalties.shape[0] - 1).reshape(1))
        # A GPU divides by a number from the host, which the library's penalty is, by multiplying with its inverse.
        return scores * penalty.reciprocal() if scores.is_cuda else scores / penalty


def _pick(x: Tensor, beams: Tensor) -> Tensor:
    """[batch, n, ...] and [batch, k] -> [batch, k, ...]: those of the second dimension."""
    return x.gather(1, beams.unsqueeze(2).expand(-1, -1, x.shape[2]))
