"""Counts decisions that another order of sums may turn round.

A pass over several tokens adds up in another order than a pass over one. Where the two best logits are nearer to each
other than what this changes, plain and speculative decoding may choose differently, and neither is wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Scores at least this large stand for what is masked: libraries write -1e9 or the smallest number of the type.
_MASKED = 1e8
# The largest error in units of the usual one. Measured with SmolLM2-135M (271 products) in float32, passes over 3 to 17
# tokens against passes over one: logits change by 26 epsilon * magnitude at most, the two best by 11; the root is 16.
_SAFETY = 4.0


def near_ties(scores: Tensor, products: int, magnitude: Tensor | None = None) -> Tensor:
    """Where the best score is nearer to another one than rounding.

    The bound is 4 * epsilon * sqrt(products) * magnitude. Each product on the way to the logits adds an error of about
    the spacing of their type, relative to what passes through. Errors of either sign add up like the root of their
    number. This is an estimate, not the worst case. Scores that are equal are near-ties as well.

    Args:
        scores: [..., vocabulary], floating point: what the token is chosen by.
        products: linear layers, products of matrices and attention on the way from one token to the next.
        magnitude: [...]: the largest logit, in absolute terms and in units of `scores`, where some were masked since
            then. Without it that of `scores`, masked ones left out.

    Returns:
        [...], bool.
    """
    best = scores.amax(dim=-1, keepdim=True)
    if magnitude is None:
        sizes = scores.abs()
        magnitude = sizes.masked_fill(sizes >= _MASKED, 0.0).amax(dim=-1)
    bound = torch.finfo(scores.dtype).eps * _SAFETY * math.sqrt(products) * magnitude.unsqueeze(-1)
    return (scores >= best - bound).sum(dim=-1) > 1
