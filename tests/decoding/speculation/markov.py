"""Tiny models given as tables, continued with drafts, and a test of the distribution that comes out.

The next token depends on the two tokens before it. All sequences are rows of one batch, so that rows are at different
places and accept different numbers of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.decoding.speculation.acceptance import accept_greedy, accept_sampled, random_numbers

Warp = Callable[[Tensor, Tensor], Tensor]


class Markov:
    """A model: logits [vocabulary, vocabulary, vocabulary] of the next token, by the two before it.

    Args:
        warp: from the tokens so far, [rows, 2] (the last two), and logits, [rows, vocabulary], to logits.
    """

    def __init__(self, logits: Tensor, warp: Warp) -> None:
        self.vocabulary = logits.shape[0]
        contexts = torch.cartesian_prod(*2 * [torch.arange(self.vocabulary)])
        # [vocabulary ** 2, vocabulary]: as the model has them, and as they are sampled from.
        self.scores = logits.flatten(0, 1)
        self.warped = torch.softmax(warp(contexts, self.scores), dim=-1)
        self.exact = torch.softmax(warp(contexts, self.scores.double()), dim=-1)

    def of(self, table: Tensor, last: Tensor) -> Tensor:
        """[rows, vocabulary] of one of the tables above, by the last two tokens, [rows, 2]."""
        return table[last[:, 0] * self.vocabulary + last[:, 1]]

    def distribution(self, start: tuple[int, int], length: int) -> Tensor:
        """The probability of each continuation of `length` tokens, in the order of counting: exact, in float64."""
        found = []
        for tokens in itertools.product(range(self.vocabulary), repeat=length):
            last, probability = start, 1.0
            for token in tokens:
                probability *= float(self.of(self.exact, torch.tensor([last]))[0, token])
                last = (last[1], token)
            found.append(probability)
        return torch.tensor(found, dtype=torch.float64)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def continuations(
    model: Markov, draft: Markov, method: str, start: tuple[int, int], length: int, k: int, rows: int, seed: int
) -> Tensor:
    """How often each continuation came out, [vocabulary ** length], with up to k drafted tokens a step.

    Methods: sampled: from the draft. greedy: the draft's most probable token. lookup: tokens that no model has made.
    coupled: draft and model draw with the same random numbers. And wrong ones, which the test must find:
    soft: the most probable token, with the draft's probabilities; raw: sampled from the draft, with other probabilities
    than those it was drawn from; unadjusted: a rejected token is replaced by one drawn from the model.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary, each = model.vocabulary, torch.arange(rows)
    tokens = torch.zeros(rows, 2 + length + k + 1, dtype=torch.int64)
    tokens[:, :2] = torch.tensor(start)
    lengths = torch.full((rows,), 2)
    while (lengths < 2 + length).any():
        at = lengths.clamp(max=1 + length)  # rows that have all their tokens write behind them
        counts = torch.randint(k + 1, (rows,), generator=generator)
        noise = torch.empty(rows, k + 1, vocabulary).exponential_(generator=generator)
        last, q, p, drafted = tokens[each[:, None], torch.stack([at - 2, at - 1], 1)], [], [], []
        for place in range(k + 1):
            p.append(model.of(model.warped, last))
            if place == k:
                break
            q.append(draft.of(draft.warped, last))
            if method in ("greedy", "soft"):
                token = q[-1].argmax(-1)
            elif method == "lookup":
                token = (last.sum(1) + place) % vocabulary
            elif method == "coupled":
                token = (q[-1] / noise[:, place]).argmax(-1)
            else:
                token = draw(q[-1], generator)
            if method == "raw":
                q[-1] = torch.softmax(draft.of(draft.scores, last), -1)
            drafted.append(token)
            last = torch.stack([last[:, 1], token], 1)
        target, proposed = torch.stack(p, 1), torch.stack(drafted, 1)
        if method == "coupled":
            chosen = (target / noise).argmax(-1)
            accepted = accept_greedy(proposed, chosen, counts)
            following = chosen[each, accepted]
        else:
            probabilities = None if method in ("greedy", "lookup") else torch.stack(q, 1)
            numbers = random_numbers(rows, k, target.device, generator)
            accepted, following = accept_sampled(proposed, probabilities, target, counts, *numbers)
            if method == "unadjusted":
                following = draw(target[each, accepted], generator)
        new = torch.cat([proposed, proposed[:, :1]], 1)
        new[each, accepted] = following
        places = torch.arange(k + 1)
        is_new = (places <= accepted[:, None]) & (lengths < 2 + length)[:, None]
        where = at[:, None] + places
        tokens.scatter_(1, where, torch.where(is_new, new, tokens.gather(1, where)))
        lengths = lengths + torch.where(lengths < 2 + length, accepted + 1, 0)
    powers = vocabulary ** torch.arange(length - 1, -1, -1)
    return torch.bincount((tokens[:, 2 : 2 + length] * powers).sum(1), minlength=vocabulary**length)


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    """How probable counts are that are as far or farther from what is expected (Pearson). 0 for what cannot be."""
    expected = probabilities * observed.sum()
    if (observed[probabilities == 0] > 0).any():
        return 0.0
    # Cells of which less than five are expected are one.
    rare = expected < 5
    observed = torch.cat([observed[~rare].double(), observed[rare].sum().double().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counted = expected > 0
    statistic = ((observed - expected)[counted] ** 2 / expected[counted]).sum()
    freedom = counted.sum().double() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom > 0 else 1.0
