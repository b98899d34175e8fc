"""Numbers that are special, and what one kernel alone does. What all kernels have in common is in test_kernels.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastgen.ops import _library
from fastgen.ops.linear import choose, copies, weights
from fastgen.ops.linear.choose import PRECISIONS
from fastgen.ops.linear.kernels import BF16X3, GEMM, GEMV
from tests.ops.instructions import instruction_set, needs_amx
from tests.ops.linear.kernels import F16, F32, KERNELS, Kernel, cases

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="the extension was not built")

OF_16_BITS = [kernel for kernel in KERNELS if kernel.name.startswith(("panels", "gemm torch", "gemv torch.float16"))]


@cases(OF_16_BITS)
@pytest.mark.parametrize("inputs", [1, 2, 33, 35])
def test_every_number_of_16_bits(kernel: Kernel, vectors: str | None, inputs: int) -> None:
    """Denormal numbers, infinities and NaN too: read from a weight, also where it fills no vector, and from a bias."""
    dtype = torch.bfloat16 if "bfloat16" in kernel.name else F16
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in {0, inputs // 2, inputs - 1}:
        x, weight = torch.zeros(2, inputs, dtype=kernel.dtype), torch.zeros(2**16, inputs, dtype=dtype)
        x[1, place], weight[:, place] = 1, numbers
        with instruction_set(vectors):
            found = kernel.multiply(x, kernel.pack(weight).weight, None)
            added = kernel.multiply(x[:1], kernel.pack(torch.zeros_like(weight)).weight, numbers.to(kernel.dtype))
        for each in (found[1], added[0]):
            torch.testing.assert_close(each, numbers.to(kernel.dtype), rtol=0, atol=0, equal_nan=True)


@cases([kernel for kernel in KERNELS if kernel.dtype is F16])
def test_float16_is_rounded_once_to_the_nearest(kernel: Kernel, vectors: str | None) -> None:
    """Sums of two numbers: ties, what is denormal, and what is too large."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (2, 20000), generator=generator).to(torch.int16).view(F16)
    numbers = numbers.where(numbers.isfinite(), 65504.0)
    numbers[1, ::2] = numbers[0, ::2] * 2**-11  # about half a unit in the last place, which is a tie
    for inputs in (2, 32):
        weight = torch.zeros(20000, inputs, dtype=F16)
        weight[:, :2] = numbers.t()
        with instruction_set(vectors):
            found = kernel.multiply(torch.ones(1, inputs, dtype=F16), weight, None)
        assert torch.equal(found[0], (numbers[0].float() + numbers[1].float()).half())


# ---- GEMV


@needs_amx
def test_8_to_16_rows_of_bfloat16_are_multiplied_in_tiles() -> None:
    """In an order of their own, which is the same whatever their number."""
    x, weight = torch.randn(16, 1700).bfloat16(), torch.randn(53, 1700).bfloat16()
    found = GEMV.multiply(x, weight, None)
    with instruction_set("avx512"):
        expected = GEMV.multiply(x, weight, None)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    for rows in range(1, 16):
        assert torch.equal(GEMV.multiply(x[:rows], weight, None), (found if rows >= 8 else expected)[:rows])


def test_weights_of_one_call_lie_in_one_way() -> None:
    x, rows, columns = torch.rand(2, 4), torch.rand(3, 4), torch.rand(4, 3).t()
    results = [torch.ones(2, 3) for _ in range(2)]
    with pytest.raises(RuntimeError, match="one way"):
        torch.ops.fastgen.gemv_batch_out(results, x, [rows, columns], [None, None])
    assert all((result == 1).all() for result in results)


# ---- packed weights of 16 bits


def test_panels_of_several_types_with_one_input() -> None:
    """And one without outputs: the bits of each alone."""
    x, sizes = torch.randn(5, 64), (50, 7, 0, 400, 33)
    weights = [torch.randn(n, 64).to(copies.TYPES[n % 2]) for n in sizes]
    biases = [torch.randn(n) if n != 7 else None for n in sizes]
    results = [torch.full((5, n), torch.nan) for n in sizes]
    torch.ops.fastgen.panels_gemm_batch_out(results, x, [copies.panels(weight).qweight for weight in weights], biases)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        assert torch.equal(result, GEMM.multiply(x, weight.float(), bias))


