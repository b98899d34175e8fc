"""Which drafted tokens are accepted, and which token follows them: the part that makes speculative decoding exact.

All shapes are fixed and the host reads nothing, so that a step which accepts tokens can be captured. Every row accepts
its own number of tokens. `k` is the number of tokens that a row has room for, and `counts` the number that it has.

Random numbers are passed as tensors, as `random_numbers` draws them. A token is drawn by inversion: it is the first
token at which the cumulative sum of the probabilities exceeds a uniform number times their total. This takes one random
number per row. `torch.multinomial` takes one per token of the vocabulary, which is most of the time of a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_greedy(drafted: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Returns how many drafted tokens equal the model's own choice, up to the first that does not.

    The model's choice may be the most probable token, or one that was drawn for each position. Accepted tokens always
    are the model's own choice. With the random numbers of plain sampling, the tokens are those of plain sampling. A
    draft that draws with the same numbers often agrees (Daliri, Musco and Suresh, "Coupling without communication and
    drafter-invariant speculative decoding", arXiv 2408.07978).

    Args:
        drafted: [rows, k], int64.
        chosen: [rows, k + 1], int64: the model's choice for each drafted token, and for the token after the last one.
        counts: [rows], int64: how many tokens of each row are drafted, 0 to k.

    Returns:
        [rows], int64: 0 to `counts`. The token that follows is `chosen` at this position.
    """
    return _accepted(drafted == chosen[:, :-1], counts)


def accept_sampled(
    drafted: Tensor,
    draft_probabilities: Tensor | None,
    target_probabilities: Tensor,
    counts: Tensor,
    uniform: Tensor,
    following: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: the tokens have the distribution of sampling from the model alone.

    A token x is kept with probability min(1, p(x) / q(x)). The first token that is not kept is replaced by one drawn
    from max(p - q, 0). If all are kept, another token is drawn from p. (Leviathan, Kalman and Matias, "Fast inference
    from transformers via speculative decoding", ICML 2023, arXiv 2211.17192, section 2.3, Algorithm 1 and appendix A.1;
    Chen et al., arXiv 2302.01318, Algorithm 2.)

    This holds for the q that the drafted tokens were really drawn from, after temperature, top-k and all other
    processing. A draft that always takes its most probable token has q = 1 there, whatever its softmax says: pass None.

    The remaining error is the rounding of p and q, and of uniform numbers to 24 bits: about 1e-7 of each probability. A
    token with p = 0 is never kept and never drawn.

    Args:
        drafted: [rows, k], int64. Tokens after `counts` are not used, but must be in the vocabulary.
        draft_probabilities: q: [rows, k, vocabulary], or None if the draft leaves nothing to chance.
        target_probabilities: p: [rows, k + 1, vocabulary], floating point; each adds up to one, without NaN.
        counts: [rows], int64: how many tokens of each row are drafted, 0 to k.
        uniform: [rows, k], float32, in [0, 1).
        following: [rows], float64, in [0, 1): draws the token after the kept ones.

    Returns:
        How many tokens are kept, [rows], and the token after them, [rows]; both int64.
    """
    k = drafted.shape[1]
    tokens = drafted.unsqueeze(2)
    p = target_probabilities[:, :k].gather(2, tokens).squeeze(2).float()
    # u < p / q without the division: always keeps a token with q = 0 and p > 0, and never one with p = 0.
    if draft_probabilities is None:
        kept = uniform < p
    else:
        kept = uniform * draft_probabilities.gather(2, tokens).squeeze(2).float() < p
    accepted = _accepted(kept, counts)

    target = _at(target_probabilities, accepted).float()
    if k == 0:
        return accepted, draw(target, following)
    last = accepted.clamp(max=k - 1)
    is_rejected = (accepted < counts).unsqueeze(1)
    if draft_probabilities is None:
        draft = torch.zeros_like(target).scatter(1, drafted.gather(1, last.unsqueeze(1)), 1.0)
    else:
        draft = _at(draft_probabilities, last).float()
    left = (target - draft * is_rejected).clamp(min=0)
    # If p and q only differ by rounding, a rejection may leave no probability. As both are then equal, p is drawn from.
    return accepted, draw(torch.where((left > 0).any(dim=1, keepdim=True), left, target), following)


def confident(probabilities: Tensor, counts: Tensor, threshold: float) -> Tensor:
    """Returns `counts` for a draft that ends with the first token of less than `threshold`, which is still drafted.

    This is Transformers' `assistant_confidence_threshold`. The draft alone decides where to stop, not the model, so the
    accepted tokens stay exact.

    Args:
        probabilities: [rows, k]: the draft's probability of each of its tokens.
        counts: [rows], int64: how many tokens of each row are drafted, 0 to k.

    Returns:
        [rows], int64.
    """
    return torch.minimum(counts, _accepted(probabilities >= threshold, counts) + 1)


def random_numbers(rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns `uniform`, [rows, k], and `following`, [rows], for `accept_sampled`."""
    uniform = torch.rand(rows, k, dtype=torch.float32, device=device)
    return uniform, torch.rand(rows, dtype=torch.float64, device=device)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token of each row, [rows], with probabilities in proportion to `weights`, [rows, vocabulary].

    Args:
        uniform: [rows], float64, in [0, 1).
    """
    sums = weights.double().cumsum(dim=1)
    # Less than the last sum, even if rounded. A token of zero weight has the same sum as the token before it.
    wanted = uniform.unsqueeze(1) * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)  # any token if the weights are NaN


def _accepted(kept: Tensor, counts: Tensor) -> Tensor:
    """Returns the number of tokens before the first one that is not kept or not drafted."""
    positions = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (positions < counts.unsqueeze(1))).long().cumprod(dim=1).sum(dim=1)


def _at(probabilities: Tensor, positions: Tensor) -> Tensor:
    """Returns [rows, vocabulary]: the probabilities at one position of each row."""
    rows, count, vocabulary = probabilities.shape
    first = torch.arange(rows, device=positions.device) * count
    return probabilities.reshape(rows * count, vocabulary).index_select(0, first + positions)
