"""RMS norm against its formula: the reference, the CPU's kernel with each instruction set, and Triton's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import _library
from fastgen.ops import gpu as package
from fastgen.ops import rms_norm as module
from fastgen.ops.gpu.launches import launch_rms_norm
from fastgen.ops.rms_norm import reference, rms_norm
from tests.ops.instructions import each_set, instruction_set

HALF = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Norm(NamedTuple):
    call: Callable[..., torch.Tensor]
    device: torch.device
    # Triton's interpreter does not round to bfloat16: it cuts off.
    cuts_off: bool = False


@pytest.fixture(params=["reference", *each_set("default", "avx2", "avx512"), "triton"], scope="session")
def norm(request: pytest.FixtureRequest, device: torch.device) -> Norm:
    if request.param == "triton":
        request.getfixturevalue("kernels")
        return Norm(launch_rms_norm, device, package.is_interpreted())
    if request.param == "reference":
        return Norm(reference, device)
    if _library.load("CPU"):
        pytest.skip(_library.load("CPU"))

    def kernel(x, weight, eps=1e-6, offset=0.0, rounds_scaled=False):
        with instruction_set(request.param):
            return rms_norm(x, weight, eps, offset=offset, rounds_scaled=rounds_scaled)

    return Norm(kernel, torch.device("cpu"))


PLAIN = {"dtype": torch.float32, "shape": (3, 64), "mean": 0.0, "offset": 0.0, "seed": 0}


@given(
    case=st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([torch.float32, *HALF]),
            "shape": st.sampled_from(
                [(1,), (3, 1), (2, 3, 7), (5, 64), (2, 768), (1, 1, 1025), (3, 5120), (1, 16384), (0, 8)]
            ),
            "mean": st.sampled_from([0.0, 30.0]),
            "offset": st.sampled_from([0.0, 1.0]),
            "seed": st.integers(0, 2**31),
        }
    )
)
@example(case=PLAIN | {"shape": (2, 16385)})  # more than one block
@example(case=PLAIN | {"shape": (2, 40000), "mean": 30.0})
@example(case=PLAIN | {"shape": (300, 64)})  # several tasks
@example(case=PLAIN | {"shape": (1, 20000), "dtype": torch.bfloat16, "offset": 1.0})
@example(case=PLAIN | {"dtype": torch.bfloat16, "shape": (2, 3, 7), "mean": 30.0})
@settings(max_examples=15)
def test_formula(norm, case):
    """In float64; the reference is exact in that type, too."""
    generator = torch.Generator().manual_seed(case["seed"])
    dtype = torch.float64 if norm.call is reference else case["dtype"]

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(norm.device, dtype)

    x, weight = tensor(*case["shape"]) + case["mean"], tensor(case["shape"][-1])
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    result = norm.call(x, weight, 1e-5, case["offset"])
    assert result.dtype is dtype and result.shape == x.shape
    wanted = scaled * (weight.double() + case["offset"])
    torch.testing.assert_close(result.double(), wanted, rtol=TOLERANCE[dtype], atol=5 * TOLERANCE[dtype])


@pytest.mark.parametrize("rounds_scaled", [True, False])
@pytest.mark.parametrize("width", [1, 17, 576, 20000])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_rounds_where_the_model_does(norm, dtype, width, rounds_scaled):
    if dtype is torch.bfloat16 and norm.cuts_off:
        pytest.skip("the interpreter does not round to bfloat16: it cuts off")
    x, weight = (torch.randn(*shape, device=norm.device).to(dtype) for shape in ((16, width), (width,)))
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    wanted, other = (((each * (weight.float() + 1)).to(dtype)) for each in (scaled.to(dtype).float(), scaled))
    if not rounds_scaled:
        wanted, other = other, wanted
    found = norm.call(x, weight, 1e-5, 1.0, rounds_scaled)
    # The mean is added up in another order, which may move a number to the next one before it is rounded.
    assert (found == wanted).float().mean() > 0.99
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-5)
    assert width == 1 or not torch.equal(found, other)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_numbers_that_are_none(norm, dtype):
    x, weight = torch.ones(4, 20, dtype=dtype, device=norm.device), torch.ones(20, dtype=dtype, device=norm.device)
    x[0, 3], x[1, 19], x[2, 2] = torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(norm.call(x, weight, 1e-6), reference(x, weight, 1e-6), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_numbers_that_are_not_next_to_each_other(norm, dtype):
    weight = torch.randn(7, 2, device=norm.device).to(dtype)[:, 0]
    for x in (
        torch.randn(4, 3, 10, device=norm.device).to(dtype)[:, 1, :7],
        torch.randn(7, 4, device=norm.device).to(dtype).T,
        torch.randn(2, 7, 4, device=norm.device).to(dtype).transpose(1, 2)[:, :3],
    ):
        wanted = reference(x.clone(memory_format=torch.contiguous_format), weight.clone(), 1e-5)
        torch.testing.assert_close(norm.call(x, weight, 1e-5), wanted, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (1, 4)])
def test_a_weight_of_another_width(shape):
    with pytest.raises(ValueError, match="rms_norm: "):
        rms_norm(torch.ones(2, 4), torch.ones(shape))


def test_where_there_is_no_kernel(monkeypatch):
    """Nor for a type, or for two types."""
    x, weight = torch.randn(3, 8), torch.randn(8)
    for one, other in ((x.double(), weight.double()), (x, weight.half())):
        assert rms_norm(one, other).equal(reference(one, other, 1e-6))
    monkeypatch.setattr(module, "available", lambda like: False)
    assert rms_norm(x, weight).equal(reference(x, weight, 1e-6))