# ---- bf16x3: as exact as float32, also where numbers have no parts in bfloat16


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest one, as a part of what the products come to without their signs."""
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    return float(((found - exact).abs() / size.clamp(min=1e-30)).max())


@needs_amx
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
def test_bf16x3_is_as_exact_as_torch_for_large_and_small_numbers(size: float) -> None:
    x, weight = _numbers(0, 64, 300) * size, _numbers(1, 48, 300)
    found = BF16X3.multiply(x, weight, None)
    assert _error(found, x, weight) <= max(2 * _error(F.linear(x, weight), x, weight), 2**-22)


@needs_amx
def test_bf16x3_sums_that_cancel_are_as_exact_as_those_of_torch() -> None:
    x, weight = _numbers(0, 64, 512) * 1e4, _numbers(1, 48, 512)
    x[:, 256:], weight[:, 256:] = -x[:, :256], weight[:, :256] + 1e-4 * _numbers(2, 48, 256)
    exact = x.double() @ weight.double().t()
    errors = [(y - exact).abs().max() for y in (BF16X3.multiply(x, weight, None), F.linear(x, weight))]
    assert errors[0] <= 2 * errors[1]


@needs_amx
@pytest.mark.parametrize("size", [1e-36, 1e-39, 1e-42])
def test_bf16x3_numbers_that_are_hardly_normal_count_as_zero_at_worst(size: float) -> None:
    x, weight = _numbers(0, 64, 40) * size, _numbers(1, 48, 40)
    x[:, 0] = 1.0
    found = BF16X3.multiply(x, weight, None)
    torch.testing.assert_close(found, F.linear(x, weight), rtol=2**-20, atol=0.0)
    x[:, 0] = 0.0
    assert (BF16X3.multiply(x, weight, None) - F.linear(x, weight)).abs().max() < 40 * 8 * 2**-126


@needs_amx
def test_bf16x3_sums_that_overflow_are_infinite_and_nothing_else_is() -> None:
    """Parts of the other sign must not make NaN of what is infinite."""
    x, weight = _numbers(0, 40, 70).abs(), _numbers(1, 37, 70).abs()
    x[3] *= 3e37
    x[5, 7], weight[9, 7] = -3e38, 1e3
    found, expected = BF16X3.multiply(x, weight, None), F.linear(x, weight)
    assert found.isinf().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_amx
def test_bf16x3_every_nan_is_one() -> None:
    x, weight = _numbers(0, 40, 70), _numbers(1, 37, 70)
    x[33] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)
    x[35, 69] = torch.tensor(-1, dtype=torch.int32).view(F32)
    found = BF16X3.multiply(x, weight, None)
    torch.testing.assert_close(found, F.linear(x, weight), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[33].isnan().all() and found[35].isnan().all()


@needs_amx
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, torch.finfo(F32).max])
@pytest.mark.parametrize("of_weight", [False, True])
def test_bf16x3_what_has_no_parts_is_multiplied_as_it_is(odd: float, of_weight: bool) -> None:
    x, weight, bias = torch.ones(40, 70), torch.full((37, 70), 0.25), torch.ones(37)
    (weight if of_weight else x)[33, 3] = odd
    found = BF16X3.multiply(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), equal_nan=True)


def test_a_named_instruction_set_rules_out_bf16x3() -> None:
    for name in ("avx512", "avx2", "default"):
        with instruction_set(name), pytest.raises((RuntimeError, NotImplementedError)):
            torch.ops.fastgen.bf16x3_gemm_out(torch.empty(8, 3), torch.ones(8, 5), torch.ones(3, 5), None)


# ---- `weight_dtype`: precisions, and which a processor serves


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_low_bit_weights_are_in_groups_on_every_processor(precision: str) -> None:
    """A large weight costs digits of its own group alone."""
    if choose.missing(precision) is not None:
        pytest.skip(choose.missing(precision))
    weight, x = torch.rand(70, 96), torch.rand(3, 96)
    weight[:, 0], x[:, :32] = 1000, 0
    packed = copies.pack(weight, precision, 32)
    assert isinstance(packed, weights.PackedWeight) and packed.group_size == 32
    expected = F.linear(x, weight)
    result = choose.linear(x, packed, None)
    assert ((result - expected).norm() / expected.norm()).item() < {"int8": 0.01, "int4": 0.1}[precision]


@pytest.mark.skipif(not choose.is_available(), reason="no kernels")
def test_large_inputs_cost_few_digits_in_8_bits() -> None:
    """Groups are rotated there, and only there."""
    weight, x = torch.randn(70, 256) * 0.1, torch.randn(40, 256)
    x[:, 7::64] *= 60
    exact = x.double() @ weight.double().t()

    def error(packed: weights.PackedWeight) -> float:
        return float((choose.linear(x, packed, None) - exact).norm())

    assert error(copies.pack(weight, "int8")) < 0.5 * error(copies.rounded(weight, 8, 64))
    assert error(copies.pack(weight, "int4")) == error(copies.rounded(weight, 4, 64))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_processor_without_the_instructions(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "instruction_set", lambda: choose.Isa(torch.ops.fastgen.instruction_set()))
    for narrower in ("avx2", "default") if precision == "bf16" else ("default",):
        with instruction_set(narrower):
            assert "this processor does not have AVX" in choose.unavailable(precision)
            assert f"no {precision}: this processor" in choose.precisions()
