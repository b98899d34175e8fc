"""Launches the kernels of `fastgen.ops.best_candidates` on a GPU.

The scores are read once: every program finds the best of its part of a row and its share of the denominator. A second
launch, on the few candidates that are left, combines the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import gpu

# Scores that a program reads: 32 for each of 128 threads. The vocabulary of BART in 13 parts, for each of 128 rows, is
# six waves on 132 multiprocessors with two programs each.
_BLOCK = 4096
# Candidates of an input that the second launch examines, all in one block.
_MOST_CANDIDATES = 32768


class _Sizes(NamedTuple):
    block: int  # scores of a row that a program reads
    parts: int  # programs of a row
    keep: int  # candidates that each program keeps
    candidates: int  # candidates of an input in the second launch

    @staticmethod
    def of(beams: int, vocabulary: int, count: int) -> _Sizes:
        block = min(_BLOCK, max(gpu.power_of_two(vocabulary), 16))
        parts = -(-vocabulary // block)
        keep = min(count, block)
        return _Sizes(block, parts, keep, gpu.power_of_two(beams) * gpu.power_of_two(parts * keep))


def serves(scores: Tensor, running: Tensor, count: int) -> bool:
    """Whether the kernels accept these arguments of `best_continuations`."""
    beams, vocabulary = running.shape[1], scores.shape[1]
    few = beams * vocabulary < 2**31 and _Sizes.of(beams, vocabulary, count).candidates <= _MOST_CANDIDATES
    return few and scores.dtype in gpu.KERNEL_TYPES


def launch(scores: Tensor, running: Tensor, count: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernels; returns the scores, beams and tokens of `best_continuations`."""
    from fastgen.ops.gpu import _kernels as kernels

    (batch, beams), (rows, vocabulary) = running.shape, scores.shape
    block, parts, keep, candidates = _Sizes.of(beams, vocabulary, count)
    part_best = scores.new_empty(rows * parts * keep, dtype=torch.int64)
    part_maximum = scores.new_empty(rows * parts, dtype=torch.float32)
    part_total = torch.empty_like(part_maximum)
    best = scores.new_empty(batch, count, dtype=torch.float32)
    out = best, torch.empty_like(best, dtype=torch.int64), torch.empty_like(best, dtype=torch.int64)
    gpu.launch(
        kernels.best_of_parts,
        (rows, parts),
        (scores, part_best, part_maximum, part_total, vocabulary, *scores.stride()),
        KEEP=keep,
        PARTS=parts,
        BLOCK=block,
        NORMALISE=normalise,
        num_warps=4,
    )
    gpu.launch(
        kernels.best_of_beams,
        (batch,),
        (part_best, part_maximum, part_total, running.contiguous(), *out, vocabulary),
        BEAMS=beams,
        BLOCK_BEAMS=gpu.power_of_two(beams),
        KEEP=keep,
        CANDIDATES=parts * keep,
        BLOCK_CANDIDATES=gpu.power_of_two(parts * keep),
        PARTS=parts,
        BLOCK_PARTS=gpu.power_of_two(parts),
        WANTED=count,
        NORMALISE=normalise,
        # There is one program per input, so it should be quick: up to eight candidates for each of 512 threads.
        num_warps=min(max(candidates // 256, 1), 16),
    )
    return out
