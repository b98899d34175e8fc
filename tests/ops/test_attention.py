"""Shared-prefix attention against ordinary attention in float64 on the repeated tensors."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.ops.attention import shared_prefix_attention, shared_prefix_context, shared_prefix_scores

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "copies": st.integers(1, 5),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "queries": st.integers(1, 3),
        "prefix": st.integers(1, 40),
        "suffix": st.integers(0, 9),
        "dim": st.sampled_from([1, 8, 32, 80]),
        "value_dim": st.sampled_from([1, 8, 64]),
        "mask": st.sampled_from(["none", "bool", "additive", "per head"]),
        "scale": st.sampled_from([None, 1.0, 0.3]),
        "seed": st.integers(0, 2**31),
    }
)


def draw(case, dtype, device):
    """Random inputs in `dtype`, and the repeated keys and values, of the shapes that `case` describes."""
    generator = torch.Generator().manual_seed(case["seed"])

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    rows, heads = case["batch"] * case["copies"], case["kv_heads"] * case["group"]
    query = tensor(rows, heads, case["queries"], case["dim"])
    parts = []
    for width in (case["dim"], case["value_dim"]):
        prefix = tensor(case["batch"], case["kv_heads"], case["prefix"], width)
        suffix = tensor(rows, case["kv_heads"], case["suffix"], width) if case["suffix"] else None
        full = prefix.repeat_interleave(case["copies"], dim=0)
        parts.append((prefix, suffix, full if suffix is None else torch.cat([full, suffix], dim=2)))
    length = case["prefix"] + case["suffix"]
    mask = None
    if case["mask"] == "bool":
        mask = torch.rand(rows, 1, case["queries"], length, generator=generator).to(device) > 0.4
        mask[..., 0] = True
    elif case["mask"] != "none":
        mask = tensor(rows, 1 if case["mask"] == "additive" else heads, case["queries"], length)
    return query, *parts, mask


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(case=shapes)
@settings(max_examples=60, deadline=None)
def test_equals_attention_on_the_full_tensors(case, dtype, device):
    query, (pk, sk, keys), (pv, sv, values), mask = draw(case, dtype, device)
    # With large scores the rounding of half-precision scores, not the operator, decides the result.
    scale = case["scale"] if dtype.itemsize > 2 else None
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = F.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=exact, scale=scale, enable_gqa=True
    )
    result = shared_prefix_attention(query, pk, pv, sk, sv, mask=mask, scale=scale)
    assert result.dtype == dtype and result.shape == expected.shape
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@given(case=shapes)
@settings(max_examples=40, deadline=None)
def test_scores_and_context_equal_products_with_the_full_tensors(case, device):
    query, (pk, sk, keys), (pv, sv, values), _ = draw(case, torch.float64, device)
    keys, values = (full.repeat_interleave(case["group"], dim=1) for full in (keys, values))
    scores = shared_prefix_scores(query, pk, sk)
    torch.testing.assert_close(scores, query @ keys.transpose(-1, -2))
    torch.testing.assert_close(shared_prefix_context(scores, pv, sv), scores @ values)


def test_a_row_that_may_attend_to_nothing_gives_zeros(device):
    query = torch.randn(4, 2, 1, 8, device=device)
    prefix = torch.randn(2, 2, 5, 8, device=device)
    mask = torch.ones(4, 1, 1, 5, dtype=torch.bool, device=device)
    mask[1] = False
    result = shared_prefix_attention(query, prefix, prefix, mask=mask)
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    assert result.isfinite().all()


def test_inputs_are_left_alone(device):
    tensors = [torch.randn(4, 2, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(4, 2, 3, 8)]
    query, pk, pv, suffix = (tensor.to(device) for tensor in tensors)
    mask = torch.randn(4, 1, 1, 8, device=device)
    before = [tensor.clone() for tensor in (query, pk, pv, suffix, mask)]
    shared_prefix_attention(query, pk, pv, suffix, suffix, mask=mask)
    for tensor, old in zip((query, pk, pv, suffix, mask), before, strict=True):
        assert torch.equal(tensor, old)
