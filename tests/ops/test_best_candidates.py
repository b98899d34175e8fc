"""The best candidates of a beam search against torch's sum and top-k, ties and odd values included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops import _library
from fastgen.ops import search_step as operator
from fastgen.ops.search_step import best_candidates
from tests.ops.instructions import each_set, instruction_set, threads


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


needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
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


@pytest.mark.parametrize("vocabulary", [32767, 32768, 131072])
def test_more_than_a_part(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(8, vocabulary, generator=generator).log_softmax(dim=1)
    _check(scores, torch.randn(2, 4, generator=generator), 8)


def _check_normalised(scores: torch.Tensor, running: torch.Tensor, count: int) -> None:
    """Chosen as torch chooses from the same values, and these are those of float64, rounded."""
    vocabulary = scores.shape[1]
    values, beams, tokens = operator.by_beam(scores, running, count, normalise=True)
    logs = scores.float().double().log_softmax(dim=1).view(*running.shape, -1) + running.double().unsqueeze(2)
    wanted = logs.flatten(1).topk(count).values
    indices = beams * vocabulary + tokens
    for found in (values.double(), logs.flatten(1).gather(1, indices)):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-5, equal_nan=True)
    assert all(len(set(row)) == count for row in indices.tolist())
    # Equal logits of a row, and rows that are equal, leave ties that are torch's, too.
    if scores.dtype is not torch.float32 and not wanted.isnan().any():
        few = torch.log_softmax(scores.float(), dim=1).view(*running.shape, -1) + running.unsqueeze(2)
        assert indices.tolist() == few.flatten(1).topk(count).indices.tolist()


@needs_kernel
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    masked=st.sampled_from([0.0, 0.0, 0.9, 1.0]),
    odd=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    part=st.floats(0, 1),
    **shapes,
)
def test_a_log_softmax(
    inputs: int, beams: int, vocabulary: int, seed: int, part: float, dtype: torch.dtype, scale: float, masked: float,
    odd: float | None,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    vocabulary = vocabulary * 40 if seed % 4 == 0 else vocabulary
    scores = (torch.randn(inputs * beams, vocabulary, generator=generator) * scale).to(dtype)
    scores[torch.rand(scores.shape, generator=generator) < masked] = -math.inf
    if odd is not None:
        scores[seed % len(scores), seed % vocabulary] = odd
    running = torch.randint(-20, 0, (inputs, beams), generator=generator).float()
    if seed % 3 == 0:
        running[:, 1:] = -1e9
    _check_normalised(scores, running, 1 + int(part * (min(beams * vocabulary, 64) - 1)))


@needs_kernel
@pytest.mark.parametrize("instructions", each_set("default", "avx2", "avx512"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_log_softmax_on_every_instruction_set(instructions: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(8, 70001, generator=generator).to(dtype) * 4
    with instruction_set(instructions):
        _check_normalised(scores, -torch.rand(2, 4, generator=generator), 8)


@needs_kernel
def test_the_number_of_threads_changes_nothing() -> None:
    scores, running, found = torch.randn(8, 70001), torch.randn(2, 4), []
    for number in (1, 2, 5):
        with threads(number):
            found.append(operator.by_beam(scores, running, 8, normalise=True))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@needs_kernel
def test_another_order_of_ties_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.topk promises nothing about may be otherwise in another release."""
    topk = torch.topk
    reference = operator._candidates_reference

    def reversed_ties(scores: torch.Tensor, running: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = topk((scores.view(*running.shape, -1) + running.unsqueeze(2)).flatten(1).flip(1), count)
        return values, scores.shape[1] * running.shape[1] - 1 - indices

    operator._orders_as_torch.cache_clear()
    try:
        assert operator._has_pass(torch.randn(4, 9), torch.randn(1, 4), 2)
        operator._orders_as_torch.cache_clear()
        monkeypatch.setattr(operator, "_candidates_reference", reversed_ties)
        assert not operator._has_pass(torch.randn(4, 9), torch.randn(1, 4), 2)
    finally:
        monkeypatch.setattr(operator, "_candidates_reference", reference)
        operator._orders_as_torch.cache_clear()


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        (torch.randn(4, 400), operator._MAX_COUNT + 1),
        (torch.randn(4, 300).double(), 4),
        (torch.randn(4, 300).bfloat16(), 4),
        (torch.randn(4, 600)[:, ::2], 4),
    ],
)
def test_what_the_kernel_does_not_take(scores: torch.Tensor, count: int) -> None:
    _check(scores, torch.randn(2, 4).to(scores.dtype)[:, ::2], count)
