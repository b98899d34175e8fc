"""Greedy search and sampling in buffers of fixed sizes: every row is continued for itself.

As in beam_search.py nothing waits for the device, and a step after the end changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.decoding.captured.sequences import SequenceBuffers


class RowSearch(SequenceBuffers):
    """The state of `batch` inputs with `per_input` sequences each.

    Attributes:
        sequences: [batch, per_input, prompt_capacity + new_capacity], int64: filled up to `length`.
        unfinished: [rows], bool: sequences that go on.
        parents: None: a row continues itself.

    The other attributes are those of `SequenceBuffers`.
    """

    parents = None

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
    ) -> None:
        """
        Args:
            samples: draw the tokens from their probabilities, instead of taking the most probable ones.
        """
        super().__init__(batch, per_input, prompt_capacity, new_capacity, device, eos)
        self._samples = samples
        self._has_eos = len(eos) > 0
        self.sequences = torch.zeros(batch, per_input, prompt_capacity + new_capacity, dtype=torch.int64, device=device)
        self.unfinished = torch.ones(batch * per_input, dtype=torch.bool, device=device)
        self._fill = torch.zeros((), dtype=torch.int64, device=device)
        self._is_spoilt = torch.zeros((), dtype=torch.bool, device=device)

    def begin(self, prompt: Tensor, new_tokens: int, *, fill: int = 0) -> None:
        """Starts a search. Arguments and errors are those of `BeamSearch.begin`."""
        self._begin(prompt, new_tokens, self.sequences, fill)
        self.unfinished.copy_(self._is_real.expand(-1, self._per_input).reshape(-1))
        self._fill.fill_(fill)
        self._is_spoilt.fill_(False)

    @property
    def running_tokens(self) -> Tensor:
        """[rows, prompt_capacity + new_capacity]: the sequences, for processors."""
        return self.sequences.flatten(0, 1)

    def propose(self, scores: Tensor, normalise: bool) -> tuple[Tensor]:
        """The largest of each row, or one that is drawn; behind the end of a sequence, what fills it up.

        With exponentially distributed e, the index with the largest p / e has the probabilities p: that is what
        `torch.multinomial` does as well, after looking at the probabilities on the host.
        """
        if self._samples:
            probabilities = torch.softmax(scores.float(), dim=-1)
            # One score that is not a number spoils its whole row.
            self._is_spoilt.logical_or_((probabilities[:, 0].isnan() & self.unfinished).any())
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        return (self._filled(scores.argmax(dim=-1)),)

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        rows = inputs * self._per_input
        return torch.cat([self.running_tokens[:rows, start:end], proposal[0][:rows].unsqueeze(1)], dim=1)

    def _filled(self, tokens: Tensor) -> Tensor:
        return torch.where(self.unfinished, tokens, self._fill) if self._has_eos else tokens

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        tokens = self._filled(proposal[0])
        new_length = self.length + 1
        written = torch.where(self._positions == self.length, tokens.view(self._batch, -1, 1), self.sequences)
        unfinished = self.unfinished & ~self.ends(tokens)
        if stops is not None:
            unfinished = unfinished & ~stops
        over = ~unfinished.any() | (new_length >= self.limit)
        for old, new in (
            (self.sequences, written),
            (self.unfinished, unfinished),
            (self.tokens, tokens),
            (self.length, new_length),
        ):
            old.copy_(torch.where(self.done, old, new))
        self.done.logical_or_(over)

    def results(self, inputs: int, count: int) -> Tensor:
        """The first `count` sequences of each of the first `inputs` inputs, [inputs * count, length].

        Waits for the device.

        Raises:
            ValueError: tokens were to be drawn from what is no probabilities.
        """
        if bool(self._is_spoilt):
            raise ValueError("probabilities to draw from are not numbers")
        return self.sequences[:inputs, :count, int(self.start) : int(self.length)].flatten(0, 1).clone()
