"""Weights of few bits in the layout of the kernels, and which products they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from fastgen import settings
from fastgen.ops import grouped_linear
from fastgen.ops.triton import grouped_linear as lines
from fastgen.quantization import products
from fastgen.quantization.gguf import BLOCK_TYPES, Blocks
from fastgen.quantization.grouped import GroupedWeight, dequantized
from tests.quantization.definitions import random_weight
from tests.quantization.test_formats import blocks_of

needs_kernels = pytest.mark.skipif(grouped_linear.unavailable() is not None, reason="no kernels")

# Inputs and groups: of the kernels' sizes; cut into smaller ones; one group for all inputs; none of the kernels'.
SHAPES = [(128, 32), (512, 256), (120, 24), (576, 192), (100, 100), (7, 7), (30, 10)]


def _weight(inputs: int, group_size: int, bits: int, form: str) -> GroupedWeight:
    weight = random_weight(37, inputs, bits, group_size, symmetric=form != "zeros", act_order=form == "order")
    if form == "minimums":
        return weight._replace(zeros=None, minimums=torch.randn(weight.scales.shape).to(weight.scales.dtype))
    return weight


@pytest.mark.parametrize("form", ["symmetric", "zeros", "minimums", "order"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_nothing_is_lost(inputs: int, group_size: int, bits: int, form: str) -> None:
    weight = _weight(inputs, group_size, bits, form)
    found = products.unpack(products.pack(weight))
    assert (found.bits, found.group_size) == (bits, group_size)
    for name in ("numbers", "scales", "zeros", "minimums", "order"):
        ours, theirs = getattr(found, name), getattr(weight, name)
        assert (ours is None) == (theirs is None), name
        assert theirs is None or torch.equal(ours.to(theirs.dtype), theirs), name
    some = torch.tensor([36, 0, 0, 5])
    assert torch.equal(
        products.rows(products.pack(weight), some, torch.float32), dequantized(weight, torch.float32)[some]
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_gguf_blocks_keep_their_size(name: str) -> None:
    """In memory they take hardly more than in the file, and stand for the same."""
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    blocks, _ = blocks_of(kind, rows=64, per_row=3)
    read = Blocks(kind).read({"blocks": blocks}, 64, 3 * kind.numbers)
    packed = products.pack(read)
    size = sum(part.nbytes for part in packed if isinstance(part, Tensor))
    assert size <= 1.03 * blocks.nbytes
    meant = dequantized(read, torch.float32)
    assert torch.equal(dequantized(products.unpack(packed), torch.float32), meant)
    some = torch.tensor([63, 0, 33, 33])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(products.rows(packed, some, dtype), meant.to(dtype)[some])
    x = torch.randn(5, 3 * kind.numbers)
    with settings.changed(few_bits_inputs="exact"):
        torch.testing.assert_close(products.multiply(x, packed, None), x @ meant.t())


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often the kernels are used. Inputs may be rounded."""
    used: list[Tensor] = []
    kernel = grouped_linear.grouped_linear
    monkeypatch.setattr(grouped_linear, "grouped_linear", lambda x, *more: (used.append(x), kernel(x, *more))[1])
    with settings.changed(few_bits_inputs="int8"):
        yield used


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["symmetric", "zeros", "minimums", "order"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_inputs_are_rounded_to_8_bits(
    inputs: int, group_size: int, bits: int, form: str, dtype: torch.dtype, rounded: list[Tensor]
) -> None:
    weight = _weight(inputs, group_size, bits, form)
    x, bias = torch.randn(2, 3, inputs).to(dtype), torch.randn(37).to(dtype)
    y = products.multiply(x, products.pack(weight), bias)
    exact = F.linear(x.double(), dequantized(weight, torch.float64), bias.double())
    is_served = group_size == inputs or group_size % 8 == 0
    assert len(rounded) == is_served and y.dtype is dtype and y.shape == (2, 3, 37)
    size = F.linear(x.double().abs(), dequantized(weight, torch.float64).abs())
    error = (y.double() - exact).abs()
    # A 127th of the largest, which normal numbers are less than five times as small as; bfloat16 has 8 bits itself.
    assert (error <= 0.03 * size + 0.01 * exact.abs() + 1e-6).all()
    assert not is_served or error.max() > 0


@needs_kernels
def test_where_inputs_stay_as_they_are(rounded: list[Tensor]) -> None:
    weight = random_weight(24, 32)
    packed, x = products.pack(weight), torch.randn(3, 32)
    exact = F.linear(x, dequantized(weight, torch.float32))
    with fastgen.disabled():
        torch.testing.assert_close(products.multiply(x, packed, None), exact)
    with settings.changed(few_bits_inputs="exact"):
        torch.testing.assert_close(products.multiply(x, packed, None), exact)
    torch.testing.assert_close(products.multiply(x.requires_grad_(), packed, None), exact)
    torch.testing.assert_close(products.multiply(x.detach().double(), packed, None).float(), exact)
    assert not rounded
    with torch.no_grad():
        products.multiply(x, packed, None)
    assert len(rounded) == 1


@pytest.mark.parametrize("layout", ["panels", "lines"])
def test_gradients_of_the_bias_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "is_for", lambda device: layout == "lines")
    bias = torch.zeros(24, requires_grad=True)
    with settings.changed(few_bits_inputs="int8"):
        products.multiply(torch.randn(3, 32), products.pack(random_weight(24, 32)), bias).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((24,), 3.0))
