"""Sorted rows against torch's stable sort: ties, zeros of both signs, numbers that are none, rows of -inf."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import _library, search_step

needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")

ODD = torch.tensor([-torch.inf, torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 0.0, -0.0])
WIDTHS = [2048, 2049, 4097, 20000, 70000]


def assert_as_torch(x: torch.Tensor) -> None:
    values, columns = search_step.sort_rows(x)
    wanted = torch.sort(x, stable=True)
    assert torch.equal(columns, wanted.indices) and columns.dtype is torch.int64
    kind = torch.int32 if x.dtype is torch.float32 else torch.int64
    assert torch.equal(values.view(kind), wanted.values.view(kind))  # of zeros and NaN the bits, too


@needs_kernel
@given(
    rows=st.integers(0, 5),
    width=st.sampled_from(WIDTHS),
    levels=st.sampled_from([1, 2, 300, 10**7]),
    odd=st.sampled_from([0.0, 0.0005, 0.3, 1.0]),
    kinds=st.integers(1, len(ODD)),
    scale=st.sampled_from([1e-42, 1.0, 1e38]),
    seed=st.integers(0, 2**31),
)
@example(rows=2, width=2048, levels=1, odd=1.0, kinds=1, scale=1.0, seed=3)
@settings(max_examples=40)
def test_as_torch(rows, width, levels, odd, kinds, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = ((torch.rand(rows, width, generator=generator) * levels).round() / levels - 0.5) * scale
    some = ODD[torch.randperm(len(ODD), generator=generator)][:kinds]
    chosen = some[torch.randint(kinds, x.shape, generator=generator)]
    x = torch.where(torch.rand(x.shape, generator=generator) < odd, chosen, x)
    assert search_step.sorts(x)
    assert_as_torch(x)


@needs_kernel
def test_nothing_is_left():
    """All are -inf, as where everything is banned; and all but one."""
    x = torch.full((2, 3000), -torch.inf)
    x[1, 1234] = -5.0
    assert_as_torch(x)


@needs_kernel
def test_strides():
    assert_as_torch(torch.randn(3000, 4).t())
    assert_as_torch(torch.randn(3, 6000)[:, ::2])


@pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 3, 4), (0, 3000)])
def test_other_shapes(shape):
    assert_as_torch(torch.randn(shape))


def test_other_types_are_torchs():
    x = torch.randn(2, 5000, dtype=torch.float64)
    assert not search_step.sorts(x)
    assert_as_torch(x)
    assert not search_step.sorts(torch.randn(2, 5000, requires_grad=True))
