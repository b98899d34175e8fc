"""RMS norm on the CPU, with each instruction set, against its formula in float64 and its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings

from fastgen.ops import _library
from fastgen.ops import rms_norm as module
from fastgen.ops.rms_norm import reference, rms_norm
from tests.ops.gpu.test_rms_norm import PLAIN, cases, check
from tests.ops.instructions import instruction_set

needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
instruction_sets = pytest.mark.parametrize("name", ["default", "avx2", "avx512"])


@needs_kernel
@instruction_sets
@given(case=cases)
@example(case=PLAIN | {"shape": (2, 40000), "mean": 30.0})
@example(case=PLAIN | {"shape": (300, 64)})  # several tasks
@example(case=PLAIN | {"dtype": torch.bfloat16, "shape": (2, 3, 7), "mean": 30.0})
@settings(max_examples=25)
def test_kernel(name, case):
    with instruction_set(name):
        check(case, torch.device("cpu"), rms_norm)


@given(case=cases)
@settings(max_examples=15)
def test_reference(case):
    check(case | {"dtype": torch.float64}, torch.device("cpu"), reference)


@needs_kernel
@instruction_sets
@pytest.mark.parametrize("rounds_scaled", [True, False])
@pytest.mark.parametrize("width", [1, 17, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_the_model_does(name, dtype, width, rounds_scaled):
    x, weight = torch.randn(64, width).to(dtype), torch.randn(width).to(dtype)
    with instruction_set(name):
        found = rms_norm(x, weight, 1e-5, offset=1.0, rounds_scaled=rounds_scaled)
    wanted = reference(x, weight, 1e-5, 1.0, rounds_scaled)
    # The mean is added up in another order, which may move a number to the next one before it is rounded.
    assert (found == wanted).float().mean() > 0.99
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-5)
    if width > 1:
        assert not torch.equal(found, reference(x, weight, 1e-5, 1.0, not rounds_scaled))


@needs_kernel
@instruction_sets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_none(name, dtype):
    x = torch.ones(4, 20, dtype=dtype)
    x[0, 3], x[1, 19], x[2, 2] = torch.nan, torch.inf, -torch.inf
    weight = torch.ones(20, dtype=dtype)
    with instruction_set(name):
        found = rms_norm(x, weight)
    torch.testing.assert_close(found, reference(x, weight, 1e-6), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_that_are_not_next_to_each_other(dtype):
    weight = torch.randn(14).to(dtype)[::2]
    x = torch.randn(4, 3, 10).to(dtype)[:, 1, :7]
    y = torch.randn(7, 4).to(dtype).T
    for rows in (x, y):
        torch.testing.assert_close(rms_norm(rows, weight, 1e-5), reference(rows, weight, 1e-5), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (1, 4)])
def test_a_weight_of_another_width(shape):
    with pytest.raises(ValueError, match="rms_norm: "):
        rms_norm(torch.ones(2, 4), torch.ones(shape))


def test_where_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(module, "available", lambda like: False)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert rms_norm(x, weight).equal(reference(x, weight, 1e-6))
