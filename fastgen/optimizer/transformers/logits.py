"""Logits processors that run in place: the n-gram ones on FastGen's operator, and those that wait for a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastgen import counters, patching
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.optimizer.transformers.call import Call

_ENTRY_POINT = "transformers.no_repeat_ngram"
ENCODER_TOKENS = "_fastgen_encoder_tokens"


def no_repeat_ngram(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wrapper of `NoRepeatNGramLogitsProcessor.__call__(input_ids, scores)`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    input_ids, scores = _arguments(*args, **kwargs)
    reason = _unsupported(input_ids, scores)
    if reason is not None:
        counters.count_fallback(_ENTRY_POINT, reason)
        return wrapped(*args, **kwargs)
    counters.count_accelerated(_ENTRY_POINT)
    return no_repeat_ngram_(_writable(scores), input_ids, processor.ngram_size)


def remember_encoder_tokens(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `EncoderNoRepeatNGramLogitsProcessor.__init__`: keeps the tokens besides the original's table."""
    wrapped(*args, **kwargs)
    tokens = kwargs.get("encoder_input_ids", args[-1] if args else None)
    if isinstance(tokens, torch.Tensor):
        setattr(processor, ENCODER_TOKENS, tokens.unsqueeze(0) if tokens.dim() == 1 else tokens)


def encoder_no_repeat_ngram(
    wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Wrapper of `EncoderNoRepeatNGramLogitsProcessor.__call__(input_ids, scores)`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    input_ids, scores = _arguments(*args, **kwargs)
    encoder_tokens = getattr(processor, ENCODER_TOKENS, None)
    if encoder_tokens is None:
        reason: str | None = "the processor was made before FastGen was enabled"
    else:
        reason = _unsupported(input_ids, scores) or _unsupported(encoder_tokens, scores)
        if reason is None and (encoder_tokens.min() < 0 or encoder_tokens.max() >= scores.shape[1]):
            reason = "the input has tokens outside the vocabulary of the scores"
    if reason is not None:
        counters.count_fallback(_ENTRY_POINT, reason)
        return wrapped(*args, **kwargs)
    counters.count_accelerated(_ENTRY_POINT)
    return no_repeat_ngram_(
        _writable(scores), input_ids, processor.ngram_size, context=encoder_tokens.to(input_ids.dtype)
    )


def min_length(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wrapper of `MinLengthLogitsProcessor.__call__(input_ids, scores)`."""
    return _ban_end(wrapped, processor, args, kwargs, lambda length: length < processor.min_length)


def min_new_tokens(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wrapper of `MinNewTokensLengthLogitsProcessor.__call__(input_ids, scores)`."""
    return _ban_end(
        wrapped,
        processor,
        args,
        kwargs,
        lambda length: length - processor.prompt_length_to_skip < processor.min_new_tokens,
    )


def _ban_end(
    wrapped: Any,
    processor: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_due: Callable[[int], bool],
) -> torch.Tensor:
    """Bans the end tokens where that is due. The original copies all scores twice, whether it is or not."""
    input_ids, scores = _arguments(*args, **kwargs)
    ends = processor.eos_token_id
    call = Call.current()
    if (
        not patching.is_active()
        or call is None
        or not call.scores_are_private
        or not isinstance(ends, torch.Tensor)
        or scores.device.type != "cpu"  # elsewhere, looking at the tokens would wait for the device
        or (scores.requires_grad and torch.is_grad_enabled())
    ):
        return wrapped(*args, **kwargs)
    if is_due(input_ids.shape[-1]):
        # One column after the other: indexing with a tensor takes longer than the original's copies of small scores.
        for end in ends.flatten().tolist():
            if 0 <= end < scores.shape[-1]:
                scores[..., int(end)] = -float("inf")
    return scores


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


def _writable(scores: torch.Tensor) -> torch.Tensor:
    """The scores themselves where nobody else holds them, a copy otherwise: a processor must not change its input."""
    call = Call.current()
    return scores if call is not None and call.scores_are_private else scores.clone()
