"""The argmax of a layer against the argmax of all: ties, near ties, bans, numbers that are none, bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops import approximate_logits
from fastgen.ops.linear.kernels import GEMV
from tests.ops.linear import dequantizing

pytestmark = pytest.mark.skipif(not approximate_logits.is_available(), reason="there are no kernels in this process")


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([GEMV.multiply(row.unsqueeze(0), weight, bias) for row in x])


def found(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    banned: Tensor | None = None,
    copy: approximate_logits.ApproximateHead | None = None,
) -> tuple[Tensor, int]:
    copy = copy or approximate_logits.bounded_copy(weight)
    assert copy is not None
    out, estimates = torch.full((len(x),), -1), torch.full((len(x), len(weight)), math.nan)
    approximate_logits.logits_out(estimates, x, bias, copy)
    if banned is not None:
        estimates.masked_fill_(banned, -math.inf)
    return out, approximate_logits.argmax_out(out, estimates, x, weight, bias, copy)


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None = None, banned: Tensor | None = None) -> Tensor:
    all_of_them = outputs(x, weight, bias)
    return (all_of_them if banned is None else all_of_them.masked_fill(banned, -math.inf)).argmax(dim=-1)


sizes = {
    "rows": st.integers(1, 20),
    "inputs": st.sampled_from([1, 3, 31, 64, 65, 128, 200]),
    "count": st.sampled_from([1, 2, 31, 32, 33, 255, 256, 257, 700]),
    "seed": st.integers(0, 2**31),
}


@given(
    **sizes,
    different=st.sampled_from([1, 2, 10, 1000]),
    apart=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0]),
    outliers=st.sampled_from([0.0, 0.01, 0.3]),
    size=st.sampled_from([1e-36, 1e-30, 1e-24, 1e-18, 1e-12, 1.0, 1e6]),
    tiny=st.sampled_from([0.0, 0.5, 1.0]),
    has_bias=st.booleans(),
    ban=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
@settings(max_examples=100)
def test_as_argmax(rows, inputs, count, seed, different, apart, outliers, size, tiny, has_bias, ban):
    """Lines that are equal up to a little: the largest one can be told only from the weight itself."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < outliers, numbers * 50, numbers)

    lines = draw(different, inputs)[torch.randint(different, (count,), generator=generator)]
    weight = (lines + apart * draw(count, inputs)) * size
    weight[torch.rand(count, generator=generator) < tiny / 2] *= 1e-24  # some of which become 0
    x = draw(rows, inputs)
    bias = draw(count) * size if has_bias else None
    banned = torch.rand(rows, count, generator=generator) < ban
    tokens, computed = found(x, weight, bias, banned)
    assert torch.equal(tokens, wanted(x, weight, bias, banned))
    # That of the largest estimate is computed to see which others are.
    assert computed <= (~banned).sum()


@given(**sizes, outliers=st.sampled_from([0.0, 0.05]))
@settings(max_examples=40)
def test_estimates_are_within_their_bounds(rows, inputs, count, seed, outliers):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, count))
    for each in (x, weight):
        each[torch.rand(each.shape, generator=generator) < outliers] *= 100
    copy = approximate_logits.bounded_copy(weight)
    estimates = torch.empty(rows, count)
    approximate_logits.logits_out(estimates, x, None, copy)
    off = (estimates.double() - x.double() @ weight.double().t()).abs()
    lengths, errors = copy.norms[:, :count].double()
    assert (lengths >= weight.double().norm(dim=1)).all()
    # A row is rounded by half a 127th of the largest number of each rotated group, at the most.
    by_rounding = dequantizing.rotated(torch.nn.functional.pad(x, (0, -inputs % 64)), 64) / 8
    half = by_rounding.unflatten(1, (-1, 64)).abs().amax(dim=2).double().square().sum(dim=1).sqrt() / 254 * 8
    bound = x.double().norm(dim=1, keepdim=True) * errors + half.unsqueeze(1) * lengths * 1.001
    assert (off <= bound).all()


