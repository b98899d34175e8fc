"""GEMM on the weight as it is: one order of sums, whichever way the numbers are laid out.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.linear import kernels
from fastgen.ops.linear.kernels import GEMM
from tests.ops.instructions import each_set, instruction_set, zen5

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="the extension was not built")

SETS = each_set("avx512", "avx2", "default")


@pytest.mark.parametrize("backend", SETS)
@pytest.mark.parametrize("rows", [1, 9, 70, 128, 129, 200])
@pytest.mark.parametrize("inputs", [37, 513])
def test_every_layout_of_a_weight_gives_the_same_bits(backend: str, rows: int, inputs: int) -> None:
    """Whether the rows are laid out or pieces of the weight, which the layout and the number of rows decide."""
    x, weight, bias = torch.randn(rows, inputs), torch.randn(97, inputs), torch.randn(97)
    with instruction_set(backend):
        expected = GEMM.multiply(x, weight, bias)
        columns = weight.t().contiguous().t()
        gaps = torch.stack((weight, weight), dim=2)[:, :, 1]
        for each in (columns, gaps, torch.cat((weight, weight), dim=1)[:, inputs:]):
            assert torch.equal(GEMM.multiply(x, each, bias), expected)
    torch.testing.assert_close(
        expected.double(), x.double() @ weight.double().t() + bias, atol=2e-6 * inputs, rtol=1e-5
    )


@pytest.mark.parametrize("backend", SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float32_result_rounded_once(dtype: torch.dtype, backend: str) -> None:
    for rows, outputs, inputs in ((1, 97, 37), (9, 5, 513), (130, 48, 256), (1030, 17, 300)):
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
        x[0, 0] = torch.inf if rows == 9 else 6e-8  # in float16 a subnormal number
        with instruction_set(backend):
            for given in (bias, None):
                expected = GEMM.multiply(x.float(), weight.float(), None if given is None else given.float()).to(dtype)
                for each in (weight, weight.t().contiguous().t(), torch.cat((weight, weight), dim=1)[:, inputs:]):
                    assert torch.equal(GEMM.multiply(x, each, given), expected)


@pytest.mark.parametrize("rows", [1, 9, 18, 28, 40, 49])
@pytest.mark.parametrize("inputs", [37, 300])
@pytest.mark.parametrize("backend", SETS)
def test_weights_are_loaded_in_several_ways_with_the_same_result(backend: str, inputs: int, rows: int) -> None:
    """One element of a line at a time, or four as on Zen 5. With AVX-512; otherwise both are the same."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, 75))
    results = []
    with instruction_set(backend):
        for is_so in (True, False):
            with zen5(is_so):
                results.append(GEMM.multiply(x, weight, None))
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].double(), x.double() @ weight.double().t(), atol=2e-6 * inputs, rtol=1e-5)


def test_a_weight_of_any_strides() -> None:
    weight, x = torch.randn(60, 3, 1800), torch.randn(5, 600)
    for part in (
        weight[:, 1, ::3],
        weight[::2, 0, 10:610],
        weight[:, 2, ::3].clone().t().contiguous().t()[::2],
        torch.randn(7, 1).expand(7, 600),
        torch.randn(1, 600).expand(70, 600),
        torch.randn(700).unfold(0, 600, 1),
    ):
        result = GEMM.multiply(x, part, None)
        assert torch.equal(result, GEMM.multiply(x, part.clone(), None))
        torch.testing.assert_close(result.double(), x.double() @ part.t().double(), atol=1e-3, rtol=1e-5)
