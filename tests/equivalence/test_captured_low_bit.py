"""Weights of 4 and 8 bits in captured steps on a GPU, or in a simulated graph with the layout for GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen import settings
from fastgen.decoding import derived_weights, layers
from fastgen.decoding.captured import graph
from fastgen.ops import gpu as operators
from fastgen.ops.linear import choose, on_gpu
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.quantized import replacing
from fastgen.quantization import layer_weight
from fastgen.quantization.checkpoint import QuantizedTensor
from fastgen.quantization.formats import BLOCK_TYPES, Blocks, PackQuantized
from tests.equivalence.captured import BEAMS, GREEDY, CalledGraph, build, captures, reasons, to, two
from tests.equivalence.check import assert_same, run
from tests.equivalence.models import BY_NAME
from tests.noting import noted


@pytest.fixture(autouse=True)
def as_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, weights are packed in rows. Those of tiny models count."""
    if device.type != "cuda":
        monkeypatch.setattr(on_gpu, "is_for", lambda device: True)
        monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    monkeypatch.setattr(layers, "MIN_NARROW", 0)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each low-bit product."""
    return noted(monkeypatch, on_gpu, "multiply", lambda x, *more: x.numel() // x.shape[-1])


def random_grouped(outputs: int, inputs: int, bits: int, form: str, device: torch.device) -> QuantizedTensor:
    size = next(size for size in (32, 16, 8, 1) if inputs % size == 0)
    shape = outputs, inputs // size
    qweight = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(shape) + 0.5) * 0.5 / 2**bits
    zeros = torch.randint(0, 2**bits, shape, dtype=torch.uint8) if form == "zeros" else None
    mins = -scales * 2 ** (bits - 1) if form == "mins" else None
    order = torch.randperm(inputs) if form == "zeros" else None
    moved = [None if part is None else part.to(device) for part in (qweight, scales, zeros, mins)]
    return QuantizedTensor(*moved, bits, size, None if order is None else order.to(device))


def make_low_bit(model: Any, bits: int, form: str) -> None:
    """Every linear layer, and what is tied to one, gets random low-bit weights."""
    by_weight: dict[int, Any] = {}
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, nn.Embedding) or "pos" in name:
            continue
        if isinstance(module, nn.Embedding) and module.weight.shape != model.get_output_embeddings().weight.shape:
            continue
        outputs, inputs = module.weight.shape
        layer = replacing.replacement(module, PackQuantized(), {}).train(module.training)
        if id(module.weight) in by_weight:
            layer.share(by_weight[id(module.weight)])
        else:
            weight = random_grouped(outputs, inputs, bits, form, module.weight.device)
            layer._keep(layer_weight.pack(weight))
            by_weight[id(module.weight)] = layer
        model.set_submodule(name, layer)


def in_floating_point(model: Any) -> Any:
    plain = copy.deepcopy(model)
    for name, layer in replacing.quantized_layers(plain).items():
        plain.set_submodule(name, layer.dequantize())
    return plain


def check(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """The original code runs the model in floating point."""
    with fastgen.disabled():
        expected = run(in_floating_point(model), inputs, options)
    assert_same(expected.cpu(), run(model, inputs, options).cpu())


@two
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize(("bits", "form"), [(4, "zeros"), (8, "middle")])
def test_low_bit_layers(
    family: Any, options: dict[str, Any], bits: int, form: str, device: torch.device, rows: list[int], replays: list
) -> None:
    model, inputs = build(family, device)
    make_low_bit(model, bits, form)
    check(model, inputs, options)
    assert captures() == 1 and replays, reasons()
    assert rows and min(rows) <= on_gpu.MAX_ROWS


def test_models_that_are_moved(device: torch.device, rows: list[int]) -> None:
    """From the layout of one kind of device to that of the other, and back; tied weights stay one."""
    if device.type != "cuda":
        pytest.skip("needs another device than the CPU")
    model, inputs = build(BY_NAME["llama"], torch.device("cpu"))
    make_low_bit(model, 4, "zeros")
    with fastgen.disabled():
        expected = run(in_floating_point(model), inputs, GREEDY).cpu()
    there = {name: tensor.to(device) for name, tensor in inputs.items()}
    assert_same(expected, run(model.to(device), there, GREEDY).cpu())
    layers_there = replacing.quantized_layers(model).values()
    assert rows and {layer.packed.sizes.layout for layer in layers_there} == {"rows"}
    with fastgen.disabled():
        assert_same(expected, run(in_floating_point(model.cpu()), inputs, GREEDY).cpu())


def test_more_rows_than_the_kernel_takes(
    device: torch.device, rows: list[int], monkeypatch: pytest.MonkeyPatch, replays: list[None]
) -> None:
    """The step unpacks the weight."""
    monkeypatch.setattr(on_gpu, "MAX_ROWS", 0)
    model, inputs = build(BY_NAME["llama"], device)
    make_low_bit(model, 4, "zeros")
    check(model, inputs, GREEDY)
    assert captures() == 1 and replays and rows


def rounded(model: Any, bits: int, group_size: int) -> Any:
    """The model in floating point with the weights of its linear layers rounded."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if type(module) is nn.Linear:
            weight = on_gpu.rounded(module.weight, bits, group_size)
            every = torch.arange(weight.n, device=module.weight.device)
            # Not in place: the embedding, which is not rounded, may share it.
            module.weight = nn.Parameter(on_gpu.rows(weight, every, module.weight.dtype), requires_grad=False)
    return plain


