"""Counts decisions that another order of sums may turn round.

A pass over several tokens adds up in another order than a pass over one. Where the two best logits are nearer to each
other than what this changes, plain and speculative decoding may choose differently, and neither is wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.ops.top_two import top_two

# The largest error in units of the usual one. Measured with SmolLM2-135M (271 products) in float32, passes over 3 to 17
# tokens against passes over one: logits change by 26 epsilon * magnitude at most, the two best by 11; the root is 16.
_SAFETY = 4.0


def best_tokens(scores: Tensor, products: int) -> tuple[Tensor, Tensor]:
    """The best token, and where its score is nearer to another one than rounding.

    The bound is 4 * epsilon * sqrt(products) * magnitude, where magnitude is the largest score in absolute terms,
    masked ones left out. Each product on the way to the logits adds an error of about the spacing of their type,
    relative to what passes through. Errors of either sign add up like the root of their number. This is an estimate,
    not the worst case. Scores that are equal are near-ties as well.

    Args:
        scores: [..., vocabulary], floating point: what the token is chosen by.
        products: linear layers, products of matrices and attention on the way from one token to the next.

    Returns:
        [...], int64, and [...], bool.
    """
    share = torch.finfo(scores.dtype).eps * _SAFETY * math.sqrt(products)
    tokens, is_near = top_two(scores.flatten(0, -2), share)
    return tokens.view(scores.shape[:-1]), is_near.view(scores.shape[:-1])
