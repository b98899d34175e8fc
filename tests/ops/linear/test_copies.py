"""float32 in 16 bits: all numbers of both types, and every bit that would be lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops.linear import choose, copies
from tests.ops.instructions import threads

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")

TYPES = pytest.mark.parametrize("dtype", copies.TYPES, ids=str)


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a type in float32, but for float16 that are no numbers: those have many forms."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype is torch.bfloat16:  # with its zeros behind it, as torch's conversion may have it otherwise
        return (numbers.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    return numbers[~numbers.isnan()].float()


@TYPES
def test_every_number(dtype: torch.dtype) -> None:
    """-0.0, denormal numbers, infinities and what is no number: bit by bit."""
    x = all_of(dtype)
    out = torch.empty_like(x, dtype=dtype)
    assert torch.ops.fastgen.exact_cast_out.default(out, x)
    expected = x.view(torch.int32) >> 16 if dtype is torch.bfloat16 else x.to(dtype).view(torch.int16)
    assert torch.equal(out.view(torch.int16), expected.to(torch.int16))


@TYPES
@given(bit=st.integers(0, 31), place=st.integers(0, 69_999), seed=st.integers(0, 2**30))
def test_one_bit_more(dtype: torch.dtype, bit: int, place: int, seed: int) -> None:
    """Of one of many numbers, in whatever part of them. What the result is says whether that is none of the type."""
    x = torch.randn(700, 100, generator=torch.Generator().manual_seed(seed)).to(dtype).float()
    assert copies.exact_cast(x).dtype is dtype
    x.view(torch.int32).view(-1)[place] ^= 1 << bit if bit < 31 else -(2**31)
    is_same = torch.equal(x.to(dtype).float().view(torch.int32), x.view(torch.int32))
    out = torch.empty_like(x, dtype=dtype)
    assert torch.ops.fastgen.exact_cast_out.default(out, x) == (is_same or _is_odd(x, dtype))
    found = copies.exact_cast(x)
    if is_same and found.dtype is dtype:
        assert torch.equal(found.float().view(torch.int32), x.view(torch.int32))


def _is_odd(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether what is no number is one of the type all the same, with bits that torch does not keep."""
    odd = x[x.isnan()].view(torch.int32)
    if dtype is torch.bfloat16:
        return len(odd) > 0 and not bool((odd & 0xFFFF).any())
    return len(odd) > 0 and bool((odd & 0x401FFF == 0x400000).all())  # quiet ones


@given(rows=st.integers(1, 40), columns=st.integers(1, 90), seed=st.integers(0, 2**30))
def test_a_look_at_some_numbers(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    assert not copies.likely_types(x + 1e-7) or x.numel() < 4
    for dtype in copies.TYPES:
        assert dtype in copies.likely_types(x.to(dtype).float())
        assert dtype in copies.likely_types(x.t().to(dtype).float())


def test_of_both_types() -> None:
    x = torch.randint(-100, 100, (40, 30)).float()
    assert copies.likely_types(x) == [*copies.TYPES] and copies.exact_cast(x).dtype is torch.bfloat16
    x[1, 5] = 1 + 2**-10
    assert copies.likely_types(x) == [*copies.TYPES]  # it does not see that one
    assert torch.equal(copies.exact_cast(x), x.half())
    x[1, 5] = 1 + 2**-11
    assert copies.exact_cast(x) is None


def test_threads_change_nothing() -> None:
    x = torch.randn(2**18 + 3).bfloat16().float()
    for number in (1, 3):
        out = torch.empty_like(x, dtype=torch.bfloat16)
        with threads(number):
            assert torch.ops.fastgen.exact_cast_out.default(out, x) and torch.equal(out, x.bfloat16())
