"""Models that read several rows of tokens for each of their inputs: one for each codebook of a sound.

Codebooks are behind each other by some steps. A mask has what the model reads of each row at each position in place of
what was generated, or -1. With guidance, a model reads each input twice, the second time without its condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Inputs that say, [rows of tokens, max_length], what is read in place of what was generated.
DELAYS = ("decoder_delay_pattern_mask", "delay_pattern_mask")


class Codebooks(NamedTuple):
    """Which rows of a model rows of tokens are."""

    each: int = 1  # rows of tokens of an input
    copies: int = 1  # rows of the model of an input: first all inputs, and then all of them once more

    @classmethod
    def of(cls, model: Any, model_kwargs: Mapping[str, Any]) -> Codebooks:
        """Those of a model with these inputs."""
        if not any(isinstance(model_kwargs.get(name), Tensor) for name in DELAYS):
            return cls()
        scale = model_kwargs.get("guidance_scale")
        guided = scale is not None and scale > 1
        return cls(getattr(model, "decoder", model).num_codebooks, 2 if guided else 1)

    def rows(self, tokens: int) -> int:
        """Rows of the model for so many rows of tokens."""
        return tokens // self.each * self.copies

    def of_rows(self, numbers: Tensor) -> Tensor:
        """Of each row of the model, what is given for each row of tokens: the same for all codebooks of an input."""
        return numbers if self == PLAIN else numbers[:: self.each].repeat(self.copies)


# Each row of tokens is one of the model.
PLAIN = Codebooks()


def are_read(model: Any) -> bool:
    """Whether a model reads codebooks."""
    return hasattr(getattr(model, "decoder", model), "apply_delay_pattern_mask")


def without_nothing(mask: Tensor, stored: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A mask of a source, [rows, positions], with ones for rows that are masked altogether and whose K and V are zero:
    with guidance, the states of the second half are. Attention gives zero there, whatever it attends to.
    """
    empty = ~(mask != 0).any(dim=1)
    for keys, values in stored:
        if keys[empty].any() or values[empty].any():
            return mask
    return torch.where(empty.unsqueeze(1), torch.ones_like(mask), mask)
