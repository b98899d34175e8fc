"""Products with weights, and how weights are packed for them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.linear import choose, grouped
from tests.ops import quantized_reference
from tests.ops.fuzz import cases
from tests.ops.fuzz.cases import Case, maybe, of, rows_apart, same, size, untouched

_ops = torch.ops.fastgen
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float16: 4e-3}.get(dtype, 2e-2)


def _layer(rng: random.Random, dtype: torch.dtype = torch.float32) -> tuple[Tensor, int, int]:
    rows = rng.choice((0, 1, 1, 2, 5, size(rng, 40), size(rng, 150)))
    inputs, outputs = size(rng, 100), size(rng, 100)
    return rows_apart(torch.randn(rows, inputs).to(dtype), rng), inputs, outputs


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def _weight(rng: random.Random, outputs: int, inputs: int) -> Tensor:
    """Stored by outputs, by inputs, or with gaps."""
    if rng.random() < 0.3:
        return torch.randn(inputs, outputs).t()
    return rows_apart(torch.randn(outputs, inputs), rng)


def near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Sums of numbers of about 1 may come to much less, and are not as exact then."""
    cases.near(found, wanted, tolerance, least=1.0)


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
    return Case([], lambda args, found: choose.Isa(found))


@of("gemm_out", "gemv_out", "bf16x3_gemm_out")
def linear_out(rng: random.Random, name: str) -> Case:
    dtype = rng.choice(_FLOATING) if name == "gemv_out" else torch.float32
    x, inputs, outputs = _layer(rng, dtype)
    weight, bias = _weights_of(name, rng, dtype, outputs, inputs, rng.random() < 0.3)
    wanted, tolerance = _product(x, weight, bias), _tolerance(dtype)
    refused = name == "bf16x3_gemm_out" and not _runs(name)
    given = [untouched((len(x), outputs), dtype), x, weight, bias]
    return Case(given, lambda args, _: near(args[0], wanted, tolerance), refused)


@of("gemm_batch_out", "gemv_batch_out")
def linears_out(rng: random.Random, name: str) -> Case:
    dtype = rng.choice(_FLOATING) if name == "gemv_batch_out" else torch.float32
    x, inputs, _ = _layer(rng, dtype)
    by_inputs = rng.random() < 0.3
    by_inputs = by_inputs and inputs > 1
    layers = _several(rng, lambda: _weights_of(name, rng, dtype, size(rng, 100, 2), inputs, by_inputs))
    wanted = [_product(x, *layer) for layer in layers]

    def check(args: list[Any], _: Any) -> None:
        for y, expected in zip(args[0], wanted, strict=True):
            near(y, expected, _tolerance(dtype))

    ys = [untouched((len(x), len(weight)), dtype) for weight, _ in layers]
    return Case([ys, x, [weight for weight, _ in layers], [bias for _, bias in layers]], check)


def _weights_of(
    name: str, rng: random.Random, dtype: torch.dtype, outputs: int, inputs: int, by_inputs: bool
) -> tuple[Tensor, Tensor | None]:
    bias = maybe(rng, torch.randn(outputs).to(dtype))
    if name.startswith("bf16x3"):
        return rows_apart(torch.randn(outputs, inputs), rng), bias
    if not name.startswith("gemv"):
        return _weight(rng, outputs, inputs), bias
    if dtype is torch.float32 and by_inputs and min(outputs, inputs) > 1:  # so that the strides say it
        return torch.randn(inputs, outputs).t(), bias
    return rows_apart(torch.randn(outputs, inputs).to(dtype), rng), bias


@of("evict")
def evict(rng: random.Random) -> Case:
    x = torch.randn(size(rng), size(rng, 200, 0))
    x = x[:1].expand(rng.choice((2, 2**40)), -1) if x.numel() and rng.random() < 0.2 else x

    def check(args: list[Any], evicted: bool) -> None:
        assert isinstance(evicted, bool)

    return Case([x], check)


@of("exact_cast_out")
def exact_cast_out(rng: random.Random) -> Case:
    dtype, shape = rng.choice(_FLOATING[1:]), (size(rng, 60, 0), size(rng, 60))
    fits = rng.random() < 0.7
    x = torch.randn(shape).to(dtype).float() if fits else torch.rand(shape) * 1e-3
    is_same = bool(torch.equal(x.to(dtype).float(), x))

    def check(args: list[Any], found: bool) -> None:
        assert found == is_same
        if is_same:
            same(args[0], x.to(dtype))

    return Case([untouched(shape, dtype), x], check)


