"""The best token of each row, and whether another one is about as good, in one pass over the scores.

In torch, comparing the two best takes six passes over the vocabulary besides that of the argmax. Here everything is
read once, with the same result. Verifying drafted tokens does this for each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.ops import _library

# Scores of at least this magnitude represent masked tokens: libraries write -1e9 or the smallest number of the type.
MASKED = 1e8


def top_two(scores: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Returns the argmax of each row, and whether a second score is within `share` of the row's magnitude of the
    largest.

    Args:
        scores: [rows, vocabulary], of a floating type.
        share: fraction of the row's largest absolute score, not counting those of `MASKED` and more.

    Returns:
        [rows], int64, and [rows], bool. Of equal scores the first token wins. A NaN is the largest, and nothing is near
        it.
    """
    serves = scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.dim() == 2
    if not (serves and scores.shape[1] and is_available()):
        return reference(scores, share)
    tokens = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    is_near = torch.empty_like(tokens, dtype=torch.bool)
    torch.ops.fastgen.top_two_out(tokens, is_near, scores.contiguous(), MASKED, share)
    return tokens, is_near


def argmax_into(out: Tensor, scores: Tensor) -> Callable[[], object] | None:
    """Returns a function that writes the argmax of each row to `out`, [rows], int64; None without a kernel for these
    scores.

    In a recorded step it is faster than torch's argmax, which divides a row among torch's threads. Those would have to
    take the processors from the threads of the step.
    """
    serves = scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.dim() == 2
    if not (serves and scores.shape[1] and scores.is_contiguous() and out.is_contiguous() and is_available()):
        return None
    is_near = torch.empty(scores.shape[0], dtype=torch.bool, device=scores.device)
    return functools.partial(torch.ops.fastgen.top_two_out.default, out, is_near, scores, MASKED, 0.0)


def reference(scores: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`top_two` in plain torch."""
    best = scores.amax(dim=-1, keepdim=True)
    sizes = scores.abs()
    bound = share * sizes.masked_fill(sizes >= MASKED, 0.0).amax(dim=-1, keepdim=True)
    return scores.argmax(dim=-1), (scores >= best - bound).sum(dim=-1) > 1


is_available, backend = _library.asking("fastgen::top_two_out")
_library.define("top_two_out(Tensor(a!) tokens, Tensor(b!) is_near, Tensor scores, float masked, float share) -> ()")
