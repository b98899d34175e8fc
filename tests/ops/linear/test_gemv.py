"""GEMV: float16 number by number, weights in columns, AMX, and what is served.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.linear import kernels
from fastgen.ops.linear.kernels import GEMV
from tests.ops.instructions import each_set, instruction_set, needs_amx

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="the extension was not built")

# None: those that multiply pairs of bfloat16, where the machine has them.
SETS = each_set(None, "avx512", "avx2", "default")


@pytest.mark.parametrize("name", SETS)
def test_every_number_of_float16(name: str | None) -> None:
    """Denormal numbers, infinities and NaN too, read from a weight and written as a result."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    for place in (0, 17, 34):  # the last of 35 inputs are in no vector
        x, weight = torch.zeros(2, 35, dtype=torch.float16), torch.zeros(2**16, 35, dtype=torch.float16)
        x[1, place], weight[:, place] = 1, numbers
        out = torch.zeros(2, 2**16, dtype=torch.float16)
        with instruction_set(name):
            torch.ops.fastgen.gemv_out(out, x, weight, None)
        torch.testing.assert_close(out[1], numbers, rtol=0, atol=0, equal_nan=True)
    bias, weight = numbers, torch.zeros_like(weight)
    with instruction_set(name):
        torch.ops.fastgen.gemv_out(out, x, weight, bias)
    torch.testing.assert_close(out[0], numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SETS)
def test_float16_is_rounded_once_to_the_nearest(name: str | None) -> None:
    """Sums of two numbers: ties, what is denormal, and what is too large."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (2, 20000), generator=generator).to(torch.int16).view(torch.float16)
    numbers = numbers.where(numbers.isfinite(), 65504.0)
    numbers[1, ::2] = numbers[0, ::2] * 2**-11  # about half a unit in the last place, which is a tie
    for inputs in (2, 32):
        weight = torch.zeros(20000, inputs, dtype=torch.float16)
        weight[:, :2] = numbers.t()
        out = torch.zeros(1, 20000, dtype=torch.float16)
        with instruction_set(name):
            torch.ops.fastgen.gemv_out(out, torch.ones(1, inputs, dtype=torch.float16), weight, None)
        assert torch.equal(out[0], (numbers[0].float() + numbers[1].float()).half())


@needs_amx
def test_8_to_16_rows_of_bfloat16_are_multiplied_in_tiles() -> None:
    """In an order of their own, which is the same whatever their number."""
    x, weight = torch.randn(16, 1700).bfloat16(), torch.randn(53, 1700).bfloat16()
    found = GEMV.multiply(x, weight, None)
    with instruction_set("avx512"):
        expected = GEMV.multiply(x, weight, None)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    for rows in range(8, 16):
        assert torch.equal(GEMV.multiply(x[:rows], weight, None), found[:rows])
    for rows in range(1, 8):
        assert torch.equal(GEMV.multiply(x[:rows], weight, None), expected[:rows])


def test_weights_of_one_call_lie_in_one_way() -> None:
    x, rows, columns = torch.rand(2, 4), torch.rand(3, 4), torch.rand(4, 3).t()
    results = [torch.ones(2, 3) for _ in range(2)]
    with pytest.raises(RuntimeError, match="one way"):
        torch.ops.fastgen.gemv_batch_out(results, x, [rows, columns], [None, None])
    assert all((result == 1).all() for result in results)
