"""Near-ties: what is counted, and that it covers what another order of sums changes in a network."""

from __future__ import annotations

import torch

from fastgen.decoding.captured.program import Program
from fastgen.decoding.speculation.speculative_search import best_tokens

EPSILON = torch.finfo(torch.float32).eps


def near_ties(scores: torch.Tensor, products: int) -> torch.Tensor:
    tokens, is_near = best_tokens(scores, products)
    assert torch.equal(tokens, scores.argmax(dim=-1))
    return is_near


def test_what_is_counted():
    near, far = 8 * (1 - 20 * EPSILON), 8 * (1 - 40 * EPSILON)
    scores = torch.tensor([[8.0, near, 1.0], [8.0, far, 1.0], [8.0, 8.0, 1.0], [8.0, 1.0, near], [1.0, far, 8.0]])
    wanted = [True, False, True, True, False]
    assert near_ties(scores, 56).tolist() == wanted
    assert near_ties(scores.view(5, 1, 3), 30).tolist() == [[each] for each in wanted]
    assert near_ties(scores, 157).all()
    # The bound grows with the largest logit, be it negative, and whatever is masked.
    lowest = torch.tensor([[8.0, far, -16.0], [8.0, far, -1e9], [8.0, far, -torch.inf], [8.0, far, -3e38]])
    assert near_ties(lowest, 56).tolist() == [True, False, False, False]


def test_only_one_token_is_possible():
    assert not near_ties(torch.tensor([[-torch.inf, 2.0, -torch.inf], [-1e9, 2.0, -1e9]]), 1000).any()


def test_it_covers_another_order_of_sums():
    """A network with its inputs in another order: the two best differ by rounding, and less than the bound."""
    generator = torch.Generator().manual_seed(0)
    layers, width, vocabulary = 24, 128, 50
    x = torch.randn(200, width, generator=generator)
    orders = [torch.randperm(width, generator=generator) for _ in range(layers)]
    weights = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(layers)]
    head = torch.randn(width, vocabulary, generator=generator) / width**0.5
    head[:, 1] = head[:, 0]  # a tie of the first two, but for rounding
    plain, other = x, x
    for weight, order in zip(weights, orders, strict=True):
        plain = plain + torch.tanh(plain @ weight)
        other = other + torch.tanh(other[:, order] @ weight[order])
    plain, other = plain @ head, other[:, orders[0]] @ head[orders[0]]
    gap = (plain - other).abs()
    assert gap.max() > 0
    bound = 4 * EPSILON * (layers + 1) ** 0.5 * plain.abs().amax(dim=1)
    assert (gap.amax(dim=1) < bound).all()
    tied = plain.topk(2).indices.sort(dim=1).values.eq(torch.tensor([0, 1])).all(dim=1)
    assert tied.any() and near_ties(plain, layers + 1)[tied].all()
    assert near_ties(plain, layers + 1).float().mean() < 0.2


def test_in_a_program():
    scores, found = torch.zeros(3, 4), torch.zeros(3, dtype=torch.bool)
    program = Program()
    program.capture(lambda: found.copy_(best_tokens(scores, 56)[1]))
    scores.copy_(torch.tensor([[1.0, 2.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0], [5.0, 2.0, 3.0, 4.0]]))
    program.replay()
    assert found.tolist() == [True, False, False]
