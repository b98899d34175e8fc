"""Readers and writers of single layers against definitions written number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastgen.quantization.checkpoint import Format, QuantizedTensor, dequantized
from fastgen.quantization.formats import AWQ, BLOCK_TYPES, GPTQ, Blocks, BlockType, PackQuantized
from tests.quantization import definitions
from tests.quantization.definitions import by_definition, random_weight

TYPES = {kind.name: kind for kind in BLOCK_TYPES.values()}


def check_read(form: Format, tensors: dict[str, Tensor], weight: QuantizedTensor) -> QuantizedTensor:
    outputs, inputs = weight.qweight.shape
    form = form.resolved(tensors)
    read = form.read(tensors, outputs, inputs)
    assert read.bits == weight.bits
    assert torch.equal(dequantized(read, torch.float32), by_definition(weight).float())
    written = form.write(read)
    for name, tensor in tensors.items():
        assert torch.equal(written[name].to(tensor.dtype), tensor), name
    return read


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, symmetric: bool, act_order: bool, version: int) -> None:
    weight = random_weight(24, 32, bits, symmetric=symmetric, act_order=act_order)
    form = GPTQ(lowered=version == 1, symmetric=symmetric)
    read = check_read(form, definitions.gptq(weight, version=version), weight)
    assert (read.zeros is None) is symmetric
    assert (read.order is not None) is act_order


@pytest.mark.parametrize("said", [1, 2])
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_file_that_says_the_other_version(bits: int, held: int, said: int) -> None:
    """Of symmetric weights the values count: 2**(bits - 1) is stored by version 2 alone."""
    weight = random_weight(8, 32, bits)
    check_read(GPTQ(lowered=said == 1), definitions.gptq(weight, version=held), weight)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_asymmetric_file_is_believed(version: int) -> None:
    """Its zeros may well be all the same."""
    weight = random_weight(8, 32, symmetric=False)._replace(zeros=torch.full((8, 2), 9, dtype=torch.uint8))
    check_read(GPTQ(version == 1, symmetric=False), definitions.gptq(weight, version=version), weight)


def test_gptq_without_groups_of_inputs() -> None:
    weight = random_weight(8, 32)
    check_read(GPTQ(), definitions.gptq(weight, with_groups=False), weight)


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(symmetric: bool) -> None:
    weight = random_weight(24, 48, symmetric=symmetric)
    check_read(AWQ(), definitions.awq(weight), weight)


@pytest.mark.parametrize("packed_zeros", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("inputs", "group_size"), [(32, 16), (32, 32), (27, 9), (13, 13)])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized(
    bits: int, inputs: int, group_size: int, symmetric: bool, act_order: bool, packed_zeros: bool
) -> None:
    weight = random_weight(
        11, inputs, bits, group_size, symmetric=symmetric, act_order=act_order and group_size < inputs
    )
    check_read(PackQuantized(), definitions.pack_quantized(weight, packed_zeros=packed_zeros), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_type(dtype: torch.dtype) -> None:
    weight = random_weight(8, 32, dtype=dtype)
    forms: list[tuple[Format, dict[str, Tensor]]] = [
        (GPTQ(), definitions.gptq(weight)),
        (AWQ(), definitions.awq(weight)),
        (PackQuantized(), definitions.pack_quantized(weight)),
    ]
    for form, tensors in forms:
        assert form.read(tensors, 8, 32).scales.dtype == dtype


def test_what_compressed_tensors_packs() -> None:
    """The package itself, where it is installed."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        weight = random_weight(12, 32, bits, symmetric=False)
        numbers, zeros = ((part.int() - 2 ** (bits - 1)).to(torch.int8) for part in (weight.qweight, weight.zeros))
        tensors = {
            "weight_packed": helpers.pack_to_int32(numbers, bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor([12, 32]),
            "weight_zero_point": helpers.pack_to_int32(zeros, bits, packed_dim=0),
        }
        check_read(PackQuantized(), tensors, weight)


def blocks_of(kind: BlockType, rows: int, per_row: int) -> tuple[Tensor, Tensor]:
    """Random blocks, [rows, bytes], and what the package gguf makes of them, in float32."""
    package = pytest.importorskip("gguf")
    blocks = definitions.random_blocks(kind.name, rows, per_row * kind.block_size)
    return blocks, torch.from_numpy(package.dequantize(blocks.numpy(), package.GGMLQuantizationType[kind.name]))


@pytest.mark.parametrize("name", TYPES)
def test_gguf(name: str) -> None:
    kind = TYPES[name]
    blocks, values = blocks_of(kind, rows=5, per_row=3)
    read = Blocks(kind).read({"blocks": blocks}, 5, 3 * kind.block_size)
    assert torch.equal(dequantized(read, torch.float32), values)


# What is wrong, by format: each changes the tensors of a weight of 16 outputs and 32 inputs in groups of 16.
DAMAGED: list[tuple[Format, Callable[[QuantizedTensor], dict[str, Tensor]], dict[str, Any], str]] = [
    (GPTQ(), definitions.gptq, {"qweight": None}, "qweight has 0 words"),
    (GPTQ(), definitions.gptq, {"qweight": lambda t: t[:-1]}, "qweight has 3 words for 32 values"),
    (GPTQ(), definitions.gptq, {"qweight": lambda t: t[:, :-1]}, "qweight is int32"),
    (GPTQ(), definitions.gptq, {"qweight": lambda t: t.long()}, "qweight is int64"),
    (GPTQ(), definitions.gptq, {"scales": None}, "scales has 0 groups"),
    (GPTQ(), definitions.gptq, {"scales": lambda t: t.int()}, "scales is int32"),
    (GPTQ(), definitions.gptq, {"scales": lambda t: torch.cat([t, t[:1]])}, "scales has 3 groups for 32 in_features"),
    (GPTQ(), definitions.gptq, {"qzeros": None}, "qzeros is missing"),
    (GPTQ(), definitions.gptq, {"qzeros": lambda t: t[:, :1]}, "qzeros is int32"),
    (GPTQ(), definitions.gptq, {"g_idx": lambda t: t[:-1]}, "g_idx is int32"),
    (GPTQ(), definitions.gptq, {"g_idx": lambda t: t.float()}, "g_idx is float32"),
    (GPTQ(), definitions.gptq, {"g_idx": lambda t: t + 1}, "g_idx names groups 1 to 2, and there are 2"),
    (GPTQ(), definitions.gptq, {"g_idx": lambda t: t - 1}, "g_idx names groups -1 to 0"),
    (GPTQ(), definitions.gptq, {"g_idx": lambda t: t * 0}, "group 0 in g_idx has 32 in_features, not 16"),
    (AWQ(), definitions.awq, {"qweight": lambda t: t[:-1]}, "qweight is int32"),
    (AWQ(), definitions.awq, {"qzeros": None}, "qzeros is missing"),
    (AWQ(), definitions.awq, {"scales": lambda t: t[:, :-1]}, "scales is float16"),
    (AWQ(), definitions.awq, {"scales": lambda t: t[0]}, "scales is float16"),
    (PackQuantized(), definitions.pack_quantized, {"weight_packed": lambda t: t[:, :1]}, "weight_packed has 1 words"),
    (PackQuantized(), definitions.pack_quantized, {"weight_packed": lambda t: t[:-1]}, "weight_packed is int32"),
    (PackQuantized(), definitions.pack_quantized, {"weight_shape": lambda t: t + 1}, r"weight_shape is \[17, 33\]"),
    (PackQuantized(), definitions.pack_quantized, {"weight_shape": None}, "weight_shape is missing"),
    (PackQuantized(), definitions.pack_quantized, {"weight_scale": None}, "weight_scale has 0 groups"),
    (PackQuantized(), definitions.pack_quantized, {"weight_scale": lambda t: t[:-1]}, "weight_scale is float16"),
    (PackQuantized(), definitions.pack_quantized, {"weight_zero_point": lambda t: t[:-1]}, "weight_zero_point is"),
    (PackQuantized(), definitions.pack_quantized, {"weight_g_idx": lambda t: t * 2}, "weight_g_idx names groups"),
]


@pytest.mark.parametrize(("form", "write", "damage", "message"), DAMAGED)
def test_damaged(
    form: Format, write: Callable[[QuantizedTensor], dict[str, Tensor]], damage: dict[str, Any], message: str
) -> None:
    tensors = write(random_weight(16, 32, symmetric=False, act_order=not isinstance(form, AWQ)))
    for name, change in damage.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message) as error:
        form.resolved(tensors).read(tensors, 16, 32)
    assert "\n" not in str(error.value) and "fetch it again" in str(error.value)


