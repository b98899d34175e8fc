"""The largest scores among the positions that a sequence has stored, in a buffer with room for more, on the CPU.

Of equal scores, `torch.topk` selects some, depending on the number of scores. The scores of an indexer are sums of
rectified products, so that zeros are frequent (DeepSeek-V3.2, 2025, section 2.1). Here only the scores of stored
positions are compared, as without further room, so that the same ones are selected. A recorded graph calls this as one
operator, because their number changes from step to step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library

# Scores below this are masked: by -inf, or by the smallest number of a type, to which a score has been added.
_MASKED = -3e4  # the smallest float16 is -65504


def stored_topk(scores: Tensor, firsts: Tensor, k: int) -> Tensor:
    """Returns the indices of the k largest scores, [rows, queries, k], int64, as `torch.topk` selects them.

    Scores from the first stored position to the last one that is not masked are compared. If there are fewer than k,
    the remaining indices repeat one.

    Args:
        scores: [rows, queries, positions], of which k at most; those of positions to come are masked.
        firsts: [rows], the first stored position of each row.
    """
    found: Tensor = torch.ops.fastgen.stored_topk.default(scores, firsts, k)
    return found


def _reference(scores: Tensor, firsts: Tensor, k: int) -> Tensor:
    found = scores.new_zeros(*scores.shape[:2], k, dtype=torch.int64)
    positions = torch.arange(1, scores.shape[2] + 1, device=scores.device)
    ends = torch.where(scores > _MASKED, positions, 0).amax(dim=2)
    ranges = torch.stack([firsts.unsqueeze(1).expand_as(ends), ends], dim=2).flatten(0, 1)
    flat, of_rows = scores.flatten(0, 1), found.flatten(0, 1)
    for first, end in ranges.unique(dim=0).tolist():
        if end <= first:  # a row that does not count
            continue
        here = (ranges == torch.tensor([first, end], device=ranges.device)).all(dim=1)
        indices = flat[here, first:end].topk(min(k, end - first)).indices + first
        of_rows[here] = torch.cat([indices, indices[:, :1].expand(-1, k - indices.shape[1])], dim=1)
    return found


def _fake(scores: Tensor, firsts: Tensor, k: int) -> Tensor:
    return scores.new_empty(*scores.shape[:2], k, dtype=torch.int64)


_library.define("stored_topk(Tensor scores, Tensor firsts, int k) -> Tensor", _reference, _fake)
