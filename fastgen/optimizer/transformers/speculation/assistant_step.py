"""The step of another model that drafts, on the sequences of the step that checks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fastgen.decoding.speculation import acceptance
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import Key, Prompt
from fastgen.optimizer.transformers.speculation.step import SpeculativeStep

# Parts besides that of a step, which is 0, as in the step that checks.
_FIRST, _STORE, _ADVANCE = -1, -2, -3


class AssistantStep(SpeculativeStep):
    """Drafts with a K/V cache of its own.

    Of a token that it has drafted last it has not stored K and V, nor of those that came without it. So the first step
    of a draft reads the last two tokens, and where there were more, steps before it store what is missing.

    Args:
        of: the step that checks. The sequences are one.
    """

    def __init__(
        self,
        key: Key,
        prompt: Prompt,
        processors: Sequence[CapturedProcessor] | None,
        sizes: Sizes,
        of: SpeculativeStep,
    ) -> None:
        super().__init__(key, prompt, processors, sizes)
        self.search, self._drafted, self._draft_probabilities = of.search, of._drafted, of._draft_probabilities
        self.costs = of.costs
        self._back = self._state.beside(2)
        self._back_seen = torch.zeros_like(self._seen)
        self._offset = torch.zeros_like(self._drafted)
        self._cache_back = self._cache_for(self._back, self._back_seen)
        self._behind = 1  # tokens in front of the last one of which nothing is stored, at the most

    def begin(self, *arguments: Any, **options: Any) -> None:
        super().begin(*arguments, **options)
        self._behind = 1

    def propose(self, model: Any, count: int, threshold: float) -> torch.Tensor:
        """Drafts so many tokens of each row, [rows], or fewer: up to the first that it gives less than `threshold`."""
        while self._behind > 1:
            self._offset.fill_(-self._behind)
            self._run_part(_STORE, self._cache_back, lambda: self._store(model))
            self._behind = max(self._behind - 2, 1)
        self._offset.fill_(-1)
        self._run_part(_FIRST, self._cache_back, lambda: self._draft_first(model))
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
        self._run_part(_ADVANCE, self._cache_back, self._advance_run)

    # ---- what is captured

    def _store(self, model: Any) -> torch.Tensor:
        """K and V of two tokens, from the last one on, of which there are `_offset` more: a negative number."""
        self._back.numbers.copy_(self._state.numbers[:3] + self._offset)
        self._back_seen.copy_(self._seen + self._offset)
        return self._forward(model, self._cache_back, self._offset, 2)

    def _draft_first(self, model: Any) -> None:
        self._choose_draft(self._store(model)[:, -1])
