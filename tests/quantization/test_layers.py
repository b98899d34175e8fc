"""Layers on low-bit weights: what they compute, keep, save and load."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen.decoding.captured.program import Program
from fastgen.ops.linear import choose
from fastgen.ops.linear import on_gpu as lines
from fastgen.ops.linear.weights import Layout
from fastgen.quantization import layer_weight, layers
from fastgen.quantization.checkpoint import Format, QuantizedTensor, dequantized
from fastgen.quantization.formats import BLOCK_TYPES, GPTQ, Blocks, PackQuantized
from fastgen.quantization.layers import QuantizedEmbedding, QuantizedLinear, Unpacked, keeps_bits
from tests.noting import noted
from tests.quantization import definitions
from tests.quantization.definitions import random_weight


def linear(
    weight: QuantizedTensor,
    form: Format | None = None,
    tensors: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
) -> QuantizedLinear:
    """A layer that has been loaded as the library loads one: its parameters are replaced, and then packed."""
    form, tensors = form or GPTQ(symmetric=False), tensors or definitions.gptq(weight)
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    outputs, inputs = weight.qweight.shape
    layer = QuantizedLinear(outputs, inputs, form, meta, dtype, bias=parameter)
    assert layer.state_dict().keys() == tensors.keys() | ({"bias"} if bias is not None else set())
    for name, tensor in tensors.items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    layer.pack()
    return layer


def test_which_models_keep_bits() -> None:
    layer = linear(random_weight(24, 32))
    assert keeps_bits(nn.Sequential(nn.Linear(3, 3), layer)) and not keeps_bits(nn.Linear(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (0, 32), (1, 32), (2, 5, 32), (3, 0, 32)])
@pytest.mark.parametrize("act_order", [False, True])
def test_product(act_order: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, bias = random_weight(24, 32, symmetric=False, act_order=act_order, scale=0.1), torch.randn(24)
    layer = linear(weight, dtype=dtype, bias=bias.to(dtype))
    x = torch.randn(shape).to(dtype)
    # Sums and weights are in float32, whatever x is.
    expected = F.linear(x.float(), dequantized(weight, torch.float32), bias.to(dtype).float())
    torch.testing.assert_close(layer(x), expected.to(dtype))
    assert layer(x).dtype == dtype


def test_product_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight is in floating point piece by piece."""
    weight, x = random_weight(24, 32, symmetric=False), torch.randn(3, 32)
    layer = linear(weight, bias=torch.randn(24))
    whole = layer(x)
    monkeypatch.setattr(layer_weight, "_CHUNK", 32 * 5)
    torch.testing.assert_close(layer(x), whole)


