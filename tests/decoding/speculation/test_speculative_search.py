"""Which drafted tokens are kept: against definitions that spell it out.

The distribution of what comes out is tested with models, in tests/equivalence/test_speculation_sampling.py.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.captured.program import Program
from fastgen.decoding.speculation.speculative_search import (
    accept_greedy,
    accept_sampled,
    confident,
    draw,
    random_numbers,
)


@given(st.data(), st.integers(0, 5), st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_greedy(data, k, rows):
    """Against a loop; few tokens, so that runs of all lengths occur."""
    tokens = st.integers(0, 1)
    drafted = [[data.draw(tokens) for _ in range(k)] for _ in range(rows)]
    chosen = [[data.draw(tokens) for _ in range(k + 1)] for _ in range(rows)]
    counts = [data.draw(st.integers(0, k)) for _ in range(rows)]

    def kept(row: int) -> int:
        agree = [drafted[row][i] == chosen[row][i] for i in range(counts[row])]
        return agree.index(False) if False in agree else counts[row]

    as_tensor = torch.tensor(drafted, dtype=torch.int64).view(rows, k)
    accepted = accept_greedy(as_tensor, torch.tensor(chosen), torch.tensor(counts))
    assert accepted.dtype == torch.int64
    assert accepted.tolist() == [kept(row) for row in range(rows)]


def sampled_by_definition(drafted, q, p, count, uniform, following):
    """Algorithm 1 for one row, in float64 and with divisions."""
    for place in range(count):
        token = drafted[place]
        chance = q[place][token]
        ratio = (p[place][token] / chance) if chance > 0 else (1.0 if p[place][token] > 0 else 0.0)
        if not uniform[place] < min(1.0, ratio):
            left = [max(a - b, 0.0) for a, b in zip(p[place], q[place], strict=True)]
            weights = left if sum(left) > 0 else p[place]
            break
    else:
        place, weights = count, p[count]
    return place, drawn_by_definition(weights, following)


def drawn_by_definition(weights, uniform):
    """In exact arithmetic."""
    sums = itertools.accumulate(map(Fraction, weights))
    return next(token for token, upto in enumerate(sums) if upto > Fraction(uniform) * sum(map(Fraction, weights)))


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 5), st.integers(2, 6), st.booleans())
@settings(max_examples=80, deadline=None)
def test_sampled(seed, k, rows, vocabulary, deterministic):
    """Against the algorithm, row by row, with zeros in both distributions and rows of all counts."""
    generator = torch.Generator().manual_seed(seed)

    def probabilities(*shape: int) -> torch.Tensor:
        scores = 2 * torch.randn(*shape, generator=generator)
        holes = torch.rand(*shape, generator=generator) < 0.3
        holes[..., 0] = False
        return torch.softmax(scores.masked_fill(holes, -torch.inf), dim=-1)

    p, q = probabilities(rows, k + 1, vocabulary), probabilities(rows, k, vocabulary)
    drafted = torch.randint(vocabulary, (rows, k), generator=generator)
    counts = torch.randint(k + 1, (rows,), generator=generator)
    torch.manual_seed(seed)
    uniform, following = random_numbers(rows, k, p.device)
    if deterministic:
        q = torch.nn.functional.one_hot(drafted, vocabulary).float()
    accepted, tokens = accept_sampled(drafted, None if deterministic else q, p, counts, uniform, following)
    arguments = [each.double().tolist() for each in (q, p, uniform, following)]
    wanted = [
        sampled_by_definition(draft, q_, p_, count, u, e)
        for draft, count, q_, p_, u, e in zip(drafted.tolist(), counts.tolist(), *arguments, strict=True)
    ]
    assert list(zip(accepted.tolist(), tokens.tolist(), strict=True)) == wanted


def decide(drafted, q, p, uniform=0.5, count=None):
    """One row with k tokens; the random numbers are the same everywhere."""
    p = torch.tensor([p])
    uniforms = torch.full((1, len(drafted)), uniform)
    accepted, following = accept_sampled(
        torch.tensor([drafted], dtype=torch.int64), None if q is None else torch.tensor(q).view(1, -1, p.shape[2]), p,
        torch.tensor([len(drafted) if count is None else count]), uniforms,
        torch.tensor([0.4], dtype=torch.float64),
    )  # fmt: skip
    return int(accepted), int(following)


def test_corners_of_sampling():
    half = [0.5, 0.5, 0.0]
    # What q says cannot be drafted: kept if the model may say it, never if it may not, and no division by 0.
    assert decide([1], [[1.0, 0.0, 0.0]], [half, half]) == (1, 0)
    assert decide([2], [[1.0, 0.0, 0.0]], [half, half]) == (0, 1)
    # The same distributions: all is kept, whatever the uniform number.
    almost = 1 - 2**-24
    assert decide([0, 1], [half, half], [half, half, [0.0, 0.0, 1.0]], uniform=almost) == (2, 2)
    # The model gives 0 to the drafted token: never kept, not even with u = 0, and never drawn.
    assert decide([2], [[0.0, 0.0, 1.0]], [half, half], uniform=0.0) == (0, 0)
    assert decide([2], None, [half, half], uniform=0.0) == (0, 0)
    # A rejection that leaves nothing of p - q: the sum of p rounds to less than 1.
    assert decide([0], None, [[almost, 0.0, 0.0], half], uniform=almost) == (0, 0)
    assert decide([0], [[1.0, 0.0, 0.0]], [[almost, 0.0, 0.0], half], uniform=almost) == (0, 0)
    # What is left is tiny, and is drawn all the same.
    assert decide([0], None, [[almost, 0.0, 1e-38], half], uniform=almost) == (0, 2)
    assert decide([0], [[1.0, 0.0, 0.0]], [[almost, 0.0, 1e-42], half], uniform=almost) == (0, 2)
    # No drafted token: the model's own distribution, the q of the position is not subtracted.
    assert decide([1], [[0.0, 1.0, 0.0]], [[0.1, 0.9, 0.0], half], count=0) == (0, 1)
    assert decide([], None, [[0.1, 0.9, 0.0]]) == (0, 1)
    assert decide([], [], [[0.1, 0.9, 0.0]]) == (0, 1)


@given(st.lists(st.sampled_from([0.0, 1e-45, 1e-9, 0.1, 0.5, 1.0]), min_size=1, max_size=6), st.floats(0, 1))
@settings(max_examples=80)
def test_draws(weights, uniform):
    """Never a token without a weight, whatever the number, the first and the last one among them."""
    weights = torch.tensor([[*weights, 0.25, 0.0]])
    for number in (min(uniform, 1 - 2**-53), 0.0, 1 - 2**-53):
        found = draw(weights, torch.tensor([number], dtype=torch.float64))
        assert weights[0, found] > 0
        exact = drawn_by_definition(weights[0].double().tolist(), number)
        assert found == exact or is_at_a_border(weights, number)


def is_at_a_border(weights, number):
    """Whether the sum of some of the weights is so near that rounding decides."""
    sums = weights.double().cumsum(1)
    return bool(((sums / sums[:, -1:] - number).abs() < 1e-14).any())


def test_draws_of_what_are_no_numbers():
    found = draw(torch.tensor([[0.5, torch.nan, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([0.9, 0.9], dtype=torch.float64))
    assert bool((found < 3).all())


def test_no_rows():
    empty = torch.empty(0, 2, dtype=torch.int64)
    assert accept_greedy(empty, torch.empty(0, 3, dtype=torch.int64), empty[:, 0]).shape == (0,)
    found = accept_sampled(
        empty, torch.empty(0, 2, 5), torch.empty(0, 3, 5), empty[:, 0], torch.empty(0, 2), torch.empty(0).double()
    )
    assert [each.shape for each in found] == [(0,), (0,)]


def test_confident():
    """Up to the first token of less than the threshold, and that token."""
    probabilities = torch.tensor([[0.9, 0.3, 0.9], [0.1, 0.9, 0.9], [0.4, 0.4, 0.4], [0.9, 0.9, 0.1], [0.9, 0.9, 0.1]])
    counts = torch.tensor([3, 3, 3, 3, 1])
    assert confident(probabilities, counts, 0.4).tolist() == [2, 1, 3, 3, 1]
    assert confident(probabilities, torch.zeros_like(counts), 0.4).tolist() == [0, 0, 0, 0, 0]
    assert confident(probabilities[:, :0], torch.zeros_like(counts), 0.4).tolist() == [0, 0, 0, 0, 0]


# ---- in a captured step


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_in_a_program(k, deterministic):
    """Recorded once, and executed on other numbers in the same memory: nothing is read by the host."""
    rows, vocabulary = 4, 6
    drafted, counts = torch.zeros(rows, k, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    chosen = torch.zeros(rows, k + 1, dtype=torch.int64)
    q, p = torch.ones(rows, k, vocabulary) / vocabulary, torch.ones(rows, k + 1, vocabulary) / vocabulary
    numbers = torch.zeros(rows, k), torch.zeros(rows, dtype=torch.float64)
    results = torch.zeros(3, rows, dtype=torch.int64)

    def step() -> None:
        found = accept_sampled(drafted, None if deterministic else q, p, counts, *numbers)
        for result, each in zip(results, (*found, accept_greedy(drafted, chosen, counts)), strict=True):
            result.copy_(each)

    program = Program()
    program.capture(step)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        drafted.random_(0, vocabulary, generator=generator)
        chosen.random_(0, vocabulary, generator=generator)
        counts.random_(0, k + 1, generator=generator)
        for probabilities in (q, p):
            probabilities.copy_(torch.softmax(2 * torch.randn(probabilities.shape, generator=generator), -1))
        numbers[0].uniform_(generator=generator)
        numbers[1].uniform_(generator=generator)
        program.replay()
        found = results.clone()
        step()
        assert torch.equal(found, results)
