"""The best token and whether another one is near, against torch: ties, masks, numbers that are none, odd sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.ops import _library, search_step
from tests.decoding.captured.replayed import Replayed

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")

ODD = torch.tensor([-torch.inf, torch.inf, torch.nan, -1e9, 1e9, torch.finfo(torch.float32).min, 0.0, -0.0])


def assert_as_reference(scores: torch.Tensor, share: float) -> None:
    found, wanted = search_step.top_two(scores, share), search_step.top_two_reference(scores, share)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert found[0].dtype is torch.int64 and found[1].dtype is torch.bool


@given(
    rows=st.integers(0, 6),
    vocabulary=st.sampled_from([1, 2, 3, 15, 16, 17, 63, 64, 100, 2047, 2048, 2049, 4097, 20000]),
    levels=st.sampled_from([2, 30, 10**6]),
    share=st.sampled_from([0.0, 1e-6, 0.01, 0.5]),
    odd=st.sampled_from([0.0, 0.0005, 0.3, 1.0]),
    kinds=st.integers(1, len(ODD)),
    scale=st.sampled_from([1e-30, 1.0, 1e7, 1e8, 1e30]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_as_torch(rows, vocabulary, levels, share, odd, kinds, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(rows, vocabulary, generator=generator) * levels).round() / levels * scale - scale / 2
    some = ODD[torch.randperm(len(ODD), generator=generator)][:kinds]
    chosen = some[torch.randint(kinds, scores.shape, generator=generator)]
    assert_as_reference(torch.where(torch.rand(scores.shape, generator=generator) < odd, chosen, scores), share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_and_strides(dtype):
    scores = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).to(dtype).t()
    assert_as_reference(scores, 0.1)


def test_many_rows_with_threads():
    assert_as_reference(torch.randn(70, 33000, generator=torch.Generator().manual_seed(2)), 1e-4)


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_an_argmax_that_is_recorded(dim):
    """Along rows it is this operator; other ones are torch's."""
    scores, tokens = torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)
    program = Replayed()
    program.capture(lambda: tokens.copy_(scores.argmax(dim=dim)))
    assert (torch.ops.fastgen.top_two_out.default in program.functions) == (dim != 0)
    for numbers in ([1.0, 3.0, 3.0, 2.0], [-torch.inf] * 4, [1.0, torch.nan, torch.inf, torch.nan]):
        scores.copy_(torch.tensor(numbers).repeat(4, 1))
        scores[0] = 0.5
        program.replay()
        assert torch.equal(tokens, scores.argmax(dim=dim))
