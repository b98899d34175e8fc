"""Products with weights, and how weights are packed for them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear import copies
from fastgen.ops.linear.weights import SuperBlockScales, keeps_floats, pack, pack_super_blocks
from tests.ops.fuzz.cases import Case, maybe, of, rows_apart, size, untouched

_ops = torch.ops.fastgen
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def _layer(rng: random.Random, dtype: torch.dtype = torch.float32) -> tuple[Tensor, int, int]:
    rows = rng.choice((0, 1, 1, 2, 5, size(rng, 40), size(rng, 150)))
    inputs, outputs = size(rng, 100), size(rng, 100)
    return rows_apart(torch.randn(rows, inputs).to(dtype), rng), inputs, outputs


def _weight(rng: random.Random, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if rng.random() < 0.3:
        return torch.randn(inputs, outputs).to(dtype).t()
    return rows_apart(torch.randn(outputs, inputs).to(dtype), rng)


def _runs(name: str) -> bool:
    """Whether an operator runs on this processor, with the instruction set in force."""
    one = torch.ones(1, 1)
    try:
        getattr(_ops, name)(*([one] if name == "pack_bf16" else [one.clone(), one, one, None]))
    except RuntimeError as error:
        assert "this processor does not have" in str(error)
        return False
    return True


def _several(rng: random.Random, make: Any) -> list[Any]:
    return [make() for _ in range(rng.choice((1, 1, 2, 3)))]


@of("instruction_set")
def instruction_set(rng: random.Random) -> Case:
    return Case([])


@of("gemm_out", "gemv_out", "bf16x3_gemm_out")
def linear_out(rng: random.Random, name: str) -> Case:
    dtype = torch.float32 if name == "bf16x3_gemm_out" else rng.choice(_FLOATING)
    x, inputs, outputs = _layer(rng, dtype)
    weight, bias = _weights_of(name, rng, dtype, outputs, inputs, rng.random() < 0.3)
    refused = name == "bf16x3_gemm_out" and not _runs(name)
    given = [untouched((len(x), outputs), dtype), x, weight, bias]
    return Case(given, refused=refused)


@of("gemm_batch_out", "gemv_batch_out")
def linears_out(rng: random.Random, name: str) -> Case:
    dtype = rng.choice(_FLOATING)
    x, inputs, _ = _layer(rng, dtype)
    by_inputs = rng.random() < 0.3
    by_inputs = by_inputs and inputs > 1
    layers = _several(rng, lambda: _weights_of(name, rng, dtype, size(rng, 100, 2), inputs, by_inputs))
    ys = [untouched((len(x), len(weight)), dtype) for weight, _ in layers]
    return Case([ys, x, [weight for weight, _ in layers], [bias for _, bias in layers]])


def _weights_of(
    name: str, rng: random.Random, dtype: torch.dtype, outputs: int, inputs: int, by_inputs: bool
) -> tuple[Tensor, Tensor | None]:
    bias = maybe(rng, torch.randn(outputs).to(dtype))
    if name.startswith("bf16x3"):
        return rows_apart(torch.randn(outputs, inputs), rng), bias
    if not name.startswith("gemv"):
        return _weight(rng, outputs, inputs, dtype), bias
    if by_inputs and min(outputs, inputs) > 1:  # so that the strides say it
        return torch.randn(inputs, outputs).to(dtype).t(), bias
    return rows_apart(torch.randn(outputs, inputs).to(dtype), rng), bias


@of("expert_linear_out")
def expert_linear_out(rng: random.Random) -> Case:
    dtype = rng.choice(_FLOATING)
    x, inputs, outputs = _layer(rng, dtype)
    experts = size(rng, 12)
    weight = torch.randn(experts, inputs, outputs) if rng.random() < 0.3 else torch.randn(experts, outputs, inputs)
    weight = weight.to(dtype)
    weight = weight if weight.shape[1:] == (outputs, inputs) else weight.transpose(1, 2)
    ends = torch.tensor(sorted(rng.randint(0, len(x)) for _ in range(experts)), dtype=torch.int32)
    return Case([untouched((len(x), outputs), dtype), x, weight, ends, rng.choice((0, 1, 4, 64))])


@of("evict")
def evict(rng: random.Random) -> Case:
    x = torch.randn(size(rng), size(rng, 200, 0))
    x = x[:1].expand(rng.choice((2, 2**40)), -1) if x.numel() and rng.random() < 0.2 else x

    return Case([x])


@of("exact_cast_out")
def exact_cast_out(rng: random.Random) -> Case:
    dtype, shape = rng.choice(_FLOATING[1:]), (size(rng, 60, 0), size(rng, 60))
    fits = rng.random() < 0.7
    x = torch.randn(shape).to(dtype).float() if fits else torch.rand(shape) * 1e-3
    return Case([untouched(shape, dtype), x])


@of("pack_panels")
def pack_panels(rng: random.Random) -> Case:
    dtype = rng.choice(_FLOATING[1:])
    weight = rows_apart(torch.randn(size(rng, 100, 0), size(rng, 100)).to(dtype), rng)
    return Case([weight])


@of("panels_gemm_batch_out")
def panels_gemm_batch_out(rng: random.Random) -> Case:
    rows, inputs = rng.choice((0, 1, 3, size(rng, 70))), size(rng, 90)
    x = rows_apart(torch.randn(rows, inputs), rng)

    def layer() -> tuple[Tensor, Tensor | None]:
        weight = torch.randn(size(rng, 80), inputs).to(rng.choice(_FLOATING[1:]))
        return weight, maybe(rng, torch.randn(len(weight)))

    layers = _several(rng, layer)
    ys = [untouched((rows, len(weight))) for weight, _ in layers]
    return Case([ys, x, [_ops.pack_panels(weight) for weight, _ in layers], [bias for _, bias in layers]])


@of("pack_bf16")
def pack_bf16(rng: random.Random) -> Case:
    weight = _weight(rng, size(rng, 70), size(rng, 100))
    return Case([weight], refused=not _runs("pack_bf16"))


@of("bf16_gemm")
def bf16_gemm(rng: random.Random) -> Case:
    x, inputs, outputs = _layer(rng)
    # Tiles of 16 outputs, two of them side by side, in lines of 64 bytes.
    packed = torch.randint(0, 256, (-(-outputs // 32), -(-inputs // 32) * 64, 32), dtype=torch.uint8)
    return Case([x, packed, maybe(rng, torch.randn(outputs)), outputs], refused=not _runs("pack_bf16"))


# ---- in groups


def _grouped(rng: random.Random, inputs: int, outputs: int, bits: int, group_size: int, rotated: bool) -> Any:
    if rotated:
        return copies.rounded(torch.randn(outputs, inputs), bits, group_size, rotated=True)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // group_size)
    if groups % 8 == 0 and inputs % group_size == 0 and rng.random() < 0.7:
        octets = torch.randint(0, 64, (2, outputs, groups), dtype=torch.uint8)
        units = torch.rand(2, outputs, groups // 8).half() * 0.01
        return pack_super_blocks(numbers, SuperBlockScales(*octets, *units), bits=bits, group_size=group_size)
    scales = torch.rand(outputs, groups)
    scales = scales.half().float() if rng.random() < 0.5 else scales
    kind = rng.randrange(3)
    zeros = torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8) if kind == 1 else None
    mins = torch.randn(outputs, groups) if kind == 2 else None
    return pack(numbers, scales, zeros, mins, bits=bits, group_size=group_size)


def _group_sizes(rng: random.Random) -> tuple[int, int, int, bool]:
    """Inputs, bits, inputs of a group, and whether groups are rotated."""
    rotated = rng.random() < 0.3
    group_size = rng.choice((32, 64, 128)) if rotated else rng.choice((8, 16, 24, 32, 40, 64, 256))
    inputs = rng.choice((size(rng, 150), group_size * rng.choice((1, 2, 8))))
    more = () if rotated or group_size % 32 else (5, 6)
    return inputs, rng.choice((4, 8, *more)), group_size, rotated


@of("group_extremes")
def group_extremes(rng: random.Random) -> Case:
    inputs, _, group_size, rotated = _group_sizes(rng)
    weight = _weight(rng, size(rng, 40), inputs).to(rng.choice(_FLOATING))
    return Case([weight, group_size, rotated])


@of("round_to_panels")
def round_to_panels(rng: random.Random) -> Case:
    inputs, bits, group_size, rotated = _group_sizes(rng)
    bits = 4 if bits < 8 else 8  # weights are rounded to these alone
    weight = _weight(rng, size(rng, 70), inputs)
    scales = torch.rand(len(weight), -(-inputs // group_size)) + 0.5
    return Case([weight, scales, bits, group_size, rotated])


@of("grouped_rows")
def grouped_rows(rng: random.Random) -> Case:
    inputs, bits, group_size, _ = _group_sizes(rng)
    outputs, dtype = size(rng, 70), rng.choice(_FLOATING)
    weight = _grouped(rng, inputs, outputs, bits, group_size, False)
    which = torch.randint(0, outputs, (size(rng, 20, 0),))
    given = [torch.zeros(0, dtype=dtype), which, *weight[:4], outputs, inputs, bits, group_size]
    return Case(given)


class _Layers(NamedTuple):
    x: Tensor
    weights: list[Any]
    biases: list[Tensor | None]
    floats: bool


def _grouped_layers(rng: random.Random, count: int) -> _Layers:
    inputs, bits, group_size, rotated = _group_sizes(rng)
    rows = rng.choice((0, 1, 1, 4, size(rng, 40)))
    x = rows_apart(torch.randn(rows, inputs).to(rng.choice(_FLOATING)), rng)
    order = torch.randperm(inputs) if not rotated and rng.random() < 0.3 else None
    sizes = inputs, bits, group_size, rotated
    weights = [_grouped(rng, inputs, size(rng, 70), *sizes[1:])._replace(order=order) for _ in range(count)]
    biases = [maybe(rng, torch.randn(weight.n).to(rng.choice(_FLOATING))) for weight in weights]
    floats = all(map(keeps_floats, weights)) and rng.random() < 0.6
    return _Layers(x, weights, biases, floats)


@of("grouped_linear", "grouped_linear_out")
def grouped_linear(rng: random.Random, name: str) -> Case:
    x, (weight,), (bias,), floats = _grouped_layers(rng, 1)
    sizes = [weight.bits, weight.group_size, weight.rotated, floats]
    if name == "grouped_linear":
        return Case([x, *weight[:5], bias, weight.n, *sizes])
    return Case([untouched((len(x), weight.n), x.dtype), x, *weight[:5], bias, *sizes])


@of("grouped_linear_batch_out")
def grouped_linear_batch_out(rng: random.Random) -> Case:
    x, weights, biases, floats = _grouped_layers(rng, rng.choice((1, 2, 3)))
    first = weights[0]
    # All have mins and zeros of their own.
    parts = [[weight[number] for weight in weights] for number in range(4)]
    ys = [untouched((len(x), weight.n), x.dtype) for weight in weights]
    return Case([ys, x, *parts, first.order, biases, first.bits, first.group_size, first.rotated, floats])
