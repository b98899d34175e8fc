"""Top-p in place against the library's: shares of each row, ties at the edge, -inf, what stays in any case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

import fastgen
from fastgen.ops.search_step import EVERYTHING, top_p_
from tests.noting import noted


def library(scores: torch.Tensor, share: float, fill: float, least: int) -> torch.Tensor:
    with fastgen.disabled():
        return TopPLogitsWarper(share, fill, least)(None, scores)


def shares(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


@given(
    given=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0, EVERYTHING]), min_size=1, max_size=5),
    width=st.sampled_from([3, 100, 3000, 20000]),
    levels=st.sampled_from([1, 5, 100, 10**6]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    spread=st.sampled_from([0.01, 3.0, 500.0]),
    least=st.integers(1, 3),
    fill=st.sampled_from([-torch.inf, -50.0]),
    seed=st.integers(0, 2**31),
)
@example(given=[0.9, EVERYTHING], width=3000, levels=1, banned=0.0, spread=3.0, least=1, fill=-torch.inf, seed=1)
@settings(max_examples=60)
def test_as_the_library(given, width, levels, banned, spread, least, fill, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(len(given), width, generator=generator) * levels).round() / levels * spread
    scores.masked_fill_(torch.rand(scores.shape, generator=generator) < banned, -torch.inf)
    found = top_p_(scores.clone(), shares(*given), fill, least)
    for row, share in enumerate(given):
        one = scores[row : row + 1]
        assert torch.equal(found[row : row + 1], one if share > 1 else library(one, share, fill, least))


@pytest.mark.parametrize("width", [100, 3000])
def test_one_share_for_all_rows(width):
    scores = torch.randn(4, width)
    for share in (torch.tensor(0.7, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)):
        assert torch.equal(top_p_(scores.clone(), share, -torch.inf, 1), library(scores, 0.7, -torch.inf, 1))


def test_numbers_that_are_none():
    scores = torch.randn(3, 3000)
    scores[1, 7] = torch.nan
    found, wanted = top_p_(scores.clone(), shares(0.5, 0.5, 0.5), -torch.inf, 1), library(scores, 0.5, -torch.inf, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_equal_scores_at_the_edge(monkeypatch):
    """As many of them go; which ones is torch's order only where that is asked for."""
    sorts = noted(monkeypatch, torch, "sort")
    scores = torch.zeros(1, 4000)
    wanted = library(scores, 0.5, -torch.inf, 1)
    sorts.clear()
    assert torch.equal(top_p_(scores.clone(), shares(0.5), -torch.inf, 1), wanted)
    assert sorts
    sorts.clear()
    found = top_p_(scores.clone(), shares(0.5), -torch.inf, 1, orders_as_torch=False)
    assert not sorts and torch.equal(found.isinf().sum(), wanted.isinf().sum())
