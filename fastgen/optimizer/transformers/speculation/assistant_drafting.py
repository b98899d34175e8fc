"""Another model that drafts, on the sequences of the step that verifies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.speculation import acceptance
from fastgen.optimizer.transformers.captured.key import Prompt
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.speculation.drafting import Drafting

# Parts besides that of a step, which has the number that it has in the step that verifies.
_FIRST, _STORE, _ADVANCE = -1, -2, -3


class AssistantDrafting(Drafting):
    """Drafts with a KV cache of its own.

    Of a token that it has drafted last it has not stored K and V, nor of those that came without it. So the first step
    of a draft reads the last two tokens, and where there were more, steps before it store what is missing. The
    sequences are those of the step that verifies, which `of` belongs to.
    """

    def __init__(self, step: DecodeStep, prompt: Prompt, of: Drafting) -> None:
        super().__init__(step, prompt)
        self.drafted, self.draft_probabilities = of.drafted, of.draft_probabilities
        self.costs = of.costs
        self._back, self._back_length = self._buffers.position.beside(2), torch.zeros_like(self._cache_length)
        self._offset = torch.zeros_like(self.drafted)
        self._cache_back = self._cache_at(self._back, self._back_length)
        self._behind = 1  # tokens in front of the last one of which nothing is stored, at the most

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._behind = 1

    def propose(self, model: Any, count: int, threshold: float) -> Tensor:
        """Drafts so many tokens of each row, [rows], or fewer: up to the first that it gives less than `threshold`."""
        while self._behind > 1:
            self._offset.fill_(-self._behind)
            self._run_part(_STORE, self._cache_back, lambda: self._store(model))
            self._behind = max(self._behind - 2, 1)
        self._offset.fill_(-1)
        self._run_part(_FIRST, self._cache_back, lambda: self._choose_draft(self._store(model)[:, -1]))
        drafted = 1
        while drafted < count and not (threshold and self._all_doubt(drafted, threshold)):
            self.draft(model, nullcontext)
            drafted += 1
        counts = torch.full_like(self.search.length.view(-1), drafted)
        return acceptance.confident(self._ratings[:, :drafted], counts, threshold) if threshold else counts

    def _all_doubt(self, drafted: int, threshold: float) -> bool:
        """Whether each row that goes on has a drafted token that is given less than `threshold`."""
        doubts = (self._ratings[:, :drafted] < threshold).any(dim=1)
        return bool((doubts | ~self.search.unfinished.view(-1)).all())

    def follow(self, has_drafted: bool) -> None:
        """The sequences have gone on."""
        self._behind = 1 if has_drafted else self._behind + 1
        self._run_part(_ADVANCE, self._cache_back, self._advance)

    def _store(self, model: Any) -> Tensor:
        """K and V of two tokens, from the last one on, of which there are `_offset` more: a negative number."""
        self._back.position_table.copy_(self._buffers.position.position_table[:3] + self._offset)
        self._back_length.copy_(self._cache_length + self._offset)
        return self._logits(model, self._cache_back, self._offset, 2)
