"""Drafts by another model, on the sequences of the step that verifies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.speculation import speculative_search
from fastgen.optimizer.transformers.captured.key import Prompt
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.speculation.drafting import Drafting

# Parts besides the draft step, which has the same number as in the step that verifies.
_FIRST, _STORE, _ADVANCE = -1, -2, -3


class AssistantDrafting(Drafting):
    """Drafts with a KV cache of its own.

    The cache lacks K and V of the last drafted token, and of tokens that came without a draft. So the first step of a
    draft reads the last two tokens. If more are missing, earlier steps store them. The sequences are those of the step
    that verifies, to which `of` belongs.
    """

    def __init__(self, step: DecodeStep, prompt: Prompt, of: Drafting) -> None:
        super().__init__(step, prompt)
        self.drafted, self.draft_probabilities = of.drafted, of.draft_probabilities
        self.costs = of.costs
        self._back, self._back_length = self._buffers.position.beside(2), torch.zeros_like(self._cache_length)
        self._offset = torch.zeros_like(self.drafted)
        self._cache_back = self._cache_at(self._back, self._back_length)
        self._behind = 1  # maximum number of tokens before the last one that are not stored

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._behind = 1

    def propose(self, model: Any, count: int, threshold: float) -> Tensor:
        """Drafts at most `count` tokens per row, up to the first of less than `threshold`. Returns numbers, [rows]."""
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
        return speculative_search.confident(self._ratings[:, :drafted], counts, threshold) if threshold else counts

    def _all_doubt(self, drafted: int, threshold: float) -> bool:
        """Whether each unfinished row has a drafted token whose probability is less than `threshold`."""
        doubts = (self._ratings[:, :drafted] < threshold).any(dim=1)
        return bool((doubts | ~self.search.unfinished.view(-1)).all())

    def follow(self, has_drafted: bool) -> None:
        """Advances to the new ends of the sequences."""
        self._behind = 1 if has_drafted else self._behind + 1
        self._run_part(_ADVANCE, self._cache_back, self._advance)

    def _store(self, model: Any) -> Tensor:
        """Stores K and V of two tokens, from `_offset` (negative) after the last one on. Returns their logits."""
        self._back.position_table.copy_(self._buffers.position.position_table[:3] + self._offset)
        self._back_length.copy_(self._cache_length + self._offset)
        return self._logits(model, self._cache_back, self._offset, 2)
