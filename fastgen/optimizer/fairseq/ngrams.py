"""FairSeq's n-gram blocker on FastGen's operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen import counters, patching
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_

_ENTRY_POINT = "fairseq.no_repeat_ngram"
_SCORE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def no_repeat_ngram(wrapped: Any, blocker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `NGramRepeatBlock.forward(tokens, lprobs, bsz, beam_size, step)`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    return _block(wrapped, blocker, *args, **kwargs)


def _block(wrapped: Any, blocker: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    n = blocker.no_repeat_ngram_size
    reason = _unsupported(blocker, tokens, lprobs, bsz * beam_size, step)
    if reason is not None:
        counters.count_fallback(_ENTRY_POINT, reason)
        return wrapped(tokens, lprobs, bsz, beam_size, step)
    counters.count_accelerated(_ENTRY_POINT)
    # The library compares the n-grams so far with what the last columns of `tokens` hold, generated or not yet.
    return no_repeat_ngram_(lprobs, tokens, n, context=tokens[:, : step + 1])


def _unsupported(blocker: Any, tokens: Tensor, lprobs: Tensor, rows: int, step: int) -> str | None:
    if blocker.use_extension:
        return "FairSeq's own CUDA extension is there"
    if blocker.no_repeat_ngram_size < 2:
        return "n-grams of one token"
    if tokens.dtype not in (torch.int32, torch.int64) or lprobs.dtype not in _SCORE_TYPES:
        return f"tokens of type {tokens.dtype}, scores of type {lprobs.dtype}"
    if not (tokens.dim() == lprobs.dim() == 2 and tokens.shape[0] == lprobs.shape[0] == rows):
        return f"tokens of shape {tuple(tokens.shape)}, scores of shape {tuple(lprobs.shape)}"
    if tokens.shape[1] < max(step + 1, blocker.no_repeat_ngram_size) or tokens.device != lprobs.device:
        return "fewer tokens than steps, or another device"
    if lprobs.requires_grad and torch.is_grad_enabled():
        return "gradients of the scores are wanted"
    return None
