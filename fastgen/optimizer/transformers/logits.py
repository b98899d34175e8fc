"""Logits processors that work in place: n-gram processors and top-p, on FastGen's operators, and minimum lengths."""

from __future__ import annotations

import operator
from typing import Any

import torch
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)

from fastgen import counters, patching
from fastgen.ops import search_step
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.ops.search_step import top_p_
from fastgen.optimizer.transformers.call import Call

_ENTRY_POINT = "transformers.no_repeat_ngram"
_MIN_LENGTH = "transformers.min_length"
_TOP_P = "transformers.top_p"
ENCODER_TOKENS = "_fastgen_encoder_tokens"


def no_repeat_ngram(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps `__call__(input_ids, scores)` of both n-gram processors."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    found = counters.decided(_ENTRY_POINT, _ngrams, processor, args, kwargs)
    if found is None:
        return wrapped(*args, **kwargs)
    counters.count_accelerated(_ENTRY_POINT)
    input_ids, scores, size, context = found
    return no_repeat_ngram_(scores, input_ids, size, context=context)


def _ngrams(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns tokens, scores to write into, size and context of an n-gram processor; None, after counting the reason,
    if it falls back to the original code.
    """
    input_ids, scores = _arguments(*args, **kwargs)
    context, reason = None, _unsupported(input_ids, scores)
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        context = getattr(processor, ENCODER_TOKENS, None)
        reason = reason or _context_unsupported(context, scores)
    if reason is not None:
        counters.count_fallback(_ENTRY_POINT, reason)
        return None
    # A processor must not change its input unless nobody else holds it.
    scores = scores if _are_private() else scores.clone()
    # Any size longer than the sequence bans nothing, so it may be clamped to what the operator's integers hold.
    size = min(operator.index(processor.ngram_size), input_ids.shape[1] + 2)
    return input_ids, scores, size, context if context is None else context.to(input_ids.dtype)


def remember_encoder_tokens(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps `EncoderNoRepeatNGramLogitsProcessor.__init__`: keeps the tokens besides the original's table."""
    wrapped(*args, **kwargs)
    tokens = kwargs.get("encoder_input_ids", args[-1] if args else None)
    if isinstance(tokens, torch.Tensor):
        setattr(processor, ENCODER_TOKENS, tokens.unsqueeze(0) if tokens.dim() == 1 else tokens)


def min_length(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps `__call__(input_ids, scores)` of the processors that ban end tokens up to a length.

    The original copies all scores twice, whether it bans the end or not.
    """
    is_ours = patching.is_active() and _are_private()
    found = counters.decided(_MIN_LENGTH, _banned, processor, args, kwargs) if is_ours else None
    if found is None:
        return wrapped(*args, **kwargs)
    scores, ends = found
    # Column by column: indexing with a tensor takes longer than the original's copies if scores are small.
    for end in ends:
        scores[..., end] = -float("inf")
    return scores


def _banned(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, list[int]] | None:
    """Returns the scores, and the columns to ban now; None if the original code does it."""
    input_ids, scores = _arguments(*args, **kwargs)
    ends = processor.eos_token_id
    if (
        not isinstance(ends, torch.Tensor)
        or scores.device.type != "cpu"  # on other devices, reading the tokens would synchronize
        or (scores.requires_grad and torch.is_grad_enabled())
    ):
        return None
    is_new = isinstance(processor, MinNewTokensLengthLogitsProcessor)
    skipped, least = (
        (processor.prompt_length_to_skip, processor.min_new_tokens) if is_new else (0, processor.min_length)
    )
    if input_ids.shape[-1] - skipped >= least:
        return scores, []
    return scores, [int(end) for end in ends.flatten().tolist() if 0 <= end < scores.shape[-1]]


def top_p(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps `TopPLogitsWarper.__call__(input_ids, scores)`."""
    call = Call.current() if patching.is_active() else None
    scores = None if call is None else counters.decided(_TOP_P, _sorted_fast, processor, args, kwargs)
    if call is None or scores is None:
        return wrapped(*args, **kwargs)
    counters.count_accelerated(_TOP_P)
    scores = scores if call.scores_are_private else scores.clone()
    share = torch.tensor([processor.top_p], dtype=torch.float64)
    least, is_exact = processor.min_tokens_to_keep, call.model.dtype is torch.float32
    return top_p_(scores, share, processor.filter_value, least, orders_as_torch=is_exact)


def _sorted_fast(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the scores if the operator serves them; None for the original code."""
    _, scores = _arguments(*args, **kwargs)
    return scores if isinstance(scores, torch.Tensor) and search_step.sorts(scores) else None


def _arguments(input_ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return input_ids, scores


def _unsupported(tokens: torch.Tensor, scores: torch.Tensor) -> str | None:
    if tokens.dtype not in (torch.int32, torch.int64):
        return f"tokens of type {tokens.dtype}"
    if scores.requires_grad and torch.is_grad_enabled():
        return "gradients of the scores are wanted"
    if tokens.device != scores.device:
        return "tokens and scores on different devices"
    if not (tokens.dim() == scores.dim() == 2 and tokens.numel() and scores.shape[0] % tokens.shape[0] == 0):
        return f"tokens of shape {tuple(tokens.shape)} for scores of shape {tuple(scores.shape)}"
    return None


def _context_unsupported(context: torch.Tensor | None, scores: torch.Tensor) -> str | None:
    if context is None:
        return "the processor was made before FastGen was enabled"
    reason = _unsupported(context, scores)
    if reason is None and (context.min() < 0 or context.max() >= scores.shape[1]):
        reason = "the input has tokens outside the vocabulary of the scores"
    return reason


def _are_private() -> bool:
    call = Call.current()
    return call is not None and call.scores_are_private
