"""Low-bit weights in the layout of the kernels, and which kernels serve them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from fastgen import settings
from fastgen.ops.linear import choose, kernels
from fastgen.ops.linear import on_gpu as lines
from fastgen.ops.linear.kernels import GEMM
from fastgen.ops.linear.weights import Layout
from fastgen.quantization import layer_weight
from fastgen.quantization.checkpoint import QuantizedTensor, dequantized
from fastgen.quantization.formats import BLOCK_TYPES, Blocks, BlockType
from tests.noting import noted
from tests.quantization.definitions import random_weight
from tests.quantization.test_formats import blocks_of

needs_kernels = pytest.mark.skipif(choose.missing("int8") is not None, reason="no kernels")

# Inputs and groups: of the kernels' sizes; cut into smaller ones; one group for all inputs, in up to five parts; none
# of the kernels'.
SHAPES = [(128, 32), (512, 256), (1280, 256), (120, 24), (576, 192), (100, 100), (530, 530), (7, 7), (30, 10)]
FORMS = ("symmetric", "zeros", "mins", "order")
# Each shape in each form, with such bits and types that every two values of two parameters meet.
WEIGHTS = pytest.mark.parametrize(
    ("inputs", "group_size", "form", "bits", "dtype"),
    [
        (*shape, form, (4, 8)[(row + column) % 2], (torch.float32, torch.bfloat16)[(row + column // 2) % 2])
        for row, shape in enumerate(SHAPES)
        for column, form in enumerate(FORMS)
    ],
)


def _weight(inputs: int, group_size: int, bits: int, form: str) -> QuantizedTensor:
    return random_weight(
        37, inputs, bits, group_size, symmetric=form != "zeros", act_order=form == "order", mins=form == "mins"
    )


@pytest.mark.parametrize("layout", ["panels", "rows"])
@WEIGHTS
def test_nothing_is_lost(inputs, group_size, form, bits, dtype, layout, monkeypatch):
    """In the layout of the CPU, in that of GPUs, and on the way from one to the other and back."""
    weight = _weight(inputs, group_size, bits, form)
    on_cpu = layer_weight.pack(weight)
    assert layer_weight.moved(on_cpu) is on_cpu and on_cpu.layout is not Layout.ROWS
    monkeypatch.setattr(lines, "is_for", lambda device: layout == "rows")
    packed, there = layer_weight.pack(weight), layer_weight.moved(on_cpu)
    assert (packed.layout is Layout.ROWS) == (layout == "rows") and there[5:] == packed[5:]
    found = layer_weight.unpack(packed)
    assert (found.bits, found.group_size) == (bits, group_size)
    for name in ("qweight", "scales", "zeros", "mins", "order"):
        ours, theirs = getattr(found, name), getattr(weight, name)
        assert (ours is None) == (theirs is None), name
        assert theirs is None or torch.equal(ours.to(theirs.dtype), theirs), name
    some = torch.tensor([36, 0, 0, 5])
    near = 1e-6 if dtype is torch.float32 else 1e-2
    meant = dequantized(weight, torch.float32)[some].to(dtype)
    torch.testing.assert_close(layer_weight.rows(packed, some, dtype), meant, rtol=near, atol=near)
    monkeypatch.setattr(lines, "is_for", lambda device: False)
    for ours, theirs in zip(layer_weight.moved(there)[:5], on_cpu[:5], strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))


# What a type takes in memory, as a part of what it takes in the file: those of 2 and 3 bits have 4.
SIZES = {"Q4_K": 1.03, "Q5_K": 1.03, "Q3_K": 1.33, "Q2_K": 1.96}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return noted(monkeypatch, kernels, "multiply_packed", lambda x, weight, bias, floats: floats)


def is_served(inputs: int, group_size: int) -> bool:
    return group_size == inputs or group_size % 8 == 0


@needs_kernels
@WEIGHTS
def test_float_activations(inputs, group_size, form, bits, dtype, used):
    """The default: the bits of a packed product with the unpacked weight."""
    weight = _weight(inputs, group_size, bits, form)
    x, bias = torch.randn(2, 3, inputs).to(dtype), torch.randn(37).to(dtype)
    y = layer_weight.linear(x, layer_weight.pack(weight), bias)
    assert used == [True] * is_served(inputs, group_size) and y.dtype is dtype and y.shape == (2, 3, 37)
    meant = dequantized(weight, torch.float32)
    if not used:
        torch.testing.assert_close(y, F.linear(x, meant.to(dtype), bias))
        return
    # Columns, and so sums, in the order of the numbers.
    order = torch.arange(inputs) if weight.order is None else weight.order
    expected = GEMM.multiply(x.float()[..., order], meant[:, order], bias.float())
    assert torch.equal(y, expected.to(dtype))


@needs_kernels
@WEIGHTS
def test_activations_rounded_to_8_bits(inputs, group_size, form, bits, dtype, used):
    weight = _weight(inputs, group_size, bits, form)
    x, bias = torch.randn(2, 3, inputs).to(dtype), torch.randn(37).to(dtype)
    y = layer_weight.linear(x, layer_weight.pack(weight), bias, "int8")
    exact = F.linear(x.double(), dequantized(weight, torch.float64), bias.double())
    assert used == [False] * is_served(inputs, group_size) and y.dtype is dtype and y.shape == (2, 3, 37)
    size = F.linear(x.double().abs(), dequantized(weight, torch.float64).abs())
    error = (y.double() - exact).abs()
    # A 127th of the largest, which normal numbers are less than five times as small as; bfloat16 has 8 bits itself.
    assert (error <= 0.03 * size + 0.01 * exact.abs() + 1e-6).all()
    assert not used or error.max() > 0


@needs_kernels
@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_gguf_blocks(kind: BlockType, used: list[bool]) -> None:
    """In memory they take hardly more than in the file, stand for the same, and have the bits of packed products."""
    blocks, _ = blocks_of(kind, rows=64, per_row=3)
    read = Blocks(kind).read({"blocks": blocks}, 64, 3 * kind.block_size)
    packed, meant = layer_weight.pack(read), dequantized(read, torch.float32)
    assert sum(part.nbytes for part in packed if isinstance(part, Tensor)) <= SIZES.get(kind.name, 1.0) * blocks.nbytes
    assert torch.equal(dequantized(layer_weight.unpack(packed), torch.float32), meant)
    some = torch.tensor([63, 0, 33, 33])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(layer_weight.rows(packed, some, dtype), meant.to(dtype)[some])
    for rows in (1, 5, 29):
        x = torch.randn(rows, 3 * kind.block_size)
        expected = GEMM.multiply(x, meant, None)
        assert torch.equal(layer_weight.linear(x, packed, None), expected)
        rounded = layer_weight.linear(x, packed, None, "int8")
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0.02 * float((x.abs() @ meant.abs().t()).max()))
    assert used == [True, False] * 3


@needs_kernels
def test_who_says_what_activations_are(used: list[bool]) -> None:
    """The layer, or the settings; nobody who rounds them where it is not asked for."""
    packed, x = layer_weight.pack(random_weight(24, 32)), torch.randn(3, 32)
    layer_weight.linear(x, packed, None)
    with settings.changed(activations="int8"):
        layer_weight.linear(x, packed, None)
        layer_weight.linear(x, packed, None, "float")
    layer_weight.linear(x, packed, None, "int8")
    with pytest.warns(DeprecationWarning, match="few_bits_inputs is now called activations"):
        asked = settings.changed(few_bits_inputs="exact")
        with asked:
            layer_weight.linear(x, packed, None)
    assert used == [True, False, True, False, True]


@needs_kernels
def test_where_no_kernel_multiplies(used: list[bool]) -> None:
    weight = random_weight(24, 32)
    packed, x = layer_weight.pack(weight), torch.randn(3, 32)
    exact = F.linear(x, dequantized(weight, torch.float32))
    with fastgen.disabled():
        torch.testing.assert_close(layer_weight.linear(x, packed, None, "int8"), exact)
    torch.testing.assert_close(layer_weight.linear(x.double(), packed, None).float(), exact)
    assert not used


@needs_kernels
def test_zeros_whose_products_float32_does_not_hold(used: list[bool]) -> None:
    """With float activations the result would not be exact: such a weight is unpacked."""
    weight = random_weight(24, 32, 8, 16, symmetric=False, dtype=torch.float32)
    packed, x = layer_weight.pack(weight), torch.randn(3, 32)
    torch.testing.assert_close(layer_weight.linear(x, packed, None), F.linear(x, dequantized(weight, torch.float32)))
    assert not packed.takes_floats and not used
    layer_weight.linear(x, packed, None, "int8")
    assert used == [False]


def _seen(sizes: list[int], tensor: Tensor) -> Tensor:
    sizes.append(tensor.numel())
    return tensor


@needs_kernels
def test_gradients_keep_no_floating_weight(used: list[bool]) -> None:
    for form in ("zeros", "order"):
        weight = _weight(128, 32, 4, form)
        packed, meant = layer_weight.pack(weight), dequantized(weight, torch.float32)
        x, bias = torch.randn(2, 3, 128, requires_grad=True), torch.randn(37, requires_grad=True)
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(_seen, sizes), lambda tensor: tensor)
        with hooks:
            y = layer_weight.linear(x, packed, bias, "int8")
        assert max(sizes, default=0) < meant.numel()
        found = torch.autograd.grad((y * y.detach()).sum(), (x, bias))
        expected = torch.autograd.grad((F.linear(x, meant, bias) * y.detach()).sum(), (x, bias))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert used == [True, True]  # and activations stay floats


@needs_kernels
def test_autocast(used: list[bool]) -> None:
    weight, x = random_weight(24, 32), torch.randn(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer_weight.linear(x, layer_weight.pack(weight), torch.randn(24))
    assert y.dtype is torch.bfloat16 and used == [True]


@pytest.mark.parametrize("layout", ["panels", "rows"])
def test_gradients_of_the_bias_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "is_for", lambda device: layout == "rows")
    bias = torch.zeros(24, requires_grad=True)
    layer_weight.linear(torch.randn(3, 32), layer_weight.pack(random_weight(24, 32)), bias).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((24,), 3.0))


# ---- the layout for GPUs


@pytest.mark.sampled()
@WEIGHTS
def test_activations_stay_floats_on_a_gpu(inputs, group_size, form, bits, dtype, monkeypatch):
    monkeypatch.setattr(lines, "is_for", lambda device: True)
    weight, x, bias = _weight(inputs, group_size, bits, form), torch.randn(2, 3, inputs), torch.randn(37)
    packed, exact = layer_weight.pack(weight), F.linear(x, dequantized(weight, torch.float32), bias)
    near = {"rtol": 1e-4, "atol": 1e-4 * 2 ** (bits - 4)}
    for activations in ("float", "int8"):
        torch.testing.assert_close(layer_weight.linear(x, packed, bias, activations), exact, **near)
    with fastgen.disabled():
        torch.testing.assert_close(layer_weight.linear(x, packed, bias), exact, **near)
    torch.testing.assert_close(layer_weight.linear(x.double(), packed, bias.double()).float(), exact, **near)
