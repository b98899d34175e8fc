"""Weights in bfloat16, in tiles, and which precisions a processor serves.

What the products have in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import _library, quantized_linear
from fastgen.ops.linear import grouped
from fastgen.ops.quantized_linear import PRECISIONS
from tests.ops import quantized_reference
from tests.ops.instructions import instruction_set, needs_amx, needs_avx512_bf16


@needs_avx512_bf16
@pytest.mark.parametrize(("outputs", "inputs"), [(75, 130), (1, 1), (32, 64), (33, 31)])
def test_tiles_are_those_of_the_reference(outputs: int, inputs: int) -> None:
    """Which is what the fuzzer compares with (tests/ops/fuzz)."""
    weight = torch.randn(outputs, inputs)
    packed, reference = quantized_linear.pack(weight, "bf16"), quantized_reference.pack_bf16(weight)
    assert packed.n == outputs and torch.equal(packed.panels, reference)
    assert torch.equal(quantized_reference._laid_out(reference, inputs, outputs), weight.bfloat16())


@needs_amx
def test_amx_tiles_give_what_vectors_give() -> None:
    x, packed = torch.randn(70, 300), quantized_linear.pack(torch.randn(77, 300), "bf16")
    found = quantized_linear.quantized_linear(x, packed, None)
    with instruction_set("avx512"):
        torch.testing.assert_close(quantized_linear.quantized_linear(x, packed, None), found, atol=1e-4, rtol=1e-5)


@needs_avx512_bf16
def test_what_does_not_fit_is_refused() -> None:
    packed = quantized_linear.pack(torch.randn(20, 10), "bf16")
    for x, bias, outputs in (
        (torch.randn(3, 100), None, 20),
        (torch.randn(3, 10), None, 2000),
        (torch.randn(3, 10), torch.randn(19), 20),
        (torch.randn(3, 10).double(), None, 20),
    ):
        with pytest.raises(RuntimeError):
            quantized_linear.quantized_linear(x, packed._replace(n=outputs), bias)
    for weight in (torch.randn(3), torch.randn(3, 4).half(), torch.zeros(0, 4)):
        with pytest.raises(RuntimeError, match="weight must be"):
            quantized_linear.pack(weight, "bf16")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_low_bit_weights_are_in_groups_on_every_processor(precision: str) -> None:
    """A large weight costs digits of its own group alone."""
    if quantized_linear._missing(precision) is not None:
        pytest.skip(quantized_linear._missing(precision))
    weight, x = torch.rand(70, 96), torch.rand(3, 96)
    weight[:, 0], x[:, :32] = 1000, 0
    packed = quantized_linear.pack(weight, precision, 32)
    assert isinstance(packed, grouped.PackedWeight) and packed.group_size == 32
    expected = torch.nn.functional.linear(x, weight)
    result = quantized_linear.quantized_linear(x, packed, None)
    assert ((result - expected).norm() / expected.norm()).item() < {"int8": 0.01, "int4": 0.1}[precision]


@pytest.mark.skipif(not grouped.is_available(), reason="no kernels")
def test_large_inputs_cost_few_digits_in_8_bits() -> None:
    """Groups are rotated there, and only there."""
    weight, x = torch.randn(70, 256) * 0.1, torch.randn(40, 256)
    x[:, 7::64] *= 60
    exact = x.double() @ weight.double().t()

    def error(packed: grouped.PackedWeight) -> float:
        return float((quantized_linear.quantized_linear(x, packed, None) - exact).norm())

    assert error(quantized_linear.pack(weight, "int8")) < 0.5 * error(grouped.rounded(weight, 8, 64))
    assert error(quantized_linear.pack(weight, "int4")) == error(grouped.rounded(weight, 4, 64))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_processor_without_the_instructions(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if _library.load("CPU"):
        pytest.skip(_library.load("CPU"))
    if precision != "bf16":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    for narrower in ("avx2", "default"):
        with instruction_set(narrower):
            assert "this processor does not have AVX" in quantized_linear.unavailable(precision)
            assert f"no {precision}: this processor" in quantized_linear.backend()
