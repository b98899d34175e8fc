"""Length buckets, and texts in one row: attention within each of them, by FastGen's operator and by torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastgen.decoding import unpadding
from fastgen.decoding.unpadding import Packing, attend_equal
from fastgen.ops import packed_attention
from tests.noting import noted

LENGTHS = [7, 30, 7, 1, 130]
HEADS, DIM = 4, 24


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The texts of each call of FastGen's operator, which is the faster one."""
    if not packed_attention.is_available():
        pytest.skip("there are no kernels with vectors in this process")
    return noted(monkeypatch, packed_attention, "OPERATOR", lambda query, keys, values, lengths, scale: len(lengths))


def check(kv_heads: int = HEADS, scale: float | None = None, dtype: torch.dtype = torch.float32) -> None:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    parts = [torch.randn(*mask.shape, heads, DIM).to(dtype) for heads in (HEADS, kv_heads, kv_heads)]
    packing = Packing(mask)
    found = packing.attend(*(packing.pack(part).transpose(1, 2) for part in parts), scale)
    unpacked = packing.unpack(found, 0.0)
    for text, length in enumerate(LENGTHS):
        some = [part[text, :length].transpose(0, 1).double() for part in parts]
        wanted = F.scaled_dot_product_attention(*some, scale=scale, enable_gqa=True).transpose(0, 1)
        rounding = 3e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(unpacked[text, :length].double(), wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_all_texts_are_one_call(calls: list[int], kv_heads: int, scale: float | None) -> None:
    check(kv_heads, scale)
    assert calls == [len(LENGTHS)]


def test_what_torch_computes(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    check(dtype=torch.bfloat16)
    check(dtype=torch.float64)
    monkeypatch.setattr(packed_attention, "is_available", lambda: False)
    check(2)
    assert calls == []


def texts(length: int = 40, kv_heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(3, length, heads, DIM).transpose(1, 2) for heads in (HEADS, kv_heads, kv_heads)]


@pytest.mark.parametrize("length", [1, 300])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_texts_of_one_length(calls: list[int], kv_heads: int, scale: float | None, length: int) -> None:
    some = texts(length, kv_heads)
    found = attend_equal(*some, scale)
    assert calls == [3] and found is not None
    wanted = F.scaled_dot_product_attention(*(x.double() for x in some), scale=scale, enable_gqa=True)
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_texts_that_torch_computes(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = texts()
    assert attend_equal(query.double(), keys.double(), values.double(), None) is None
    assert attend_equal(query, keys[:, :, 1:], values[:, :, 1:], None) is None  # over others than themselves
    assert attend_equal(query.contiguous(), keys, values, None) is None  # no text behind the other
    assert attend_equal(query[:0], keys[:0], values[:0], None) is None
    assert attend_equal(query[:1], keys, values, None) is None  # one for all texts
    assert attend_equal(query[0], keys[0], values[0], None) is None
    monkeypatch.setattr(packed_attention, "is_available", lambda: False)
    assert attend_equal(query, keys, values, None) is None
    assert calls == []


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=8), further=st.integers(0, 50))
def test_groups_are_the_cheapest(lengths: list[int], further: int) -> None:
    longest = max(lengths) + further
    made = unpadding.by_length(lengths, longest)
    ordered = sorted(lengths, reverse=True)

    def cheapest(end: int) -> int:
        if end == 0:
            return 0
        return min(cheapest(i) + (end - i) * ordered[i] + unpadding.BUCKET_COST for i in range(end))

    whole = len(lengths) * longest
    best = cheapest(len(ordered))
    if not made:
        assert best > 0.9 * whole or whole - sum(lengths) < 0.1 * whole
        return
    assert sorted(row for rows, _ in made for row in rows.tolist()) == list(range(len(lengths)))
    assert all(max(lengths[row] for row in rows.tolist()) == length for rows, length in made)
    assert sum(rows.shape[0] * length + unpadding.BUCKET_COST for rows, length in made) == best
