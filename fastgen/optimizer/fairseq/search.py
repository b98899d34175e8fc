"""The best continuations of a step, in one pass over the scores of all words (`fastgen.ops.best_candidates`).

`BeamSearch.step` adds the score of each sequence to those of all words behind it, which takes a copy of them, and a
top-k takes another one. The other searches use it for what they have in common with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.ops.best_candidates import best_candidates
from fastgen.optimizer.fairseq.call import Call


def step(wrapped: Any, beam: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `BeamSearch.step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)`.

    In fairseq-fixed it also takes how many candidates there are for each sequence, `candidate_multiple`.
    """
    found = _step(*args, **kwargs) if Call.current() is not None else None
    return wrapped(*args, **kwargs) if found is None else found


def _step(
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
    candidate_multiple: int = 2,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Scores, words and sequences of the candidates, [sources, candidates] each, the best first; None if not here."""
    _, sequences, words = lprobs.shape
    if step == 0 or lprobs.dtype is not torch.float32 or lprobs.device.type != "cpu":
        return None
    count = min(candidate_multiple * sequences, sequences * words - 1)  # so that padding is never among them
    best, places = best_candidates(lprobs.reshape(-1, words), scores[:, :, step - 1], count)
    return best, places % words, places // words