@given(
    **sizes,
    apart=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
    share=st.sampled_from([0.0, 1e-6, 1e-3, 0.3]),
    ban=st.sampled_from([0.0, 0.9, 1.0]),
)
@settings(max_examples=50)
def test_a_second_one_that_is_near(rows, inputs, count, seed, apart, share, ban):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(inputs, generator=generator) + apart * torch.randn(count, inputs, generator=generator)
    banned = torch.rand(rows, count, generator=generator) < ban
    copy = approximate_logits.bounded_copy(weight)
    estimates, out, is_near = torch.empty(rows, count), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows).bool()
    approximate_logits.logits_out(estimates, x, None, copy)
    estimates.masked_fill_(banned, -math.inf)
    approximate_logits.argmax_out(out, estimates, x, weight, None, copy, is_near, share=share)
    scores = outputs(x, weight, None).masked_fill(banned, -math.inf)
    assert torch.equal(out, scores.argmax(dim=-1))
    # The magnitude is that of the estimates; where nothing counts, there is no second one either.
    size = estimates.abs().masked_fill(estimates.isinf(), 0.0).amax(dim=-1, keepdim=True)
    best = scores.amax(dim=-1, keepdim=True)
    near = ((scores >= best - share * size) & (scores > -math.inf)).sum(dim=-1) > 1
    assert torch.equal(is_near, near)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38])
def test_numbers_that_are_none(odd):
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(3, 70, generator=generator), torch.randn(900, 70, generator=generator)
    bias = torch.randn(900, generator=generator)
    x[1, 5] = odd
    banned = torch.zeros(3, 900, dtype=torch.bool)
    banned[:, :4] = True
    assert torch.equal(found(x, weight, bias, banned)[0], wanted(x, weight, bias, banned))
    x[1, 5], bias[[7, 300]] = 0.0, odd
    assert torch.equal(found(x, weight, bias)[0], wanted(x, weight, bias))
    weight[4, 4] = odd
    copy = approximate_logits.bounded_copy(weight)
    assert (copy is None) == (not math.isfinite(odd))
    if copy is not None:
        assert torch.equal(found(x, weight)[0], wanted(x, weight))


def test_one_output_that_is_left_may_be_anything():
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(2, 64, generator=generator), torch.randn(600, 64, generator=generator)
    copy = approximate_logits.bounded_copy(weight)
    out, estimates = torch.zeros(2, dtype=torch.int64), torch.full((2, 600), -math.inf)
    estimates[:, 417] = torch.tensor([0.0, -1e9])
    approximate_logits.argmax_out(out, estimates, x, weight, None, copy)
    assert out.tolist() == [417, 417]
    out.fill_(7)
    approximate_logits.argmax_out(out, torch.full((2, 600), -math.inf), x, weight, None, copy)
    assert out.tolist() == [0, 0]


def test_what_is_served():
    x, weight = torch.randn(2, 64), torch.randn(300, 64)
    for each, is_served in ((weight, True), (weight.t().contiguous().t(), False)):
        assert approximate_logits.serves(x, each, None) is is_served
    assert not approximate_logits.serves(x.bfloat16(), weight, None)


@pytest.mark.parametrize("inputs, count", [(64, 700), (576, 3000), (200, 1000)])
def test_a_likely_copy_finds_most_of_them(inputs, count):
    """And computes few outputs for it. The estimates alone find fewer."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (400, count))
    copy = approximate_logits.likely_copy(weight)
    tokens, computed = found(x, weight, copy=copy)
    estimates = torch.empty(len(x), count)
    approximate_logits.logits_out(estimates, x, None, copy)
    right = wanted(x, weight)
    assert (tokens == right).float().mean() > 0.995 > (estimates.argmax(dim=-1) == right).float().mean()
    assert computed < len(x) * count / 20


def test_no_likely_copy_of_what_is_infinite():
    weight = torch.randn(64, 64)
    weight[3, 5] = math.inf
    assert approximate_logits.likely_copy(weight) is None
