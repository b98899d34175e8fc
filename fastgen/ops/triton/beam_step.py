"""The step of beam search: the best continuations of the beams of every input.

    scores = log_softmax(logits) + running scores, over beams x vocabulary; the best of them

The scores are read once: every program finds the best of its part of a row together with its share of the denominator,
and a second launch, on the few that are left, adds what the parts lack.

On the CPU this is `fastgen.ops.best_candidates`, with the ties of torch.topk. torch.topk promises no order, and on a
GPU it may differ between two calls. There, of equal scores the one of the lower beam comes first, and of one beam
that of the lower token. So with ties at the end of what is kept, other candidates may be chosen than by torch.topk,
with the same scores. Scores that differ before the softmax are ordered by what they were then, even if they are equal
after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import best_candidates
from fastgen.ops import triton as package

# What a program reads: 32 numbers for each of 128 threads. The vocabulary of BART in 13 parts, for each of 128 rows, is
# six rounds on 132 multiprocessors with two programs each.
_BLOCK = 4096
# Candidates of an input that are looked at in the second launch, all in one block.
_MOST_CANDIDATES = 32768


class Candidates(NamedTuple):
    """The best continuations of every input, best first: each [batch, count]."""

    scores: Tensor  # accumulated log-probabilities, float32
    beams: Tensor  # which beam of the input is continued, int64
    tokens: Tensor  # with which token, int64


def best_continuations(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """The `count` best continuations of each input over all its beams, from 1 to beams * vocabulary.

    Args:
        scores: [rows, vocabulary], any floating type: logits, or, where processors have changed the log-probabilities,
            those, not to be normalised by a log-softmax.
        running: [batch, beams]: the accumulated scores of the beams; rows = batch * beams.

    Raises:
        ValueError: shapes or `count` are not as above.
    """
    if scores.dim() != 2 or running.dim() != 2 or scores.shape[0] != running.numel():
        raise ValueError(f"best_continuations: scores {tuple(scores.shape)} for running scores {tuple(running.shape)}")
    batch, beams = running.shape
    rows, vocabulary = scores.shape
    if not 1 <= count <= beams * vocabulary:
        raise ValueError(f"best_continuations: {count} of {beams} x {vocabulary} candidates")
    block = min(_BLOCK, max(package.power_of_two(vocabulary), 16))
    parts = -(-vocabulary // block)
    keep = min(count, block)
    candidates = package.power_of_two(beams) * package.power_of_two(parts * keep)
    if (
        scores.dtype not in package.KERNEL_TYPES
        or beams * vocabulary >= 2**31
        or candidates > _MOST_CANDIDATES
        or not package.available(scores, running)
    ):
        if best_candidates.serves(scores, running, count):
            return Candidates(*best_candidates.by_beam(scores, running, count, normalise=normalise))
        return reference(scores, running, count, normalise=normalise)
    from fastgen.ops.triton import _kernels as kernels

    part_best = scores.new_empty(rows * parts * keep, dtype=torch.int64)
    part_maximum = scores.new_empty(rows * parts, dtype=torch.float32)
    part_total = torch.empty_like(part_maximum)
    types = (torch.float32, torch.int64, torch.int64)
    out = Candidates(*(scores.new_empty(batch, count, dtype=dtype) for dtype in types))
    package.launch(
        kernels.best_of_parts,
        (rows, parts),
        (scores, part_best, part_maximum, part_total, vocabulary, *scores.stride()),
        KEEP=keep,
        PARTS=parts,
        BLOCK=block,
        NORMALISE=normalise,
        num_warps=4,
    )
    package.launch(
        kernels.best_of_beams,
        (batch,),
        (part_best, part_maximum, part_total, running.contiguous(), *out, vocabulary),
        BEAMS=beams,
        BLOCK_BEAMS=package.power_of_two(beams),
        KEEP=keep,
        CANDIDATES=parts * keep,
        BLOCK_CANDIDATES=package.power_of_two(parts * keep),
        PARTS=parts,
        BLOCK_PARTS=package.power_of_two(parts),
        WANTED=count,
        NORMALISE=normalise,
        # There is one program per input, so it should be quick: up to eight candidates for each of 512 threads.
        num_warps=min(max(candidates // 256, 1), 16),
    )
    return out


def reference(scores: Tensor, running: Tensor, count: int, *, normalise: bool = True) -> Candidates:
    """`best_continuations` in plain torch, for any device and type, with the ties of torch.topk."""
    vocabulary = scores.shape[1]
    accurate = torch.promote_types(scores.dtype, torch.float32)
    values = torch.log_softmax(scores, dim=-1, dtype=accurate) if normalise else scores.to(accurate)
    values = values.view(*running.shape, vocabulary) + running.unsqueeze(2)
    best, indices = values.flatten(1).topk(count)
    return Candidates(best, indices // vocabulary, indices % vocabulary)
