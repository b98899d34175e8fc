"""The log-probabilities of a step in FairSeq's loop: NaN, repeated n-grams, the best continuations.

The loop searches all of them for NaN, and overwrites each: two passes over the vocabulary, and a mask of its size. NaN
is rare, and the sum shows it in a fraction of the time. `BeamSearch.step`, which the other searches also use, makes two
copies to add the scores of the sequences and to find the best.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen import counters, patching
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.ops.search_step import MIN_SCORES, best_candidates
from fastgen.optimizer.fairseq.call import Call, inside_call

_NGRAM_ENTRY_POINT = "fairseq.no_repeat_ngram"

# The functions that `x != y` may call.
_NOT_EQUAL = (Tensor.__ne__, Tensor.ne, torch.ne)


class LogProbabilities(Tensor):
    """Log-probabilities without NaN, as long as nobody writes to them: `x != x` is nowhere true.

    Results computed from them are ordinary tensors, and so is the mask. A write through that mask is skipped.
    """

    _version_without_nan = -1
    _nowhere: tuple[Tensor, int] | None = None  # the mask, and its version

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            scores = args[0] if args else None
            if func in _NOT_EQUAL and len(args) == 2 and scores is args[1] and not kwargs:
                if scores._version == scores._version_without_nan:
                    mask = torch.zeros(scores.shape, dtype=torch.bool)
                    scores._nowhere = mask, mask._version
                    return mask
            elif func is Tensor.__setitem__ and isinstance(scores, cls) and scores._nowhere is not None:
                mask, version = scores._nowhere
                if args[1] is mask and mask._version == version:
                    return None
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def without_nan(log_probs: Tensor) -> Tensor:
    """Returns the log-probabilities for the loop: unchanged if nothing is gained, or if they contain NaN."""
    if type(log_probs) is not Tensor or log_probs.device.type != "cpu" or log_probs.numel() < MIN_SCORES:
        return log_probs
    if torch.is_inference_mode_enabled() or log_probs.is_inference():
        return log_probs  # it has no version that would show a write
    if not log_probs.dtype.is_floating_point or log_probs.sum().isnan():
        return log_probs
    made = log_probs.as_subclass(LogProbabilities)
    made._version_without_nan = made._version
    return made


def no_repeat_ngram(wrapped: Any, blocker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `NGramRepeatBlock.forward(tokens, lprobs, bsz, beam_size, step)`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    blocked = counters.decided(_NGRAM_ENTRY_POINT, lambda: _block(blocker, *args, **kwargs))
    return wrapped(*args, **kwargs) if blocked is None else blocked


def _block(blocker: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor | None:
    """Blocks repeated n-grams in `lprobs` and returns it; returns None, and counts why, if nothing has been written."""
    n = blocker.no_repeat_ngram_size
    if blocker.use_extension:
        reason = "FairSeq's own CUDA extension is there"
    elif n < 2:
        reason = "n-grams of one token"
    elif tokens.shape[1] < max(step + 1, n) or lprobs.shape[0] != bsz * beam_size:
        reason = f"tokens of shape {tuple(tokens.shape)}, scores of shape {tuple(lprobs.shape)}"
    else:
        try:
            # The library compares the n-grams so far with the last columns of `tokens`, generated or not yet.
            no_repeat_ngram_(lprobs, tokens, n, context=tokens[:, : step + 1])
            counters.count_accelerated(_NGRAM_ENTRY_POINT)
            return lprobs
        except RuntimeError as error:  # the operator refuses them, and has written nothing
            reason = str(error).splitlines()[0]
    counters.count_fallback(_NGRAM_ENTRY_POINT, reason)
    return None


@inside_call
def step(
    call: Call,
    wrapped: Any,
    beam: Any,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
    candidate_multiple: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Wrapper of `BeamSearch.step`, in one pass over the scores of all words (`fastgen.ops.search_step`).

    Returns scores, words and sequences of the candidates, [sources, candidates] each, best first. fairseq-fixed sets
    their number for each sequence.
    """
    _, sequences, words = lprobs.shape
    if step == 0 or scores is None or lprobs.dtype is not torch.float32 or lprobs.device.type != "cpu":
        return NotImplemented
    count = min(candidate_multiple * sequences, sequences * words - 1)  # excludes padding from the candidates
    best, indices = best_candidates(lprobs.reshape(-1, words), scores[:, :, step - 1], count)
    return best, indices % words, indices // words
