"""OpenAI's frequency and presence penalties for tokens that a result already has."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class CountPenalties(LogitsProcessor):
    """Lowers the score of a token for each time that it has been generated, and once if it has been.

    Args:
        frequency, presence: the amounts; negative ones raise scores.
        prompt: number of tokens that the sequences begin with, which do not count.
    """

    def __init__(self, frequency: float, presence: float, prompt: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
