"""Weights in bfloat16, in tiles, and which precisions a processor serves.

What the products have in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import _library, quantized_linear
from fastgen.ops.linear import grouped
from fastgen.ops.quantized_linear import PRECISIONS
from tests.ops.instructions import instruction_set


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
