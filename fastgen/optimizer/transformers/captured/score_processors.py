"""Logits processors that look at the scores alone: the library's own objects, and those of sampling, rewritten.

What `rewritten_processors` says of captured steps holds here, too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.top_p import EVERYTHING, top_p_
from fastgen.optimizer.transformers.captured.processor_data import Bucket, Number
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens


class _OfScores(CapturedProcessor):
    reads_scores_alone = is_of_any_rows = True


class Library(_OfScores):
    """The library's own processor: it looks at nothing but the scores, and its operations can be captured.

    Args:
        frozen: its attributes.
        names: of attributes that are numbers of each call.
    """

    # Not the mass of typical sampling: that sorts the whole vocabulary of each row, which takes longer than a row's
    # share of a step.
    NEUTRAL = {"temperature": 1.0, "min_p": 0.0, "epsilon": 0.0}

    def __init__(self, bucket: Bucket, kind: type, frozen: tuple[tuple[str, Any], ...], names: tuple[str, ...]) -> None:
        self._processor: Any = object.__new__(kind)
        self._processor.__dict__.update(frozen, **{name: Number(bucket) for name in names})
        self._names = names

    @property
    def numbers(self) -> list[Number]:
        return [self._processor.__dict__[name] for name in self._names]

    def of_batch(self, batch: int) -> CapturedProcessor:
        other = copy.copy(self)
        other._processor = copy.copy(self._processor)
        numbers = zip(self._names, self.numbers, strict=True)
        other._processor.__dict__.update({name: number.of_batch(batch) for name, number in numbers})
        return other

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return self._processor(step.tokens, scores)


class TopK(_OfScores):
    """Fan et al., "Hierarchical Neural Story Generation" (2018), section 5.1: a number of tokens up to `room`."""

    ALL = 0  # in the place of the number
    neutral = (ALL,)

    def __init__(self, bucket: Bucket, room: int, filter_value: float) -> None:
        self._room, self._filter_value = room, filter_value
        self._kept = Number(bucket, torch.int64)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        best = scores.topk(min(self._room, scores.shape[1])).values
        kept = self._kept.values
        last = (kept - 1).clamp(0, best.shape[1] - 1).expand(len(scores), 1)
        goes = (scores < best.gather(1, last)) & (kept != self.ALL)
        return scores.masked_fill(goes, self._filter_value)


class TopP(_OfScores):
    """Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1. On the CPU."""

    neutral = (EVERYTHING,)

    def __init__(self, bucket: Bucket, filter_value: float, least: int) -> None:
        self._share = Number(bucket)
        self._filter_value, self._least, self._orders_as_torch = filter_value, least, bucket.is_float32

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        kept = self._filter_value, self._least
        return top_p_(scores, self._share.values, *kept, orders_as_torch=self._orders_as_torch)
