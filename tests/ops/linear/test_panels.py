"""GEMM with a packed weight of 16 bits: every number, and weights of several types in one call.

That it has the bits of GEMM is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import exact_cast
from fastgen.ops.linear import panels
from fastgen.ops.linear.kernels import GEMM
from tests.ops.instructions import each_set, instruction_set

pytestmark = pytest.mark.skipif(not panels.is_available(), reason="the extension was not built")

TYPES = pytest.mark.parametrize("dtype", exact_cast.TYPES, ids=str)


@TYPES
@pytest.mark.parametrize("name", each_set("avx512", "avx2", "default"))
@pytest.mark.parametrize("inputs", [1, 2, 33])
def test_every_number(name: str, dtype: torch.dtype, inputs: int) -> None:
    """In the place of each of two inputs; with one input alone, what fills up the pair changes nothing."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in {0, inputs - 1}:
        weight = torch.zeros(2**16, inputs, dtype=dtype)
        weight[:, place] = numbers
        with instruction_set(name):
            out = panels.panels_gemm(torch.ones(1, inputs), panels.pack(weight), None, 2**16)
        torch.testing.assert_close(out[0], numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_several_weights_with_one_input() -> None:
    """Of all types, and one without outputs: the bits of each alone."""
    x, sizes = torch.randn(5, 64), (50, 7, 0, 400, 33)
    weights = [torch.randn(n, 64).to(exact_cast.TYPES[n % 2]) for n in sizes]
    packed = [*map(panels.pack, weights)]
    biases = [torch.randn(n) if n != 7 else None for n in sizes]
    results = [torch.full((5, n), torch.nan) for n in sizes]
    torch.ops.fastgen.panels_gemm_batch_out(results, x, packed, biases)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        assert torch.equal(result, GEMM.multiply(x, weight.float(), bias))
