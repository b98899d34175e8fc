"""A search whose rows advance by several tokens at once, and which drafted tokens it accepts.

Each row takes its own number of drafted tokens, and the token after them. That the model chooses all of them, or that
they have its distribution, makes speculative decoding exact. All shapes are fixed and the host reads nothing, so that a
step which accepts tokens can be captured. Below, `k` is the number of tokens that a row has room for, and `counts` the
number that it has.

Random numbers are passed as tensors, as `random_numbers` draws them. A token is drawn by inversion: it is the first
token at which the cumulative sum of the probabilities exceeds a uniform number times their total. This takes one random
number per row. `torch.multinomial` takes one per token of the vocabulary, which is most of the time of a draw.

A forward pass over several tokens adds in another order than a pass over one. If the two best logits differ by less
than this changes, plain and speculative decoding may choose differently, and neither is wrong: `best_tokens` counts
these near-ties.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.interrupts import cached_property
from fastgen.ops import search_step
from fastgen.ops.search_step import top_two

# The largest error in units of the usual one. Measured with SmolLM2-135M (271 products) in float32, passes over 3 to 17
# tokens against passes over one: logits change by at most 26 epsilon * magnitude, the two best by 11; the root is 16.
_SAFETY = 4.0


class Progress(NamedTuple):
    """The state of a search as the host reads it, with one number for each row."""

    done: bool
    unfinished: list[bool]
    lengths: list[int]

    @property
    def rows(self) -> list[int]:
        """The unfinished rows."""
        return [row for row, goes_on in enumerate(self.unfinished) if goes_on]


class SpeculativeSearch(Search):
    """A search in which each row takes the accepted tokens of its draft, and the token after them.

    Drafted tokens are written after the ends of the running sequences, where code that reads the tokens so far finds
    them. `commit` leaves padding there.

    Args:
        width: the most tokens that a row takes at once.
        together: all unfinished rows take the same number of tokens, because the model has one position for all rows.
    """

    def __init__(self, *sizes: Any, width: int, together: bool, **options: Any) -> None:
        batch, per_input, prompt_capacity, new_capacity, *rest = sizes
        super().__init__(batch, per_input, prompt_capacity, new_capacity + width, *rest, **options)
        self._together = together

    def progress(self) -> Progress:
        """Returns the progress of the search. Waits for the device."""
        done, unfinished, lengths, _ = self._on_host
        return Progress(bool(done), unfinished.tolist(), lengths.tolist())

    def tokens_of(self, row: int, begin: int, end: int) -> list[int]:
        """Returns the tokens of a row between two positions. Waits for the device."""
        found: list[int] = self._on_host[3][row, begin:end].tolist()
        return found

    @cached_property
    def _on_host(self) -> tuple[Any, ...]:
        """The buffers that the host reads in each iteration; on a CPU as arrays, which takes a tenth of the time."""
        buffers = self.done, self.unfinished.view(-1), self.length.view(-1), self.running_tokens
        return tuple(buffer.numpy() for buffer in buffers) if self.done.device.type == "cpu" else buffers

    def following(self, first: Tensor | int, count: int) -> Tensor:
        """Returns [rows, count]: the tokens of each row from its last one on, skipping `first` of them.

        Negative numbers begin before the last token. Positions before the prompt get its first token.
        """
        at = self.length.view(-1, 1) - 1 + first + self._positions[:count]
        return self.running_tokens.gather(1, torch.maximum(at, self.start.view(-1, 1)))

    def draft(self, tokens: Tensor, ahead: Tensor) -> None:
        """Writes drafted tokens, [rows], after the `ahead` tokens that are already drafted."""
        self.running_tokens.scatter_(1, self.length.view(-1, 1) + ahead, tokens.unsqueeze(1))

    def cut(self, rows: Tensor, length: int) -> None:
        """Ends some rows, [rows], bool, at this length, and pads what comes after it."""
        self.taken.copy_(self._by_input(torch.where(rows, length - self.length.view(-1), 0)))
        self.length.add_(self.taken)
        is_behind = (self._positions >= length) & rows.unsqueeze(1)
        self.running_tokens.copy_(torch.where(is_behind, self._fill.unsqueeze(1), self.running_tokens))
        self.unfinished.logical_and_(~self._by_input(rows))
        self.done.logical_or_(~self.unfinished.any())

    def commit(
        self, chosen: Tensor, counts: Tensor | None, accepted: Tensor, near: Tensor | None, near_ties: Tensor
    ) -> None:
        """Continues with the first `accepted` + 1 of the tokens in `chosen`, up to an end token or the limit.

        Finished sequences do not change.

        Args:
            chosen: [rows, width], int64.
            counts: [rows], int64: how many tokens are drafted. If given, `accepted` is computed as in `accept_greedy`.
            accepted: [rows], int64.
            near, near_ties: [rows, width], bool, and an int64 scalar, to which those of the taken tokens are added.
        """
        if search_step.available(chosen):
            torch.ops.fastgen.commit_(
                chosen, counts, accepted, near, near_ties, self._eos, self._fill, self.limit, self.has_nan,
                self.running_sequences, self.tokens, self.length, self.taken, self.unfinished, self.done,
                self._together,
            )  # fmt: skip
            return
        width = chosen.shape[1]
        if counts is not None:
            accepted.copy_(accept_greedy(self.following(1, width - 1), chosen, counts))
        steps = self._positions[:width]
        ends = (chosen.unsqueeze(2) == self._eos).any(dim=2)
        # The number of tokens up to and including the first that ends the sequence.
        before_end = (ends.long().cumsum(dim=1) - ends.long() == 0).sum(dim=1)
        count = torch.minimum(accepted + 1, before_end)
        length, limit = self.length.view(-1), self.limit.view(-1)
        unfinished = self.unfinished.view(-1) & ~self.done
        count = torch.minimum(count, limit - length)
        if self._together:
            has_ended = (ends & (steps < count.unsqueeze(1))).any(dim=1)
            others = torch.where(unfinished & ~has_ended, count, width)
            count = torch.minimum(count, others.amin())
        count = torch.where(unfinished, count, 0)
        has_ended = (ends & (steps < count.unsqueeze(1))).any(dim=1) | (length + count >= limit)

        offset = self._positions - length.unsqueeze(1)
        written = chosen.gather(1, offset.clamp(0, width - 1))
        behind = torch.where(offset < count.unsqueeze(1), written, self._fill.unsqueeze(1))
        tokens = self.running_tokens
        tokens.copy_(torch.where(offset < 0, tokens, behind))
        if near is not None:
            near_ties.add_((near & (steps < count.unsqueeze(1))).sum())
        self.taken.copy_(self._by_input(count))
        self.length.add_(self.taken)
        self.tokens.copy_(self.following(0, 1).squeeze(1))
        self.unfinished.logical_and_(~self._by_input(has_ended))
        over = ~self.unfinished.any()
        self.done.logical_or_(over | self.has_nan if self._samples else over)


# ---- acceptance


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


def best_tokens(scores: Tensor, products: int) -> tuple[Tensor, Tensor]:
    """Returns the best token, and whether it is a near-tie: another score is nearer to its score than rounding.

    The bound is 4 * epsilon * sqrt(products) * magnitude, where magnitude is the largest absolute score, without masked
    ones. Each product on the way to the logits adds an error of about the spacing of its dtype, relative to the values.
    Errors of either sign add up like the root of their number. This is an estimate, not the worst case. Equal scores
    are near-ties as well.

    Args:
        scores: [..., vocabulary], floating point: the scores by which the token is chosen.
        products: linear layers, matrix products and attention on the way from one token to the next.

    Returns:
        [...], int64, and [...], bool.
    """
    share = torch.finfo(scores.dtype).eps * _SAFETY * math.sqrt(products)
    tokens, is_near = top_two(scores.flatten(0, -2), share)
    return tokens.view(scores.shape[:-1]), is_near.view(scores.shape[:-1])
