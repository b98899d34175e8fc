"""The candidates of beam search against a sort in float64, and the table of ancestors against histories kept whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops.gpu import launches as on_gpu
from fastgen.ops.search_step import best_continuations, continuations_reference

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "batch": st.integers(1, 3),
        "beams": st.sampled_from([1, 2, 4, 5]),
        "vocabulary": st.sampled_from([1, 2, 7, 100, 4095, 4096, 4097, 9000]),
        "count": st.sampled_from([1, 2, 4, 8, 10]),
        "normalise": st.booleans(),
        "masked": st.sampled_from([0.0, 0.5, 0.99]),
        "seed": st.integers(0, 2**31),
    }
)
PLAIN = {
    "dtype": torch.float32, "batch": 2, "beams": 4, "vocabulary": 100, "count": 8, "normalise": True, "masked": 0.0,
    "seed": 0,
}  # fmt: skip


def make(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    rows = case["batch"] * case["beams"]
    scores = 5 * torch.randn(rows, case["vocabulary"], generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < case["masked"]] = -math.inf
    scores[:, 0] = 1.0  # a row of minus infinities has no softmax
    running = -20 * torch.rand(case["batch"], case["beams"], generator=generator)
    # Rows that somebody else's columns lie between.
    wide = torch.full((rows, case["vocabulary"] + 3), math.nan, dtype=case["dtype"])
    wide[:, : case["vocabulary"]] = scores
    count = min(case["count"], case["beams"] * case["vocabulary"])
    return wide.to(device)[:, : case["vocabulary"]], running.to(device), count


def all_scores(scores, running, normalise):
    values = scores.cpu().double()
    if normalise:
        values = torch.log_softmax(values, dim=1)
    return (values.view(*running.shape, -1) + running.cpu().double().unsqueeze(2)).flatten(1)


def check(operator, case, device):
    scores, running, count = make(case, device)
    before = scores.clone()
    found = operator(scores, running, count, normalise=case["normalise"])
    assert torch.equal(scores, before)
    assert found.beams.dtype == found.tokens.dtype == torch.int64
    wanted = all_scores(scores, running, case["normalise"])
    best = wanted.sort(dim=1, descending=True).values[:, :count]
    torch.testing.assert_close(found.scores.cpu().double(), best, rtol=1e-5, atol=1e-5)
    # What is said to be chosen has the score that is given for it, and nothing is chosen twice.
    indices = (found.beams * case["vocabulary"] + found.tokens).cpu()
    torch.testing.assert_close(wanted.gather(1, indices), best, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == count for row in indices.tolist())


@given(case=cases)
@example(case=PLAIN | {"vocabulary": 9000, "count": 8, "dtype": torch.float16})
@example(case=PLAIN | {"vocabulary": 1, "count": 4})
@settings(max_examples=6)
def test_kernel(case, device, kernels):
    check(best_continuations, case, device)


@given(case=cases)
@settings(max_examples=25)
def test_reference(case, device):
    check(continuations_reference, case, device)


@given(case=cases)
@settings(max_examples=5)
def test_ties_go_to_the_lower_beam_and_then_the_lower_token(case, device, kernels):
    """Scores of few different values, and no softmax: exact ties, whose order is defined."""
    scores, running, count = make(case, device)
    scores = scores.float().nan_to_num().div(8).round().clamp(-2, 0)
    running = running.div(10).round()
    found = best_continuations(scores, running, count, normalise=False)
    wanted = all_scores(scores, running, False)
    order = [sorted(range(wanted.shape[1]), key=lambda k: (-row[k], k))[:count] for row in wanted.tolist()]
    assert (found.beams * case["vocabulary"] + found.tokens).tolist() == order


def test_extremes_are_ordered_as_topk_does(device, kernels):
    row = [0.0, -0.0, math.inf, -math.inf, math.nan, -1e-40, 1e-40, -3e38, 3e38, -2.0]
    scores = torch.tensor([row], device=device)
    found = best_continuations(scores, torch.zeros(1, 1, device=device), len(row), normalise=False)
    wanted = scores.topk(len(row))
    torch.testing.assert_close(found.scores, wanted.values, rtol=0, atol=1e-38, equal_nan=True)
    assert found.tokens[0, :3].tolist() == [4, 2, 8]


@pytest.mark.parametrize(
    ("rows", "beams", "count"), [(3, 2, 1), (4, 2, 0), (4, 2, 21)], ids=["rows", "none wanted", "too many wanted"]
)
def test_wrong_arguments(rows, beams, count):
    with pytest.raises(ValueError, match="best_continuations: "):
        best_continuations(torch.zeros(rows, 10), torch.zeros(2, beams), count)


def test_too_many_candidates_for_one_program_are_left_to_torch(device, monkeypatch):
    monkeypatch.setattr(on_gpu, "_MOST_CANDIDATES", 16)
    check(best_continuations, PLAIN, device)
