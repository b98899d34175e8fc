"""The best continuations of each input over all its beams: log-softmax, addition and top-k in one pass.

In torch, the first two each read and write everything, and the top-k copies everything once more, with its indices.
Here everything is read once. The result is torch's: of equal scores the same, in the same order, which depends on the
algorithm. That order is compared with torch's once, on scores with many ties. Only the last digits of a log-softmax may
differ, because its denominator is summed in another order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library, gpu

# With fewer scores, overhead outweighs the pass over the scores.
MIN_SCORES = 2**16
# With more candidates, the pass over the scores no longer dominates.
_MAX_COUNT = 256
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Candidates(NamedTuple):
    """The best continuations of every input, best first: each [batch, count]."""

    scores: Tensor  # accumulated log-probabilities, float32
    beams: Tensor  # the beam of the input that is continued, int64
    tokens: Tensor  # the token that continues it, int64


def best_candidates(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` best of `scores + running`, over the beams of each input.

    Args:
        scores: [inputs * beams, vocabulary], of a floating type.
        running: [inputs, beams], of the same type: added to the scores of each beam.
        count: from 1 to beams * vocabulary.

    Returns:
        What `torch.topk` returns for the sum: values, and indices in [inputs, beams * vocabulary], both [inputs,
        count].

    Raises:
        RuntimeError: shapes, types or `count` are not as above.
    """
    if not serves(scores, running, count) or scores.dtype is not running.dtype:
        return _reference(scores, running, count)
    values, beams, tokens = by_beam(scores, running, count)
    return values, tokens.add_(beams, alpha=scores.shape[1])


def serves(scores: Tensor, running: Tensor, count: int) -> bool:
    """Whether the kernel accepts these arguments."""
    return (
        count <= _MAX_COUNT
        and scores.dtype in _TYPES
        and running.dtype is torch.float32
        and scores.device.type == running.device.type == "cpu"
        and not (torch.is_grad_enabled() and (scores.requires_grad or running.requires_grad))
        and _orders_as_torch()
    )


def by_beam(scores: Tensor, running: Tensor, count: int, *, normalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As `best_candidates`, if `serves` is true. Returns values, beams and tokens, [inputs, count].

    Args:
        scores: [inputs * beams, vocabulary], float32, bfloat16 or float16; computation is in float32.
        running: [inputs, beams], float32.
        normalise: the scores are logits; take their log-softmax.

    Returns:
        float32, int64 and int64.
    """
    values = running.new_empty(len(running), count)
    beams, tokens = (torch.empty_like(values, dtype=torch.int64) for _ in range(2))
    torch.ops.fastgen.best_candidates_out(values, beams, tokens, scores.contiguous(), running.contiguous(), normalise)
    return values, beams, tokens


def best_continuations(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """Returns the `count` best continuations of each input over all its beams, on any device.

    Equal scores come in the order of torch.topk. On a GPU, where it promises none, the lower beam comes first, and
    within a beam the lower token; scores that differ before the softmax keep that order, even if they are equal after
    it.

    Args:
        scores: [rows, vocabulary], any floating type: logits, or, if processors have changed the log-probabilities,
            those, which must not be normalised.
        running: [batch, beams]: the accumulated scores of the beams; rows = batch * beams.
        count: from 1 to beams * vocabulary.
        normalise: take the log-softmax of `scores`.

    Raises:
        ValueError: shapes or `count` are not as above.
    """
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise ValueError(f"best_continuations: scores {tuple(scores.shape)} for running scores {tuple(running.shape)}")
    beams, vocabulary = running.shape[1], scores.shape[1]
    if not 1 <= count <= beams * vocabulary:
        raise ValueError(f"best_continuations: {count} of {beams} x {vocabulary} candidates")
    if gpu.available(scores, running):
        from fastgen.ops.gpu import best_candidates as on_gpu

        if on_gpu.serves(scores, running, count):
            return Candidates(*on_gpu.launch(scores, running, count, normalise))
    if serves(scores, running, count):
        return Candidates(*by_beam(scores, running, count, normalise=normalise))
    return reference(scores, running, count, normalise=normalise)


def reference(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """`best_continuations` in plain torch, for any device and type, with the ties of torch.topk."""
    vocabulary = scores.shape[1]
    accurate = torch.promote_types(scores.dtype, torch.float32)
    values = torch.log_softmax(scores, dim=-1, dtype=accurate) if normalise else scores.to(accurate)
    values = values.view(*running.shape, vocabulary) + running.unsqueeze(2)
    best, indices = values.flatten(1).topk(count)
    return Candidates(best, indices // vocabulary, indices % vocabulary)


@functools.cache
def _orders_as_torch() -> bool:
    """Whether there is a kernel that orders equal scores as torch does, which differs for few and for many."""
    if not _library.has_kernel("fastgen::best_candidates_out"):
        return False
    for vocabulary, count in ((8000, 12), (60, 12)):
        scores = (torch.arange(3 * vocabulary, device="cpu") * 7919 % 101 % 8).to(torch.float32).view(3, -1)
        running = scores.new_zeros(1, 3)
        _, beams, tokens = by_beam(scores, running, count)
        if not torch.equal(beams * vocabulary + tokens, _reference(scores, running, count)[1]):
            return False
    return True


def _reference(scores: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise RuntimeError("best_candidates: scores must be [inputs * beams, vocabulary] and running [inputs, beams]")
    values, indices = (scores.view(*running.shape, scores.shape[1]) + running.unsqueeze(2)).flatten(1).topk(count)
    return values, indices


backend = functools.partial(_library.backend, "fastgen::best_candidates_out")
_library.define(
    "best_candidates_out(Tensor(a!) values, Tensor(b!) beams, Tensor(c!) tokens, Tensor scores, Tensor running,"
    " bool normalise) -> ()"
)
