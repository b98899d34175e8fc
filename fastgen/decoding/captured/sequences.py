"""What every captured search has: sequences in buffers, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Stands in front of a prompt that is shorter than its part of the buffer: no token.
NOTHING = -1


class SequenceBuffers:
    """The part of a search's state that does not depend on how continuations are chosen.

    The buffers of the sequences have prompt_capacity + new_capacity positions. A prompt is at the end of its part, so
    that what is generated begins at the same place whatever the prompt's length.

    Attributes:
        prompt_capacity, new_capacity: positions for the prompt and for what is generated.
        tokens: [rows], int64: what each row is continued with.
        start, prompt, length, limit: one int64 each, positions of the buffers: where the sequences begin, where their
            prompt ends, up to where they are filled, and how far they may go.
        done: one bool: the search is over.
    """

    def __init__(
        self,
        batch: int,
        per_input: int,
        prompt_capacity: int,
        new_capacity: int,
        device: torch.device,
        eos: Sequence[int],
    ) -> None:
        self._batch, self._per_input = batch, per_input
        self.prompt_capacity, self.new_capacity = prompt_capacity, new_capacity
        self._eos = torch.tensor(list(eos), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(batch * per_input, dtype=torch.int64, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        self.prompt = torch.full((), prompt_capacity, dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.limit = torch.zeros((), dtype=torch.int64, device=device)
        self.done = torch.zeros((), dtype=torch.bool, device=device)
        # Inputs that are there; the others fill the batch up.
        self._is_real = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._positions = torch.arange(prompt_capacity + new_capacity, device=device)

    def ends(self, tokens: Tensor) -> Tensor:
        """Which tokens end a sequence, in the shape of `tokens`."""
        return (tokens.unsqueeze(-1) == self._eos).any(dim=-1)

    def propose(self, scores: Tensor, normalise: bool) -> tuple[Tensor, ...]:
        """The continuations of a step that it is decided on next (`take`).

        Args:
            scores: [rows, vocabulary], logits, or with `normalise=False` what was made of them.
        """
        raise NotImplementedError

    def take(self, proposal: tuple[Tensor, ...], stops: Tensor | None = None) -> None:
        """Goes on with the continuations that were proposed. Changes all in place.

        Args:
            stops: one bool per continuation: this one ends, whatever its token is.
        """
        raise NotImplementedError

    def proposed(self, proposal: tuple[Tensor, ...], inputs: int, start: int, end: int) -> Tensor:
        """The sequences that are proposed for the first `inputs` inputs, for the host.

        Args:
            start, end: of the sequences up to now in their buffers, as the host knows them.

        Returns:
            [inputs * continuations of each, end - start + 1]
        """
        raise NotImplementedError

    def choose(self, scores: Tensor, normalise: bool) -> None:
        """A step's choice from the scores, which are those of `propose`."""
        self.take(self.propose(scores, normalise))

    def take_over(self, other: SequenceBuffers) -> None:
        """Goes on where `other`, a search of the same kind and size, is."""
        for name, buffer in vars(self).items():
            if isinstance(buffer, Tensor):
                buffer.copy_(getattr(other, name))

    def _begin(self, prompt: Tensor, new_tokens: int, sequences: Tensor, fill: int) -> None:
        """Fills [batch, per_input, prompt_capacity + new_capacity] with the prompts, and sets the positions."""
        inputs, width = prompt.shape
        if new_tokens < 1:
            raise ValueError("there is nothing to generate: the prompt is as long as the sequences may become")
        if inputs > self._batch or width > self.prompt_capacity or new_tokens > self.new_capacity:
            raise ValueError(
                f"{inputs} prompts of {width} and {new_tokens} new tokens into buffers for {self._batch} prompts of "
                f"{self.prompt_capacity} and {self.new_capacity} new tokens"
            )
        start = self.prompt_capacity - width
        sequences.fill_(fill)
        sequences[:, :, :start] = NOTHING
        sequences[:inputs, :, start : self.prompt_capacity] = prompt.unsqueeze(1)
        self.tokens.copy_(sequences[:, :, self.prompt_capacity - 1].reshape(-1).clamp(min=0))
        self.start.fill_(start)
        self.length.fill_(self.prompt_capacity)
        self.limit.fill_(self.prompt_capacity + new_tokens)
        self.done.fill_(False)
        self._is_real.copy_((torch.arange(self._batch, device=prompt.device) < inputs).unsqueeze(1))