@pytest.mark.parametrize(
    "transform",
    [torch.func.vmap, torch.func.jacrev, torch.func.jacfwd, lambda f: torch.func.grad(lambda x: f(x).square().sum())],
    ids=["vmap", "jacrev", "jacfwd", "grad"],
)
@pytest.mark.parametrize("act_order", [False, True])
def test_transforms(act_order: bool, transform: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
    weight, x = random_weight(24, 32, symmetric=False, act_order=act_order), torch.randn(3, 32)
    layer = linear(weight, bias=torch.randn(24))
    torch.testing.assert_close(transform(layer)(x), transform(layer.dequantize())(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_take_their_bits(bits: int) -> None:
    layer = linear(random_weight(64, 1024, bits, 128))
    assert list(nn.ModuleList([layer]).parameters()) == [] and len(list(layer.parameters())) == 1
    size = sum(buffer.nbytes for buffer in layer.buffers())
    assert size == layer.nbytes <= 1.15 * 64 * 1024 * bits / 8


def test_not_loaded() -> None:
    meta = {name: tensor.to("meta") for name, tensor in definitions.gptq(random_weight(8, 32)).items()}
    layer = QuantizedLinear(8, 32, GPTQ(), meta, torch.float32)
    assert layer.weight.is_meta and layer.weight.shape == (8, 32)  # which the library may initialise
    with pytest.raises(RuntimeError, match="has not been loaded"):
        layer(torch.randn(1, 32))


def test_state_dict_holds_the_file() -> None:
    weight = random_weight(8, 32, symmetric=False, act_order=True)
    tensors = definitions.gptq(weight)
    layer = linear(weight, bias=torch.randn(8))
    saved = layer.state_dict()
    assert saved.keys() == {*tensors, "bias"}
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    other = linear(random_weight(8, 32, symmetric=False), bias=torch.zeros(8))
    assert other.load_state_dict(saved).missing_keys == []
    x = torch.randn(2, 32)
    assert torch.equal(other(x), layer(x))


def test_state_dict_that_does_not_fit() -> None:
    layer = linear(random_weight(8, 32))
    before, x = copy.deepcopy(layer), torch.randn(2, 32)
    saved = layer.state_dict()
    with pytest.raises(RuntimeError, match="qweight is int32"):
        layer.load_state_dict({**saved, "qweight": saved["qweight"][:, :4]})
    with pytest.raises(RuntimeError, match="Missing key.*scales"):
        layer.load_state_dict({name: tensor for name, tensor in saved.items() if name != "scales"})
    with pytest.raises(RuntimeError, match="Unexpected key.*more"):
        layer.load_state_dict({**saved, "more": torch.zeros(1)})
    assert torch.equal(layer(x), before(x))


def blocks(rows: int, dtype: torch.dtype = torch.float32) -> tuple[QuantizedEmbedding, Tensor]:
    kind = BLOCK_TYPES[8]
    data = torch.randint(0, 256, (rows, 2, 34), dtype=torch.uint8)
    data[:, :, :2] = torch.tensor([0.25], dtype=torch.float16).view(torch.uint8)
    stored = data.flatten(1)
    layer = QuantizedEmbedding(rows, 64, Blocks(kind), {"blocks": stored.to("meta")}, dtype, padding_idx=1)
    layer.blocks = nn.Parameter(stored, requires_grad=False)
    layer.pack()
    return layer, data[:, :, 2:].contiguous().view(torch.int8).float().flatten(1) * 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (2, 0)])
def test_embedding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, weight = blocks(9)
    tokens, found = torch.randint(0, 9, shape), layer.to(dtype)
    assert torch.equal(found(tokens), F.embedding(tokens, weight.to(dtype))) and found(tokens).dtype is dtype
    with pytest.raises(IndexError):
        layer(torch.tensor([9]))


def test_blocks_are_saved_as_an_ordinary_weight() -> None:
    """And not unpacked before somebody needs the numbers."""
    layer, weight = blocks(9)
    saved = layer.state_dict()
    assert saved.keys() == nn.Embedding(9, 64).state_dict().keys()
    assert type(saved["weight"]) is Unpacked and saved["weight"]._unpacked_once.cache_info().currsize == 0
    assert torch.equal(saved["weight"], weight)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    found = torch.load(buffer)
    assert type(found["weight"]) is Tensor and torch.equal(found["weight"], weight)
    plain = nn.Embedding(9, 64)
    plain.load_state_dict(saved)
    assert torch.equal(plain.weight, weight)


def test_blocks_take_no_other_numbers() -> None:
    layer, weight = blocks(9)
    assert layer.load_state_dict({"weight": weight.clone()}).missing_keys == []
    for other in (weight + 1, weight[:4]):
        with pytest.raises(RuntimeError, match="take no other values: call model.dequantize"):
            layer.load_state_dict({"weight": other})
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        layer.load_state_dict({})
    assert torch.equal(layer.weight, weight)


def test_sharing() -> None:
    embedding, weight = blocks(9)
    head = QuantizedLinear(9, 64, embedding.form, {}, torch.float32)
    head.share(embedding)
    x = torch.randn(2, 64)
    torch.testing.assert_close(head(x), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert head.packed_qweight.data_ptr() == embedding.packed_qweight.data_ptr()
    both = nn.ModuleList([embedding, head]).to(torch.bfloat16)
    assert both[0].packed_qweight.data_ptr() == both[1].packed_qweight.data_ptr()


def test_to_another_type() -> None:
    """Scales stay as they are; results, and what they are added to, do not."""
    weight = random_weight(8, 32, dtype=torch.float16)
    layer = linear(weight, PackQuantized(), definitions.pack_quantized(weight), bias=torch.zeros(8))
    layer.to(torch.bfloat16)
    assert torch.equal(layer_weight.unpack(layer.packed).scales, weight.scales)
    assert layer.packed_scales.dtype == torch.float16
    assert layer.bias is not None and layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    embedding, _ = blocks(3)
    assert embedding.half()(torch.tensor([1])).dtype == torch.float16


def test_copies_and_dequantized() -> None:
    weight = random_weight(8, 32, symmetric=False, act_order=True)
    layer, x = linear(weight, bias=torch.randn(8)), torch.randn(2, 32)
    plain = layer.dequantize()
    assert type(plain) is nn.Linear and plain.state_dict().keys() == {"weight", "bias"}
    assert torch.equal(plain.weight, dequantized(weight, torch.float32))
    torch.testing.assert_close(plain(x), layer(x))
    duplicate = copy.deepcopy(layer)
    assert torch.equal(duplicate(x), layer(x))
    assert duplicate.packed_qweight.data_ptr() != layer.packed_qweight.data_ptr()
    embedding, values = blocks(3)
    assert type(embedding.dequantize()) is nn.Embedding and torch.equal(embedding.dequantize().weight, values)


def test_code_that_asks_what_a_weight_is_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 compares the type of a weight with that of its input, in every step."""
    weight = random_weight(24, 32, symmetric=False)
    layer, count = linear(weight, dtype=torch.bfloat16), noted(monkeypatch, layer_weight, "unpack")
    found = layer.weight
    assert isinstance(found, Tensor) and found.dtype is torch.bfloat16
    assert (found.shape, found.device.type, found.dim(), found.numel()) == ((24, 32), "cpu", 2, 24 * 32)
    assert not count
    expected = dequantized(weight, torch.bfloat16)
    assert torch.equal(found + 0, expected) and torch.equal(F.linear(torch.eye(32).bfloat16(), found).t(), expected)
    assert len(count) == 1


@pytest.mark.skipif(not choose.is_available(), reason="no kernels")
def test_an_embedding_in_a_recorded_step() -> None:
    weight = random_weight(50, 32, dtype=torch.float16)
    form, tensors = GPTQ(), definitions.gptq(weight)
    layer = QuantizedEmbedding(50, 32, form, {n: t.to("meta") for n, t in tensors.items()}, torch.float32)
    for name, tensor in tensors.items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    layer.pack()
    tokens, found, program = torch.tensor([[3], [49]]), torch.zeros(2, 1, 32), Program()
    program.capture(lambda: found.copy_(layer(tokens)))
    for values in ([[3], [49]], [[0], [7]]):
        tokens.copy_(torch.tensor(values))
        program.replay()
        assert torch.equal(found, layer(tokens)) and found.abs().sum() > 0


def test_what_is_tied_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, weight = blocks(9)
    head = QuantizedLinear(9, 64, embedding.form, {}, torch.float32)
    head.share(embedding)
    before = embedding.packed.qweight
    monkeypatch.setattr(lines, "is_for", lambda device: True)
    for layer in (head, embedding):  # as `_apply` does when the device is of another kind
        layer._keep(layer._moved_from(before))
    assert head.packed.layout is Layout.ROWS
    assert head.packed.qweight.data_ptr() == embedding.packed.qweight.data_ptr()
    x, tokens = torch.randn(2, 64), torch.tensor([8, 0])
    torch.testing.assert_close(head(x), F.linear(x, weight))
    assert torch.equal(embedding(tokens), weight[tokens])
    del head, embedding, layer, before
    assert not layers._moved


def test_a_model_on_no_device_keeps_its_layout() -> None:
    layer = linear(random_weight(8, 32))
    sizes = layer.sizes
    assert nn.Sequential(layer).to("meta")[0].sizes == sizes