def test_outputs_that_awq_cannot_have() -> None:
    with pytest.raises(ValueError, match="12 out_features, which is no multiple of 8"):
        AWQ().read(definitions.awq(random_weight(16, 32)), 12, 32)


@pytest.mark.parametrize("name", TYPES)
def test_damaged_blocks(name: str) -> None:
    kind = TYPES[name]
    blocks, _ = blocks_of(kind, rows=3, per_row=2)
    form, inputs = Blocks(kind), 2 * kind.block_size
    for wrong in (blocks[:-1], blocks[:, :-1], blocks.int(), blocks.flatten()):
        with pytest.raises(ValueError, match=r"blocks is .* and must be uint8"):
            form.read({"blocks": wrong}, 3, inputs)
    with pytest.raises(ValueError, match="no whole blocks"):
        form.read({"blocks": blocks}, 3, inputs - 1)


@given(st.data())
def test_fuzzed(data: st.DataObject) -> None:
    """Whatever sizes and values the tensors have: they are read, or refused with one line."""
    write, form = data.draw(
        st.sampled_from(
            [(definitions.gptq, GPTQ()), (definitions.awq, AWQ()), (definitions.pack_quantized, PackQuantized())]
        )
    )
    tensors = write(random_weight(8, 16, group_size=8, symmetric=False, act_order=form.name != "awq"))
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64, torch.float16, torch.uint8, torch.int8]))
    tensors[name] = torch.randint(-9 if dtype != torch.uint8 else 0, 9, shape).to(dtype)
    try:
        read = form.resolved(tensors).read(tensors, 8, 16)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert dequantized(read, torch.float32).shape == (8, 16)


@pytest.mark.parametrize(
    ("form", "write"), [(GPTQ, definitions.gptq), (AWQ, definitions.awq), (PackQuantized, definitions.pack_quantized)]
)
def test_groups_of_another_size_than_the_configuration_says(form: Any, write: Any) -> None:
    weight = random_weight(16, 64, group_size=32, symmetric=False)
    tensors = write(weight)
    for sizes in ({32}, {16, 32}, {}):
        assert form(group_sizes=frozenset(sizes)).resolved(tensors).read(tensors, 16, 64).group_size == 32
    for sizes in ({16}, {64}, {-1}):
        with pytest.raises(ValueError, match="has groups of 32, and the configuration says"):
            form(group_sizes=frozenset(sizes)).resolved(tensors).read(tensors, 16, 64)
    channel = random_weight(16, 64, group_size=64, symmetric=False)
    for sizes in ({64}, {-1}, {128}):
        assert form(group_sizes=frozenset(sizes)).read(write(channel), 16, 64).group_size == 64


def test_an_order_that_was_never_set() -> None:
    weight = random_weight(16, 64, group_size=32)
    tensors = {**definitions.pack_quantized(weight), "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert PackQuantized().read(tensors, 16, 64).order is None
