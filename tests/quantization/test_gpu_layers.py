"""Low-bit weights in the layout for GPUs: the same layers, and moves from one kind of device to another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastgen
from fastgen import settings
from fastgen.ops.gpu import grouped_linear as lines
from fastgen.quantization import layer_weight, layers
from fastgen.quantization.layers import QuantizedLinear
from fastgen.quantization.quantized_tensor import dequantized
from tests.quantization.definitions import random_weight
from tests.quantization.test_layer_weight import SHAPES, _weight
from tests.quantization.test_layers import blocks, linear


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "is_for", lambda device: True)


@pytest.mark.parametrize("form", ["symmetric", "zeros", "mins", "order"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_nothing_is_lost(as_on_a_gpu: None, inputs: int, group_size: int, bits: int, form: str) -> None:
    weight = _weight(inputs, group_size, bits, form)
    packed = layer_weight.pack(weight)
    found = layer_weight.unpack(packed)
    assert packed.sizes.layout == "rows" and (found.bits, found.group_size) == (bits, group_size)
    for name in ("qweight", "scales", "zeros", "mins", "order"):
        ours, theirs = getattr(found, name), getattr(weight, name)
        assert (ours is None) == (theirs is None), name
        assert theirs is None or (torch.equal(ours, theirs) and ours.dtype is theirs.dtype), name
    some = torch.tensor([36, 0, 0, 5])
    torch.testing.assert_close(
        layer_weight.rows(packed, some, torch.float32), dequantized(weight, torch.float32)[some], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("inputs_are", ["int8", "float"])
@pytest.mark.parametrize("form", ["symmetric", "zeros", "mins", "order"])
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_inputs_are_not_rounded(as_on_a_gpu: None, inputs: int, group_size: int, form: str, inputs_are: str) -> None:
    weight, x, bias = _weight(inputs, group_size, 4, form), torch.randn(2, 3, inputs), torch.randn(37)
    with settings.changed(activations=inputs_are):
        found = layer_weight.linear(x, layer_weight.pack(weight), bias)
    torch.testing.assert_close(found, F.linear(x, dequantized(weight, torch.float32), bias), rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_serve(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = layer_weight.pack(random_weight(24, 32)), torch.randn(3, 32)
    exact = layer_weight.linear(x, packed, None)
    monkeypatch.setattr(lines, "grouped_linear", None)
    with fastgen.disabled():
        torch.testing.assert_close(layer_weight.linear(x, packed, None), exact)
    torch.testing.assert_close(layer_weight.linear(x.detach().double(), packed, None).float(), exact)


@pytest.mark.parametrize("form", ["symmetric", "zeros", "mins", "order"])
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_there_and_back(monkeypatch: pytest.MonkeyPatch, inputs: int, group_size: int, form: str) -> None:
    weight = _weight(inputs, group_size, 4, form)
    packed = layer_weight.pack(weight)
    assert layer_weight.moved(packed) is packed and packed.sizes.layout != "rows"
    monkeypatch.setattr(lines, "is_for", lambda device: True)
    there = layer_weight.moved(packed)
    assert there.sizes.layout == "rows" and layer_weight.moved(there) is there
    monkeypatch.setattr(lines, "is_for", lambda device: False)
    back = layer_weight.moved(there)
    assert back.sizes == packed.sizes
    for ours, theirs in zip(back[:5], packed[:5], strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))


def test_what_is_tied_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, weight = blocks(9)
    head = QuantizedLinear(9, 64, embedding.form, {}, torch.float32)
    head.share(embedding)
    before = embedding.packed.qweight
    monkeypatch.setattr(lines, "is_for", lambda device: True)
    for layer in (head, embedding):  # as `_apply` does when the device is of another kind
        layer._keep(layer._moved_from(before))
    assert head.packed.sizes.layout == "rows"
    assert head.packed.qweight.data_ptr() == embedding.packed.qweight.data_ptr()
    x, tokens = torch.randn(2, 64), torch.tensor([8, 0])
    torch.testing.assert_close(head(x), F.linear(x, weight))
    assert torch.equal(embedding(tokens), weight[tokens])
    del head, embedding, layer, before
    assert not layers._moved


def test_a_model_on_no_device_keeps_its_layout() -> None:
    layer = linear(random_weight(8, 32))
    layout = layer.packed.sizes
    assert nn.Sequential(layer).to("meta")[0].packed.sizes == layout
