"""Decode attention on the CPU: odd and large numbers, and which calls of `shared_prefix_attention` the kernel serves.

Against the definition it is compared in test_decode_attention.py and gpu/test_attention.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from fastgen.ops import _library, attention
from fastgen.ops.attention import on_cpu, reference, shared_prefix_attention
from tests.noting import noted
from tests.ops.instructions import each_set, instruction_set
from tests.ops.torch_attention import skipped_where_torch_fails


@pytest.fixture(params=[*each_set("avx512", "avx2", "default"), "reference"], scope="session")
def operator(request):
    if request.param == "reference":
        return reference
    if _library.load("CPU"):
        pytest.skip(_library.load("CPU"))

    def kernel(*args, **kwargs):
        with instruction_set(request.param):
            return on_cpu(*args, **kwargs)

    return kernel


def in_float64(*args):
    return reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e2, 1e4, 1e18])
def test_is_stable(operator, magnitude):
    """The largest score may come first, last, in the prefix or in the suffix, and be of any size."""
    torch.manual_seed(1)
    query, prefix, suffix = torch.randn(4, 2, 1, 8), torch.randn(2, 2, 600, 8), torch.randn(4, 2, 9, 8)
    values, own = torch.randn(2, 2, 600, 8), torch.randn(4, 2, 9, 8)
    keys = prefix * magnitude
    # Exact products, so that the rounding of large scores is no part of the comparison.
    query, keys, suffix = query.sign(), keys.sign() * magnitude, suffix.sign() * magnitude
    result = operator(query, keys, values, suffix, own, None, 1.0)
    torch.testing.assert_close(
        result.double(), in_float64(query, keys, values, suffix, own, None, 1.0), rtol=2e-5, atol=2e-5
    )
    assert result.isfinite().all()


def test_weights_are_exact_to_a_few_units_in_the_last_place(operator):
    """Two positions with scores x and 0 give e^x / (e^x + 1) from values 1 and 0."""
    x = torch.cat([-torch.rand(4000) * 87.0, torch.linspace(-87, 0, 4000), torch.tensor([-0.0, -1e-30, -87.3])])
    query = x.view(-1, 1, 1, 1)
    pk, pv = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    result = operator(query, pk, pv, None, None, None, 1.0).flatten().double()
    wanted = x.double().exp() / (x.double().exp() + 1)
    assert float(((result - wanted) / wanted).abs().max()) < 4 * 2**-24
    far = operator(torch.tensor([-88.0, -1e3, -1e38]).view(-1, 1, 1, 1), pk, pv, None, None, None, 1.0)
    assert far.max() <= 1e-38


def test_nan_and_infinity_are_those_of_softmax(operator):
    query, prefix, suffix = torch.ones(4, 1, 1, 4), torch.rand(2, 1, 70, 4), torch.rand(4, 1, 3, 4)
    for bad in (math.nan, math.inf, -math.inf):
        keys, own = prefix.clone(), suffix.clone()
        keys[1, :, 66] = bad
        own[1, :, 2] = bad
        result = operator(query, keys, prefix, own, suffix)
        wanted = in_float64(query, keys, prefix, own, suffix)
        torch.testing.assert_close(result.double(), wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_positions_that_are_masked_for_all_are_not_read(operator):
    if operator is reference:
        pytest.skip("the reference multiplies by weights of zero")
    query, keys, values = torch.randn(4, 2, 1, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    mask = torch.ones(4, 1, 1, 300, dtype=torch.bool)
    mask[:2, ..., :128] = False
    padded = keys.clone(), values.clone()
    for part in padded:
        part[0, :, :128] = math.nan
    assert torch.equal(operator(query, *padded, None, None, mask), operator(query, keys, values, None, None, mask))


# ---- what serves


@pytest.fixture
def served(monkeypatch):
    """What has served a call of `shared_prefix_attention` in place of the kernel."""
    return noted(monkeypatch, attention, "composed", lambda *given: "reference")


def test_a_decoding_step(served):
    query, prefix, suffix = torch.randn(8, 2, 1, 8), torch.randn(2, 2, 50, 8), torch.randn(8, 2, 3, 8)
    shared_prefix_attention(query, prefix, prefix, suffix, suffix)
    shared_prefix_attention(query, prefix, prefix)
    assert served == []


@pytest.mark.parametrize("dtype", attention.MAX_ROWS)
def test_many_queries(served, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_converts_halves", lambda: True)
    prefix, own = torch.randn(2, 2, 50, 8, dtype=dtype), torch.randn(4, 2, 3, 8, dtype=dtype)
    for suffix, most in zip([None, own], attention.MAX_ROWS[dtype], strict=True):
        for queries, by in [(most // 4, []), (most // 4 + 1, ["reference"])]:
            served.clear()
            query = torch.randn(4, 4, queries, 8, dtype=dtype)
            with skipped_where_torch_fails(dtype):
                shared_prefix_attention(query, prefix, prefix, suffix, suffix)
            assert served == by, (suffix is None, queries)


@pytest.mark.parametrize(
    ("dtype", "converts", "is_strided", "serves"),
    [
        (torch.float32, False, False, True),
        (torch.float16, False, False, False),
        (torch.bfloat16, False, False, False),
        (torch.float32, True, True, False),
        (torch.float64, True, False, False),
    ],
)
def test_types_and_strides(served, monkeypatch, dtype, converts, is_strided, serves):
    """Half precision is served where there are instructions that convert it."""
    monkeypatch.setattr(attention, "_converts_halves", lambda: converts)
    query, prefix = torch.randn(4, 2, 1, 8, dtype=dtype), torch.randn(2, 2, 5, 8, dtype=dtype)
    prefix = prefix.transpose(-1, -2).contiguous().transpose(-1, -2) if is_strided else prefix
    assert shared_prefix_attention(query, prefix, prefix).dtype == dtype
    assert served == ([] if serves else ["reference"])


def test_gradients(served):
    query, prefix = torch.randn(4, 2, 1, 8, requires_grad=True), torch.randn(2, 2, 5, 8)
    shared_prefix_attention(query, prefix, prefix).sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()
    with torch.no_grad():
        shared_prefix_attention(query, prefix, prefix)
    assert served == ["reference"]


def test_autocast(served, monkeypatch):
    monkeypatch.setattr(attention, "_converts_halves", lambda: True)
    query, prefix = torch.randn(4, 2, 1, 8), torch.randn(2, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert shared_prefix_attention(query, prefix, prefix).dtype == torch.bfloat16
        half = query.bfloat16(), prefix.bfloat16(), prefix.bfloat16()
        assert shared_prefix_attention(*half).dtype == torch.bfloat16
        assert served == ["reference"]
        # Rotary embeddings leave keys in float32 where the values are not.
        for own in ((None, None), (query, half[0])):
            mixed = shared_prefix_attention(query, prefix, half[1], *own)
            assert mixed.dtype == torch.bfloat16