@of("pack_panels")
def pack_panels(rng: random.Random) -> Case:
    dtype = rng.choice(_FLOATING[1:])
    weight = rows_apart(torch.randn(size(rng, 100, 0), size(rng, 100)).to(dtype), rng)
    outputs, inputs = weight.shape

    def check(args: list[Any], packed: Tensor) -> None:
        panels, pairs, width = packed.shape
        # A pair of inputs is next to each other in bfloat16. In float16, all first ones come before all second ones.
        by_pairs = packed.view(panels, pairs, width // 2, 2)
        if dtype is torch.float16:
            by_pairs = packed.view(panels, pairs, 2, width // 2).transpose(2, 3)
        lines = by_pairs.permute(0, 2, 1, 3).reshape(-1, 2 * pairs)
        same(lines[:outputs, :inputs], weight.contiguous())

    return Case([weight], check)


@of("panels_gemm_batch_out")
def panels_gemm_batch_out(rng: random.Random) -> Case:
    rows, inputs = rng.choice((0, 1, 3, size(rng, 70))), size(rng, 90)
    x = rows_apart(torch.randn(rows, inputs), rng)

    def layer() -> tuple[Tensor, Tensor, Tensor | None]:
        outputs = size(rng, 80)
        bias = maybe(rng, torch.randn(outputs))
        narrow = torch.randn(outputs, inputs).to(rng.choice(_FLOATING[1:]))
        return narrow.float(), _ops.pack_panels(narrow), bias

    layers = _several(rng, layer)
    wanted = [_product(x, weight, bias) for weight, _, bias in layers]

    def check(args: list[Any], _: Any) -> None:
        for y, expected in zip(args[0], wanted, strict=True):
            near(y, expected, 2e-5)

    ys = [untouched((rows, len(weight))) for weight, _, _ in layers]
    return Case([ys, x, [packed for _, packed, _ in layers], [bias for _, _, bias in layers]], check)


@of("pack_bf16")
def pack_bf16(rng: random.Random) -> Case:
    weight = _weight(rng, size(rng, 70), size(rng, 100))
    wanted = quantized_reference.pack_bf16(weight)
    refused = not _runs("pack_bf16")
    return Case([weight], lambda args, packed: same(packed, wanted), refused)


@of("bf16_gemm")
def bf16_gemm(rng: random.Random) -> Case:
    x, inputs, outputs = _layer(rng)
    packed, bias = quantized_reference.pack_bf16(torch.randn(outputs, inputs)), maybe(rng, torch.randn(outputs))
    wanted = quantized_reference.bf16_gemm(x, packed, bias, outputs)
    refused = not _runs("pack_bf16")
    return Case([x, packed, bias, outputs], lambda args, y: near(y, wanted, 2e-5), refused)


# ---- in groups


def _grouped(rng: random.Random, inputs: int, outputs: int, bits: int, group_size: int, rotated: bool) -> Any:
    if rotated:
        return grouped.rounded(torch.randn(outputs, inputs), bits, group_size, rotated=True)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // group_size)
    if groups % 8 == 0 and inputs % group_size == 0 and rng.random() < 0.7:
        octets = torch.randint(0, 64, (2, outputs, groups), dtype=torch.uint8)
        units = torch.rand(2, outputs, groups // 8).half() * 0.01
        return grouped.pack_super_blocks(
            numbers, grouped.SuperBlockScales(*octets, *units), bits=bits, group_size=group_size
        )
    scales = torch.rand(outputs, groups)
    scales = scales.half().float() if rng.random() < 0.5 else scales
    kind = rng.randrange(3)
    zeros = torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8) if kind == 1 else None
    mins = torch.randn(outputs, groups) if kind == 2 else None
    return grouped.pack(numbers, scales, zeros, mins, bits=bits, group_size=group_size)


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
    whole = F.pad(weight.float(), (0, -inputs % group_size))
    groups = (grouped.rotated(whole, group_size) if rotated else whole).unflatten(1, (-1, group_size))
    wanted = torch.stack([groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)])
    return Case([weight, group_size, rotated], lambda args, found: near(found, wanted, 1e-5))


@of("round_to_panels")
def round_to_panels(rng: random.Random) -> Case:
    inputs, bits, group_size, rotated = _group_sizes(rng)
    bits = 4 if bits < 8 else 8  # weights are rounded to these alone
    weight = _weight(rng, size(rng, 70), inputs)
    outputs = len(weight)
    lines = grouped.rotated(F.pad(weight, (0, -inputs % group_size)), group_size) if rotated else weight
    scales = torch.rand(outputs, -(-inputs // group_size)) + 0.5
    exact = lines / scales.repeat_interleave(group_size, dim=1)[:, : lines.shape[1]] + 2 ** (bits - 1)

    def check(args: list[Any], packed: Tensor) -> None:
        like = grouped.PackedWeight(
            packed, torch.ones(len(packed), scales.shape[1], 32), None, None, None, outputs, inputs, bits, group_size,
            rotated,
        )  # fmt: skip
        numbers, _ = grouped.unpacked(like)
        wanted = exact.clamp(0, 2**bits - 1)
        assert ((numbers - wanted).abs() <= 0.501).all()

    return Case([weight, scales, bits, group_size, rotated], check)


@of("grouped_rows")
def grouped_rows(rng: random.Random) -> Case:
    inputs, bits, group_size, _ = _group_sizes(rng)
    outputs, dtype = size(rng, 70), rng.choice(_FLOATING)
    weight = _grouped(rng, inputs, outputs, bits, group_size, False)
    which = torch.randint(0, outputs, (size(rng, 20, 0),))
    wanted = grouped.dequantized(weight, dtype, which)
    given = [torch.zeros(0, dtype=dtype), which, *weight[:4], outputs, inputs, bits, group_size]
    return Case(given, lambda args, found: near(found, wanted, max(_tolerance(dtype), 1e-6)))


def _ordered(x: Tensor, weight: Any) -> Tensor:
    return x.double() if weight.order is None else x.double()[:, weight.order]


def _rounded_rows(x: Tensor, weight: Any) -> Tensor:
    """What the products compute with: x in multiples of a 127th of the largest number of its group."""
    whole = F.pad(_ordered(x, weight), (0, -x.shape[1] % weight.group_size))
    if weight.rotated:
        whole = grouped.rotated(whole, weight.group_size) / weight.group_size
    groups = whole.unflatten(1, (-1, weight.group_size))
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    return torch.where(scale > 0, (groups / scale).round() * scale, 0.0).flatten(1)


def _grouped_wanted(x: Tensor, weight: Any, bias: Tensor | None, floats: bool) -> Tensor:
    numbers, factors = grouped.unpacked(weight)
    lines = grouped.values(numbers, factors, weight.bits, weight.group_size).double()
    rows = F.pad(_ordered(x, weight), (0, lines.shape[1] - x.shape[1])) if floats else _rounded_rows(x, weight)
    wanted = rows[:, : lines.shape[1]] @ lines.t()
    return wanted if bias is None else wanted + bias.double()


class _Layers(NamedTuple):
    x: Tensor
    weights: list[Any]
    biases: list[Tensor | None]
    floats: bool
    wanted: list[Tensor]


def _grouped_layers(rng: random.Random, count: int) -> _Layers:
    inputs, bits, group_size, rotated = _group_sizes(rng)
    rows = rng.choice((0, 1, 1, 4, size(rng, 40)))
    x = rows_apart(torch.randn(rows, inputs).to(rng.choice(_FLOATING)), rng)
    order = torch.randperm(inputs) if not rotated and rng.random() < 0.3 else None
    sizes = inputs, bits, group_size, rotated
    weights = [_grouped(rng, inputs, size(rng, 70), *sizes[1:])._replace(order=order) for _ in range(count)]
    biases = [maybe(rng, torch.randn(weight.n).to(rng.choice(_FLOATING))) for weight in weights]
    floats = all(map(grouped.keeps_floats, weights)) and rng.random() < 0.6
    wanted = [_grouped_wanted(x, weight, bias, floats) for weight, bias in zip(weights, biases, strict=True)]
    return _Layers(x, weights, biases, floats, wanted)


# A number that is as near to two multiples may become either one, of rows in float64 and in float32.
_ROUNDED = 1e-2


@of("grouped_linear", "grouped_linear_out")
def grouped_linear(rng: random.Random, name: str) -> Case:
    x, (weight,), (bias,), floats, (wanted,) = _grouped_layers(rng, 1)
    sizes = [weight.bits, weight.group_size, weight.rotated, floats]
    tolerance = max(_tolerance(x.dtype), _ROUNDED)
    if name == "grouped_linear":
        given = [x, *weight[:5], bias, weight.n, *sizes]
        return Case(given, lambda args, y: near(y, wanted, tolerance))
    given = [untouched((len(x), weight.n), x.dtype), x, *weight[:5], bias, *sizes]
    return Case(given, lambda args, _: near(args[0], wanted, tolerance))


@of("grouped_linear_batch_out")
def grouped_linear_batch_out(rng: random.Random) -> Case:
    x, weights, biases, floats, wanted = _grouped_layers(rng, rng.choice((1, 2, 3)))
    first = weights[0]
    # All have mins and zeros of their own.
    parts = [[weight[number] for weight in weights] for number in range(4)]
    given = [
        [untouched((len(x), weight.n), x.dtype) for weight in weights], x, *parts, first.order, biases,
        first.bits, first.group_size, first.rotated, floats,
    ]  # fmt: skip

    def check(args: list[Any], _: Any) -> None:
        for y, expected in zip(args[0], wanted, strict=True):
            near(y, expected, max(_tolerance(x.dtype), _ROUNDED))

    return Case(given, check)