@two
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights(family: Any, precision: str, device: torch.device, rows: list[int], replays: list) -> None:
    """`weight_dtype`, with kept weights: a step is used again, unless a weight has changed."""
    model, inputs = build(family, device)
    asked = settings.changed(weight_dtype=precision, weight_group_size=32, packed_weights="keep", strict=True)

    def expected() -> Tensor:
        with fastgen.disabled():
            return run(rounded(model, 4 if precision == "int4" else 8, 32), inputs, GREEDY)

    before = expected()
    with asked:
        for _ in range(2):
            assert_same(before, run(model, inputs, GREEDY))
    assert captures() == 2 and replays and rows, reasons()
    assert fastgen.stats()[f"{precision} weights"]["accelerated"] >= 1
    with torch.no_grad():
        next(module for module in model.modules() if type(module) is nn.Linear).weight.mul_(-3.0)
    after = expected()
    with settings.changed(weight_dtype=precision, weight_group_size=32, packed_weights="keep"):
        assert_same(after, run(model, inputs, GREEDY))
    derived_weights.drop_all()


def test_rounded_weights_that_are_not_kept(device: torch.device, rows: list[int]) -> None:
    model, inputs = build(BY_NAME["llama"], device)
    with fastgen.disabled():
        expected = run(rounded(model, 8, 64), inputs, GREEDY)
    with settings.changed(weight_dtype="int8", packed_weights="call"):
        assert_same(expected, run(model, inputs, GREEDY))
    assert rows and captures() == 0 and any("not kept" in reason for reason in reasons())


def test_with_the_kernels(device: torch.device, kernels: None, rows: list[int], monkeypatch: Any) -> None:
    """Triton's, interpreted without a GPU: steps are called there."""
    if device.type != "cuda":
        monkeypatch.setattr(graph, "Graph", CalledGraph)
        monkeypatch.setattr(operators, "is_interpreted", lambda: True)
    monkeypatch.setattr(loop, "MIN_STEPS", 1)
    model, _ = build(BY_NAME["llama"], device)
    make_low_bit(model, 4, "zeros")
    few = to(device, BY_NAME["llama"].make_inputs(1, 3))  # the interpreter is slow
    check(model, few, {**GREEDY, "max_new_tokens": 3})
    assert captures() == 1 and rows, reasons()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_an_embedding(dtype: torch.dtype, device: torch.device) -> None:
    """Tokens are looked up without waiting for the device."""
    kind = BLOCK_TYPES[8]
    data = torch.randint(0, 256, (9, 2, 34), dtype=torch.uint8)
    data[:, :, :2] = torch.tensor([0.25], dtype=torch.float16).view(torch.uint8)
    embedding = replacing.replacement(nn.Embedding(9, 64, dtype=dtype), Blocks(kind), {"blocks": data.flatten(1)})
    embedding.to(device).pack()
    tokens, found = torch.tensor([[3], [8]], device=device), torch.zeros(2, 1, 64, dtype=dtype, device=device)
    made = graph.Graph(device)
    made.capture(lambda: found.copy_(embedding(tokens)))
    for values in ([[3], [8]], [[0], [7]]):
        tokens.copy_(torch.tensor(values, device=device))
        made.replay()
        wanted = embedding.dequantized()[tokens]
        assert torch.equal(found, wanted) and wanted.abs().sum() > 0
