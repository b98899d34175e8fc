"""Layer norm and RMS norm against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import triton as package
from fastgen.ops.triton import norm
from fastgen.ops.triton.norm import layer_norm, rms_norm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "rms": st.booleans(),
        "shape": st.sampled_from(
            [(1,), (3, 1), (2, 3, 7), (5, 64), (2, 768), (1, 1, 1025), (3, 5120), (1, 16384), (0, 8)]
        ),
        "weight": st.booleans(),
        "bias": st.booleans(),
        "residual": st.booleans(),
        "summed": st.sampled_from([None, "new", "x", "residual"]),
        "mean": st.sampled_from([0.0, 30.0]),
        "offset": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2**31),
    }
)
PLAIN = {
    "dtype": torch.float32, "rms": False, "shape": (3, 64), "weight": True, "bias": True, "residual": True,
    "summed": "new", "mean": 0.0, "offset": 0.0, "seed": 0,
}  # fmt: skip


def check(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    dtype, width = case["dtype"], case["shape"][-1]

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    x = tensor(*case["shape"]) + case["mean"]
    residual = tensor(*case["shape"]) if case["residual"] else None
    weight = tensor(width) if case["weight"] else None
    bias = tensor(width) if case["bias"] and not case["rms"] else None
    offset = case["offset"] if case["rms"] else 0.0

    total = (x if residual is None else x + residual).double()
    if residual is not None and dtype == torch.bfloat16 and package.is_interpreted():
        # The interpreter does not round to bfloat16: it cuts off.
        total = ((x.float() + residual.float()).view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    value = total if case["rms"] else total - total.mean(-1, keepdim=True)
    wanted = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if weight is not None:
        wanted = wanted * (weight.double() + offset)
    if bias is not None:
        wanted = wanted + bias.double()

    places = {None: None, "new": torch.full_like(x, math.nan), "x": x, "residual": residual}
    summed = places[case["summed"]]
    out = torch.full_like(x, math.nan)
    options = {"residual": residual, "out": out, "summed": summed}
    if case["rms"]:
        result = rms_norm(x, weight, 1e-5, offset=offset, **options)
    else:
        result = layer_norm(x, weight, bias, 1e-5, **options)
    assert result is out
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=5 * tolerance)
    if summed is not None:
        torch.testing.assert_close(summed.double(), total, rtol=0, atol=0)


@given(case=cases)
@example(case=PLAIN | {"shape": (2, 16385)})  # more than one block
@example(case=PLAIN | {"shape": (2, 40000), "mean": 30.0, "summed": "x"})
@example(case=PLAIN | {"shape": (1, 20000), "rms": True, "summed": "residual", "dtype": torch.bfloat16})
@example(case=PLAIN | {"mean": 100.0})
@example(case=PLAIN | {"dtype": torch.bfloat16, "shape": (2, 3, 7), "mean": 30.0})
@settings(max_examples=30)
def test_kernel(case, device, kernels):
    check(case, device)


@given(case=cases)
@settings(max_examples=30)
def test_reference(case, device):
    check(case | {"dtype": torch.float64}, device)


@pytest.mark.parametrize("width", [64, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_before_the_weight(width, dtype, device, kernels):
    if dtype is torch.bfloat16 and package.is_interpreted():
        pytest.skip("the interpreter does not round to bfloat16: it cuts off")
    x, weight = torch.randn(3, width, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
    scaled = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    found = rms_norm(x, weight, 1e-5, rounds_scaled=True)
    wanted = scaled * weight
    # The mean is added up in another order, which may move a number to the next one before it is rounded.
    assert (found == wanted).float().mean() > (0.99 if dtype is not torch.float32 else 0)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)
    if dtype is torch.float16:
        assert not torch.equal(rms_norm(x, weight, 1e-5), wanted)


def test_a_weight_that_is_a_column(device, kernels):
    x, weight = torch.randn(3, 10, device=device), torch.randn(10, 2, device=device)[:, 0]
    torch.testing.assert_close(rms_norm(x, weight), rms_norm(x, weight.contiguous()))


@pytest.mark.parametrize("rms", [False, True])
def test_rows_that_are_not_next_to_each_other(rms, device, kernels):
    x = torch.randn(4, 3, 10, device=device)[:, 1, :7]
    operator, other = (rms_norm, norm.reference) if rms else (layer_norm, norm.reference)
    torch.testing.assert_close(operator(x, eps=1e-5), other(x, None, None, 1e-5, rms=rms)[0])
    y = torch.randn(7, 4, device=device).T
    torch.testing.assert_close(operator(y, eps=1e-5), other(y, None, None, 1e-5, rms=rms)[0])


@pytest.mark.parametrize(
    "changes", [{"weight": torch.ones(5)}, {"bias": torch.ones(1, 4)}, {"residual": torch.ones(4)}]
)
def test_wrong_arguments(changes):
    with pytest.raises(ValueError, match="norm: "):
        layer_norm(torch.ones(2, 4), **changes)
