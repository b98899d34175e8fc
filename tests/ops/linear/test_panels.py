"""GEMM with a packed weight of 16 bits: the bits of GEMM with the widened one, and what is served.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastgen.ops import exact_cast
from fastgen.ops.linear import panels
from fastgen.ops.linear.kernels import GEMM
from tests.ops.instructions import instruction_set

pytestmark = pytest.mark.skipif(not panels.is_available(), reason="the extension was not built")

INSTRUCTION_SETS = ["avx512", "avx2", "default"]
TYPES = pytest.mark.parametrize("dtype", exact_cast.TYPES, ids=str)


def check_bits(packed: torch.Tensor, weight: torch.Tensor, rows: int, biased: bool, seed: int) -> None:
    """Those of a product with the weight, signs of zeros too, with rows that are not next to each other.

    Nothing else is written.
    """
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs + 3, generator=generator)[:, :inputs]
    bias = torch.randn(outputs, generator=generator) if biased else None
    around, expected = torch.full((rows + 2, outputs), torch.nan), torch.zeros(rows, outputs)
    torch.ops.fastgen.panels_gemm_batch_out([around[1:-1]], x, [packed], [bias])
    torch.ops.fastgen.gemm_out(expected, x, weight, bias)
    assert torch.equal(around[1:-1].view(torch.int32), expected.view(torch.int32))
    assert around[[0, -1]].isnan().all()


@TYPES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 90),
    outputs=st.integers(0, 150),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
# One row and many outputs, a sum in several parts, two tiles of rows that multiply different numbers of panels.
@example(rows=1, inputs=600, outputs=1290, biased=True, seed=0)
@example(rows=20, inputs=1711, outputs=53, biased=True, seed=0)
@example(rows=29, inputs=513, outputs=300, biased=False, seed=0)
@example(rows=64, inputs=256, outputs=64, biased=False, seed=0)
def test_the_bits_of_gemm(
    name: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    """With lines that are not next to each other."""
    weight = torch.randn(outputs, inputs + 2, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, :inputs]
    with instruction_set(name):
        check_bits(panels.pack(weight), weight.float(), rows, biased, seed + 1)


@TYPES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
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
