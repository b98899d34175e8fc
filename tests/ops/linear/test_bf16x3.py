"""bf16x3: as exact as float32, also where numbers have no parts in bfloat16, and what is served.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastgen.ops.linear.kernels import BF16X3
from tests.ops.instructions import instruction_set, needs_amx


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The largest one, as a part of what the products come to without their signs."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    return float(((found - exact).abs() / size.clamp(min=1e-30)).max()) if found.numel() else 0.0


@needs_amx
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
def test_is_as_exact_as_torch_for_large_and_small_numbers(size: float) -> None:
    x, weight = _numbers(0, 64, 300) * size, _numbers(1, 48, 300)
    found = BF16X3.multiply(x, weight, None)
    assert _error(found, x, weight, None) <= max(2 * _error(F.linear(x, weight), x, weight, None), 2**-22)


@needs_amx
def test_sums_that_cancel_are_as_exact_as_those_of_torch() -> None:
    x, weight = _numbers(0, 64, 512) * 1e4, _numbers(1, 48, 512)
    x[:, 256:], weight[:, 256:] = -x[:, :256], weight[:, :256] + 1e-4 * _numbers(2, 48, 256)
    exact = x.double() @ weight.double().t()
    errors = [(y - exact).abs().max() for y in (BF16X3.multiply(x, weight, None), F.linear(x, weight))]
    assert errors[0] <= 2 * errors[1]


@needs_amx
@pytest.mark.parametrize("size", [1e-36, 1e-39, 1e-42])
def test_numbers_that_are_hardly_normal_count_as_zero_at_worst(size: float) -> None:
    x, weight = _numbers(0, 64, 40) * size, _numbers(1, 48, 40)
    x[:, 0] = 1.0
    found = BF16X3.multiply(x, weight, None)
    torch.testing.assert_close(found, F.linear(x, weight), rtol=2**-20, atol=0.0)
    x[:, 0] = 0.0
    assert (BF16X3.multiply(x, weight, None) - F.linear(x, weight)).abs().max() < 40 * 8 * 2**-126


@needs_amx
def test_sums_that_overflow_are_infinite_and_nothing_else_is() -> None:
    """Parts of the other sign must not make NaN of what is infinite."""
    x, weight = _numbers(0, 40, 70).abs(), _numbers(1, 37, 70).abs()
    x[3] *= 3e37
    x[5, 7], weight[9, 7] = -3e38, 1e3
    found, expected = BF16X3.multiply(x, weight, None), F.linear(x, weight)
    assert found.isinf().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_amx
def test_every_nan_is_one() -> None:
    x, weight = _numbers(0, 40, 70), _numbers(1, 37, 70)
    x[33] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x[35, 69] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    found = BF16X3.multiply(x, weight, None)
    torch.testing.assert_close(found, F.linear(x, weight), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[33].isnan().all() and found[35].isnan().all()


@needs_amx
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("of_weight", [False, True])
def test_what_has_no_parts_is_multiplied_as_it_is(odd: float, of_weight: bool) -> None:
    x, weight, bias = torch.ones(40, 70), torch.full((37, 70), 0.25), torch.ones(37)
    (weight if of_weight else x)[33, 3] = odd
    found = BF16X3.multiply(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), equal_nan=True)


def test_a_named_instruction_set_rules_it_out() -> None:
    for name in ("avx512", "avx2", "default"):
        with instruction_set(name), pytest.raises((RuntimeError, NotImplementedError)):
            torch.ops.fastgen.bf16x3_gemm_out(torch.empty(8, 3), torch.ones(8, 5), torch.ones(3, 5), None)
