"""The best candidates of a beam search against torch's sum and top-k, ties and odd values included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops import best_candidates as operator
from fastgen.ops.best_candidates import best_candidates
from tests.ops.instructions import instruction_set


def _expected(scores: torch.Tensor, running: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    summed = scores.view(*running.shape, -1) + running.unsqueeze(2)
    values, indices = summed.flatten(1).topk(count)
    return values, indices


def _check(scores: torch.Tensor, running: torch.Tensor, count: int) -> None:
    kept = scores.clone()
    values, indices = best_candidates(scores, running, count)
    expected_values, expected_indices = _expected(scores, running, count)
    torch.testing.assert_close(values, expected_values, atol=0, rtol=0, equal_nan=True)
    assert indices.tolist() == expected_indices.tolist()
    torch.testing.assert_close(scores, kept, atol=0, rtol=0, equal_nan=True)


shapes = {
    "inputs": st.integers(1, 5),
    "beams": st.integers(1, 6),
    "vocabulary": st.integers(1, 300),
    "seed": st.integers(0, 2**31),
}


@given(part=st.floats(0, 1), levels=st.sampled_from([0, 1, 3, 40]), **shapes)
def test_values_and_indices(inputs: int, beams: int, vocabulary: int, seed: int, part: float, levels: int) -> None:
    """Of real numbers, and of a few values only, where ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(inputs * beams, vocabulary, generator=generator)
    if levels:
        scores = (scores * levels).round() / levels
    running = torch.randn(inputs, beams, generator=generator)
    if seed % 3 == 0:
        running[:, 1:] = -1e9
    _check(scores, running, 1 + int(part * (min(beams * vocabulary, 64) - 1)))


@given(places=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 199)), max_size=300), seed=st.integers(0, 99))
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_values_that_are_no_ordinary_numbers(value: float, places: list[tuple[int, int]], seed: int) -> None:
    scores = torch.randn(8, 200, generator=torch.Generator().manual_seed(seed))
    for row, column in places:
        scores[row, column] = value
    _check(scores, torch.zeros(2, 4), 8)


def test_nothing_is_allowed() -> None:
    _check(torch.full((4, 50), -math.inf), torch.zeros(2, 2), 5)


@pytest.mark.parametrize("vocabulary", [32767, 32768, 50265, 131072])
def test_more_than_a_part(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(8, vocabulary, generator=generator).log_softmax(dim=1)
    _check(scores, torch.randn(2, 4, generator=generator), 8)


@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_every_instruction_set(instructions: str) -> None:
    scores = torch.randn(12, 1000, generator=torch.Generator().manual_seed(3))
    scores[5, 999] = 50.0
    with instruction_set(instructions):
        _check(scores, torch.randn(3, 4), 10)


def test_more_candidates_than_the_kernel_takes() -> None:
    _check(torch.randn(4, 400), torch.randn(1, 4), operator._MAX_COUNT + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    _check(torch.randn(4, 300).to(dtype), torch.randn(2, 2).to(dtype), 4)


def test_rows_that_are_not_next_to_each_other() -> None:
    _check(torch.randn(4, 600)[:, ::2], torch.randn(2, 4)[:, ::2], 4)


@pytest.mark.parametrize(
    ("scores", "running", "count"),
    [
        (torch.randn(4, 5), torch.randn(3, 2), 2),
        (torch.randn(4, 5, 1), torch.randn(2, 2), 2),
        (torch.randn(4, 5), torch.randn(4), 2),
        (torch.randn(4, 5), torch.randn(2, 2), 11),
        (torch.randn(4, 5), torch.randn(2, 2), 0),
    ],
)
def test_what_is_not_accepted(scores: torch.Tensor, running: torch.Tensor, count: int) -> None:
    with pytest.raises(RuntimeError):
        best_candidates(scores, running, count)
