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

from fastgen.ops.triton.beam_step import Candidates

_NEVER = -1.0e9


class BeamSearch:
    """The state of a search over `batch` inputs with `beams` beams each.

    Attributes:
        running_sequences: [batch, beams, max_length], int64: the beams, filled up to `length`.
        running_scores: [batch, beams], float32: what `best_candidates` takes as `running`.
        running_indices, indices: [batch, beams, max_length - prompt_length], int32: the row of the beam at each step.
        sequences, scores: like the running ones: the finished hypotheses, best first.
        finished: [batch, beams], bool: which of those are there.
        length: one int64: tokens that the beams have.
        done: one bool: the search is over.
        tokens, parents: [batch * beams], int64: what each row is continued with, and the row it continues.
        candidates: how many candidates of each input `advance` takes.
    """

    def __init__(
        self,
        prompt: Tensor,
        beams: int,
        max_length: int,
        eos: Sequence[int] = (),
        *,
        fill: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        """Starts a search.

        Args:
            prompt: [batch, prompt length], int64, on the device: of encoder-decoder models the decoder's.
            max_length: of prompt and generated tokens together; more than the prompt has.
            eos: tokens that end a sequence.
            fill: what stands behind the end of a sequence.
            length_penalty, early_stopping: as in `generate`.

        Raises:
            ValueError: there is nothing to generate.
        """
        batch, self._prompt_length = prompt.shape
        if max_length <= self._prompt_length:
            raise ValueError(f"max_length is {max_length}, and the prompt has {self._prompt_length} tokens already")
        device = prompt.device
        self._beams, self._max_length = beams, max_length
        self._early_stopping, self._length_penalty = early_stopping, length_penalty
        self.candidates = max(2, 1 + len(eos)) * beams
        self._eos = torch.tensor(list(eos), dtype=torch.int64, device=device)

        steps = max_length - self._prompt_length
        self.running_sequences = torch.full((batch, beams, max_length), fill, dtype=torch.int64, device=device)
        self.running_sequences[:, :, : self._prompt_length] = prompt.unsqueeze(1)
        self.sequences = self.running_sequences.clone()
        # All beams are the same at first: only one of them may be continued.
        self.running_scores = torch.zeros(batch, beams, device=device)
        self.running_scores[:, 1:] = _NEVER
        self.scores = torch.full_like(self.running_scores, _NEVER)
        self.running_indices = torch.full((batch, beams, steps), -1, dtype=torch.int32, device=device)
        self.indices = self.running_indices.clone()
        self.finished = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self.length = torch.tensor(self._prompt_length, device=device)
        self.done = torch.tensor(False, device=device)
        self.tokens = self.running_sequences[:, :, self._prompt_length - 1].reshape(-1).clone()
        self.parents = torch.arange(batch * beams, device=device)
        self._improvable = torch.ones(batch, 1, dtype=torch.bool, device=device)

        self._places = torch.arange(max_length, device=device)
        self._steps = torch.arange(steps, device=device)
        self._first_rows = torch.arange(batch, device=device).unsqueeze(1) * beams
        self._best_beams = torch.arange(self.candidates, device=device) < beams
        # What scores are divided by at each length, as Python computes it; 0 stands for no length, where none is used.
        penalties = [1.0] + [float(k) ** length_penalty for k in range(1, steps + 2)]
        self._penalties = torch.tensor(penalties, dtype=torch.float64, device=device).float()

    def advance(self, candidates: Candidates) -> None:
        """Takes the best continuations of every input, best first, `self.candidates` of them. Changes all in place."""
        new_length = self.length + 1
        step = self.length - self._prompt_length
        at_end = new_length >= self._max_length

        # The candidates with their histories; an index behind the end (in a step after it) writes nothing.
        sequences = _pick(self.running_sequences, candidates.beams)
        sequences = torch.where(self._places == self.length, candidates.tokens.unsqueeze(2), sequences)
        rows = (candidates.beams + self._first_rows).int()
        indices = _pick(self.running_indices, candidates.beams)
        indices = torch.where(self._steps == step, rows.unsqueeze(2), indices)
        ends = (candidates.tokens.unsqueeze(2) == self._eos).any(dim=2) | at_end

        # Those that go on.
        open_scores = candidates.scores + ends.float() * _NEVER
        chosen = open_scores.topk(self._beams, dim=1).indices
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
        kept = scores.topk(self._beams, dim=1).indices
        scores = scores.gather(1, kept)
        finished = torch.cat([self.finished, just_finished], dim=1).gather(1, kept)

        # Is there anything left that could become better than what is there?
        longest = self._early_stopping == "never" and self._length_penalty > 0.0
        steps = torch.full_like(step, self._max_length - self._prompt_length) if longest else step + 1
        hoped = self._per_length(running_scores[:, :1], steps)
        worst = torch.where(finished, scores.amin(dim=1, keepdim=True), _NEVER)
        improvable = self._improvable & (hoped > worst).any(dim=1, keepdim=True)
        over = ~improvable.any() | ends.all()
        if self._early_stopping is True:
            over = over | finished.all()

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
            (self.parents, parents),
            (self.length, new_length),
        )
        for old, new in changes:
            old.copy_(torch.where(self.done, old, new))
        self.done.logical_or_(over)

    def _per_length(self, scores: Tensor, steps: Tensor) -> Tensor:
        penalty = self._penalties.index_select(0, steps.clamp(0, self._penalties.shape[0] - 1).reshape(1))
        # A GPU divides by a number from the host, which the library's penalty is, by multiplying with its inverse.
        return scores * penalty.reciprocal() if scores.is_cuda else scores / penalty


def _pick(x: Tensor, beams: Tensor) -> Tensor:
    """[batch, n, ...] and [batch, k] -> [batch, k, ...]: those of the second dimension."""
    return x.gather(1, beams.unsqueeze(2).expand(-1, -1, x.shape[2]))
