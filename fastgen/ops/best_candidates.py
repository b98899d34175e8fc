"""The best continuations of each input over all its beams: an addition and a top-k in one pass over the scores.

In torch, the addition reads and writes everything, and the top-k copies everything once more, with its indices. Here
everything is read once. The operator is float32 only. It gives what torch gives, ties included: where equal scores
leave open which comes first, torch itself is asked.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastgen.ops import _library

# Below, a pass over the scores takes less time than what is around it.
MIN_SCORES = 2**16
# With more candidates than that a pass over the scores is no longer what takes the time.
_MAX_COUNT = 256


def best_candidates(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of `scores + running`, over the beams of each input.

    Args:
        scores: [inputs * beams, vocabulary], of a floating type.
        running: [inputs, beams], of the same type: what is added to the scores of each beam.
        count: from 1 to beams * vocabulary.

    Returns:
        What `torch.topk` gives for the sum: values, and indices in [inputs, beams * vocabulary], both [inputs, count].

    Raises:
        RuntimeError: shapes, types or `count` are not as above.
    """
    if (
        count <= _MAX_COUNT
        and scores.dtype is running.dtype is torch.float32
        and scores.device.type == running.device.type == "cpu"
        and not (torch.is_grad_enabled() and (scores.requires_grad or running.requires_grad))
    ):
        values, indices = torch.ops.fastgen.best_candidates(scores.contiguous(), running.contiguous(), count)
        if indices.numel():
            return values, indices
    return _reference(scores, running, count)


def _reference(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise RuntimeError("best_candidates: scores must be [inputs * beams, vocabulary] and running [inputs, beams]")
    values, indices = (scores.view(*running.shape, scores.shape[1]) + running.unsqueeze(2)).flatten(1).topk(count)
    return values, indices


backend = partial(_library.backend, "fastgen::best_candidates")
_library.define("best_candidates(Tensor scores, Tensor running, int count) -> (Tensor, Tensor)", _reference)
