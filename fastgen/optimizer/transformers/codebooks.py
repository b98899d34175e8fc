"""Models that read several rows of tokens per input: one for each codebook of the audio codec.

Each codebook is some steps later than the one before. A delay mask holds the token that the model reads at each
position in place of the generated one, or -1. With guidance, the model reads each input twice, the second time without
its condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Inputs with the delay mask, [rows of tokens, max_length].
DELAYS = ("decoder_delay_pattern_mask", "delay_pattern_mask")


class Codebooks(NamedTuple):
    """How rows of tokens map to rows of the model."""

    each: int = 1  # rows of tokens per input
    copies: int = 1  # rows of the model per input: all inputs, and with guidance all of them once more

    @classmethod
    def of(cls, model: Any, model_kwargs: Mapping[str, Any]) -> Codebooks:
        """Returns the mapping of a model that gets these inputs."""
        if not any(isinstance(model_kwargs.get(name), Tensor) for name in DELAYS):
            return cls()
        scale = model_kwargs.get("guidance_scale")
        guided = scale is not None and scale > 1
        return cls(getattr(model, "decoder", model).num_codebooks, 2 if guided else 1)

    def rows(self, tokens: int) -> int:
        """Returns the number of rows of the model for a number of rows of tokens."""
        return tokens // self.each * self.copies

    def of_rows(self, numbers: Tensor) -> Tensor:
        """Maps values of rows of tokens, equal in all codebooks of an input, to values of rows of the model."""
        return numbers if self == PLAIN else numbers[:: self.each].repeat(self.copies)


# Every row of tokens is a row of the model.
PLAIN = Codebooks()


def are_read(model: Any) -> bool:
    """Whether a model reads codebooks."""
    return hasattr(getattr(model, "decoder", model), "apply_delay_pattern_mask")


def without_nothing(mask: Tensor, stored: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns a mask of a source, [rows, positions], with ones in rows that are fully masked and have K and V of zeros,
    as the second half with guidance. Attention returns zero there, whatever it attends to.
    """
    empty = ~(mask != 0).any(dim=1)
    for keys, values in stored:
        if keys[empty].any() or values[empty].any():
            return mask
    return torch.where(empty.unsqueeze(1), torch.ones_like(mask), mask)
