"""The logits and scores of a step in the library's loop: processors that work in place, and a sum that is put off.

N-gram processors and top-p run on FastGen's operators. A step of beam search adds the running score of each beam to all
of its continuations. Here, the loop gets a tensor that defers the addition until the best candidates are taken, where
both are one pass (`best_candidates`). For all other operations it acts as the tensor that it represents.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)

from fastgen import counters, patching
from fastgen.decoding.kv.view import METADATA
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.ops.search_step import MIN_SCORES, best_candidates, sorts, top_p_
from fastgen.optimizer.transformers.call import Call

_ENTRY_POINT = "transformers.no_repeat_ngram"
_MIN_LENGTH = "transformers.min_length"
_TOP_P = "transformers.top_p"
ENCODER_TOKENS = "_fastgen_encoder_tokens"


def no_repeat_ngram(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
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
    if isinstance(tokens, Tensor):
        setattr(processor, ENCODER_TOKENS, tokens.unsqueeze(0) if tokens.dim() == 1 else tokens)


def min_length(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
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


def _banned(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, list[int]] | None:
    """Returns the scores, and the columns to ban now; None if the original code does it."""
    input_ids, scores = _arguments(*args, **kwargs)
    ends = processor.eos_token_id
    if (
        not isinstance(ends, Tensor)
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


def top_p(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
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


def _sorted_fast(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the scores if the operator serves them; None for the original code."""
    _, scores = _arguments(*args, **kwargs)
    return scores if isinstance(scores, Tensor) and sorts(scores) else None


def _arguments(input_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return input_ids, scores


def _unsupported(tokens: Tensor, scores: Tensor) -> str | None:
    if tokens.dtype not in (torch.int32, torch.int64):
        return f"tokens of type {tokens.dtype}"
    if scores.requires_grad and torch.is_grad_enabled():
        return "gradients of the scores are wanted"
    if tokens.device != scores.device:
        return "tokens and scores on different devices"
    if not (tokens.dim() == scores.dim() == 2 and tokens.numel() and scores.shape[0] % tokens.shape[0] == 0):
        return f"tokens of shape {tuple(tokens.shape)} for scores of shape {tuple(scores.shape)}"
    return None


def _context_unsupported(context: Tensor | None, scores: Tensor) -> str | None:
    if context is None:
        return "the processor was made before FastGen was enabled"
    reason = _unsupported(context, scores)
    if reason is None and (context.min() < 0 or context.max() >= scores.shape[1]):
        reason = "the input has tokens outside the vocabulary of the scores"
    return reason


def _are_private() -> bool:
    call = Call.current()
    return call is not None and call.scores_are_private


# ---- the sum with the scores of beams


class LogProbabilities(Tensor):
    """Log-probabilities after the processors, [rows, vocabulary], to which running scores may have been added.

    Its data does not include the running scores, but has the shape of the sum. There are rules for some operations. For
    others, and if a rule returns None, the ordinary tensor is used.
    """

    _rules: ClassVar[dict[Any, Callable[..., Any]]]
    _running: Tensor | None = None

    @classmethod
    def of(cls, scores: Tensor, running: Tensor | None = None) -> LogProbabilities:
        """Wraps scores in the order [inputs, beams, vocabulary], of any shape, and addends [inputs, beams]."""
        made = scores.as_subclass(cls)
        made._running = running
        return made

    def plain(self) -> Tensor:
        """Returns the ordinary tensor that this one represents."""
        scores = self.as_subclass(Tensor)
        if self._running is None:
            return scores
        return (scores.reshape(*self._running.shape, -1) + self._running.unsqueeze(2)).reshape(scores.shape)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **kwargs)
            if args and isinstance(args[0], cls):
                rule = cls._rules.get(func)
                done = rule(*args, **kwargs) if rule is not None else None
                if done is not None:
                    return done
                if args[0]._running is not None and _writes(func):
                    raise RuntimeError(f"{func.__name__} writes into a sum of scores that has not been computed")
            args, kwargs = tree_map_only(LogProbabilities, LogProbabilities.plain, (args, kwargs))
            return func(*args, **kwargs)

    def _reshape(self, *shape: Any, **options: Any) -> Any:
        return LogProbabilities.of(self.as_subclass(Tensor).reshape(*shape, **options), self._running)

    def _add(self, running: Any, **options: Any) -> Any:
        if self._running is not None or not isinstance(running, Tensor) or running.dtype is not self.dtype or options:
            return None
        if self.dim() != 3 or running.shape != (*self.shape[:2], 1):
            return None
        return LogProbabilities.of(self.as_subclass(Tensor), running.squeeze(2))

    def _topk(self, k: int, *more: Any, **options: Any) -> Any:
        running = self._running
        if running is None or more or options or self.dim() != 2 or self.shape[0] != running.shape[0]:
            return None
        rows = self.as_subclass(Tensor).reshape(running.numel(), -1)
        return torch.return_types.topk(best_candidates(rows, running, k))

    _rules = {
        torch.reshape: _reshape,
        Tensor.reshape: _reshape,
        torch.add: _add,
        Tensor.add: _add,
        Tensor.__add__: _add,
        torch.topk: _topk,
        Tensor.topk: _topk,
    }


def _writes(func: Callable) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _pays(scores: Any) -> bool:
    return (
        type(scores) is Tensor
        and scores.dtype is torch.float32
        and scores.device.type == "cpu"
        and scores.numel() >= MIN_SCORES
        and not torch.is_grad_enabled()
    )


def process(wrapped: Any, processors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `LogitsProcessorList.__call__`, to whose result a beam search adds the running scores."""
    scores = wrapped(*args, **kwargs)
    call = Call.current()
    if call is None or not call.takes_best or not patching.is_active() or not _pays(scores):
        return scores
    return LogProbabilities.of(scores)
