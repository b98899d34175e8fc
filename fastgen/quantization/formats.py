"""The checkpoint formats: GPTQ, AWQ and pack-quantized, which pack values into int32, and blocks of GGUF."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear.weights import SIGNED_ZERO_POINT, SuperBlockScales
from fastgen.quantization.checkpoint import (
    ADVICE,
    BITS,
    FLOATS,
    Format,
    QuantizedTensor,
    bits_of,
    expect,
    groups_of,
    in_input_order,
    order_of,
    pack_int32,
    unless_symmetric,
    unpack_int32,
    whole_groups,
    zeros_of,
)

if sys.byteorder != "little":  # the bytes of an int32 are read in memory order
    raise ImportError("low-bit weights are read on little-endian processors only")

# The n that the i-th value of an int32 belongs to, and the inverse.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INVERSE = tuple(_ORDER.index(n) for n in range(8))
_BITS = 4


@dataclass(frozen=True)
class GPTQ(Format):
    """The format of GPTQ (AutoGPTQ, GPTQModel), in the variant that a file's configuration gives.

    `qweight` is int32 [K * bits / 32, N], packed along K. `qzeros`, int32 [groups, N * bits / 32], and `scales`,
    [groups, N], belong to groups along K; `g_idx`, [K], gives the group of each in_feature. Version 1 stores a zero
    point minus 1, modulo 2**bits, version 2 the zero point itself.

    Attributes:
        lowered: zero points are stored minus 1 (version 1).
        symmetric: every zero point is the middle of the range. The stored values then reveal the version, and override
            the file's configuration: some files claim version 1 and hold version 2.
    """

    name = "gptq"
    tensors = ("qweight", "qzeros", "scales", "g_idx")
    lowered: bool = True
    symmetric: bool = True

    def resolved(self, tensors: Mapping[str, Tensor]) -> GPTQ:
        stored, scales = tensors.get("qzeros"), tensors.get("scales")
        if not self.symmetric or stored is None or scales is None or stored.dim() != 2 or not scales.dim():
            return self
        for bits in BITS:
            if stored.shape[-1] * 32 == scales.shape[-1] * bits:
                # The middle of the range in each value of an int32, and one less.
                exact = sum(2 ** (bits - 1) << shift for shift in range(0, 32, bits))
                lowered = sum((2 ** (bits - 1) - 1) << shift for shift in range(0, 32, bits))
                for value, is_lowered in ((exact - 2**32, False), (lowered, True)):
                    if stored.numel() and torch.all(stored == value):
                        return replace(self, lowered=is_lowered)
        return self

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        stored = tensors.get("qweight")
        bits = bits_of(k, stored.shape[0] if stored is not None and stored.dim() else 0, "qweight")
        stored = expect("qweight", stored, (-(-k * bits // 32), n), (torch.int32,))
        scales, group_size = _scales(self, tensors, n, k)
        words = -(-n * bits // 32)
        zeros = expect("qzeros", tensors.get("qzeros"), (len(scales), words), (torch.int32,))
        zeros = unpack_int32(zeros, bits)[:, :n]
        if self.lowered:
            zeros = (zeros + 1) & (2**bits - 1)
        qweight = unpack_int32(stored.t(), bits)[:, :k]
        order = None
        if "g_idx" in tensors:
            g_idx = expect("g_idx", tensors["g_idx"], (k,), (torch.int32, torch.int64))
            order = order_of(g_idx, group_size, "g_idx")
        if order is not None:
            qweight = qweight[:, order]
        apart = unless_symmetric(zeros.t().contiguous(), bits)
        return QuantizedTensor(qweight.contiguous(), scales.t().contiguous(), apart, None, bits, group_size, order)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        zeros = zeros_of(weight)
        if self.lowered:
            zeros = (zeros - 1) & (2**weight.bits - 1)
        return {
            "qweight": pack_int32(in_input_order(weight), weight.bits).t().contiguous(),
            "qzeros": pack_int32(zeros.t(), weight.bits),
            "scales": weight.scales.t().contiguous(),
            "g_idx": groups_of(weight),
        }


@dataclass(frozen=True)
class AWQ(Format):
    """The format of AWQ (AutoAWQ) in the layout `gemm`: 4 bits, packed along N.

    `qweight` is int32 [K, N / 8], `qzeros` int32 [groups, N / 8] and holds the zero points themselves, `scales` is
    [groups, N]. The eight values of an int32, from the lowest bits on, belong to n = 0, 2, 4, 6, 1, 3, 5 and 7 of its
    eight.
    """

    name = "awq"
    tensors = ("qweight", "qzeros", "scales")

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        if n % 8:
            raise ValueError(f"qweight has {n} out_features, which is no multiple of 8: {ADVICE}")
        stored = expect("qweight", tensors.get("qweight"), (k, n // 8), (torch.int32,))
        scales, group_size = _scales(self, tensors, n, k)
        zeros = expect("qzeros", tensors.get("qzeros"), (len(scales), n // 8), (torch.int32,))
        apart = unless_symmetric(_unpacked(zeros), _BITS)
        return QuantizedTensor(_unpacked(stored), scales.t().contiguous(), apart, None, _BITS, group_size, None)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        return {
            "qweight": _packed(in_input_order(weight)),
            "qzeros": _packed(zeros_of(weight)),
            "scales": weight.scales.t().contiguous(),
        }


def _unpacked(stored: Tensor) -> Tensor:
    """Unpacks int32 [rows, N / 8] into [N, rows]."""
    return _reordered(unpack_int32(stored, _BITS), _INVERSE).t().contiguous()


def _packed(qweight: Tensor) -> Tensor:
    return pack_int32(_reordered(qweight.t(), _ORDER), _BITS)


def _reordered(qweight: Tensor, order: tuple[int, ...]) -> Tensor:
    """Reorders the columns, eight at a time."""
    return qweight.reshape(qweight.shape[0], -1, 8)[:, :, list(order)].flatten(1)


def _scales(form: Format, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[Tensor, int]:
    """Returns scales, [groups, N], and how many in_features share one."""
    scales = tensors.get("scales")
    groups = scales.shape[0] if scales is not None and scales.dim() else 0
    group_size = whole_groups(k, groups, "scales", form.group_sizes)
    return expect("scales", scales, (groups, n), FLOATS), group_size


@dataclass(frozen=True)
class PackQuantized(Format):
    """The format `pack-quantized` of compressed-tensors (llm-compressor): integers of 4 or 8 bits.

    `weight_packed` is int32 [N, K * bits / 32], packed along K, `weight_scale` is [N, groups], and `weight_shape` holds
    N and K. The zero point is 2**(bits - 1); asymmetric weights have `weight_zero_point`: int32 [N * bits / 32,
    groups], packed along N, or int8 [N, groups] in older files. `weight_g_idx`, [K], gives each in_feature's group.
    """

    name = "compressed-tensors"
    tensors = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    packed_zeros: bool = True

    def resolved(self, tensors: Mapping[str, Tensor]) -> PackQuantized:
        zeros = tensors.get("weight_zero_point")
        return self if zeros is None else replace(self, packed_zeros=zeros.dtype != torch.int8)

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        stored = tensors.get("weight_packed")
        words = stored.shape[1] if stored is not None and stored.dim() == 2 else 0
        bits = bits_of(k, words, "weight_packed")
        stored = expect("weight_packed", stored, (n, words), (torch.int32,))
        shape = expect("weight_shape", tensors.get("weight_shape"), (2,), (torch.int32, torch.int64))
        if shape.tolist() != [n, k]:
            raise ValueError(f"weight_shape is {shape.tolist()}, and the layer's {[n, k]}: {ADVICE}")
        scales = tensors.get("weight_scale")
        groups = scales.shape[1] if scales is not None and scales.dim() == 2 else 0
        group_size = whole_groups(k, groups, "weight_scale", self.group_sizes)
        scales = expect("weight_scale", scales, (n, groups), FLOATS)
        zeros = None
        if "weight_zero_point" in tensors:
            zeros = self._zeros(tensors["weight_zero_point"], n, groups, bits)
        qweight, order = unpack_int32(stored, bits)[:, :k], None
        if "weight_g_idx" in tensors:
            g_idx = expect("weight_g_idx", tensors["weight_g_idx"], (k,), (torch.int32, torch.int64))
            # -1 throughout means that the order was never set.
            order = None if bool((g_idx == -1).all()) else order_of(g_idx, group_size, "weight_g_idx")
        if order is not None:
            qweight = qweight[:, order]
        return QuantizedTensor(qweight.contiguous(), scales.contiguous(), zeros, None, bits, group_size, order)

    def _zeros(self, stored: Tensor, n: int, groups: int, bits: int) -> Tensor | None:
        if self.packed_zeros:
            words = -(-n * bits // 32)
            stored = expect("weight_zero_point", stored, (words, groups), (torch.int32,))
            zeros = unpack_int32(stored.t(), bits)[:, :n].t()
        else:
            stored = expect("weight_zero_point", stored, (n, groups), (torch.int8,))
            zeros = (stored.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        return unless_symmetric(zeros.contiguous(), bits)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        zeros, bits = zeros_of(weight), weight.bits
        return {
            "weight_packed": pack_int32(in_input_order(weight), bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.qweight.shape, device=weight.qweight.device),
            "weight_zero_point": (
                pack_int32(zeros.t(), bits).t().contiguous()
                if self.packed_zeros
                else (zeros.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
            ),
            "weight_g_idx": groups_of(weight),
        }


# ---- blocks of GGUF (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c)
#
# A row of a weight is a row of blocks. A block of 32 has a scale in float16: Q4_0, Q5_0 and Q8_0 represent scale * (q -
# zero); Q4_1 and Q5_1, which also have a min, represent scale * q + min. The K-quants, Q2_K to Q6_K, have super-blocks
# of 256 in groups of 16 or 32. The scales and mins of their groups are small integers times a float16 of the
# super-block. On a CPU they stay separate, a byte each: multiplied, they would need up to 18 bits. In memory, values
# have the bits of their type, but at least 4.


class _Parts(NamedTuple):
    """The contents of blocks, [blocks, ...]: see `QuantizedTensor`."""

    qweight: Tensor
    scales: Tensor
    mins: Tensor | None = None
    super_blocks: SuperBlockScales | None = None


def _k_quant(qweight: Tensor, super_blocks: SuperBlockScales) -> _Parts:
    return _Parts(qweight, *super_blocks.values(), super_blocks)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 at this byte of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _split(packed: Tensor, bits: int, width: int) -> Tensor:
    """Returns values of `bits` bits: of every `width` bytes, the lowest bits of all, then the next, and so on."""
    each = packed.reshape(len(packed), -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (each >> shifts & 2**bits - 1).flatten(1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Returns the fifth bits of 32 values, from the lowest of the first four bytes on, shifted to bit 4."""
    octets = blocks[:, :4].unsqueeze(2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (octets >> shifts & 1).flatten(1) << 4


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and mins of 8 groups, 6 bits each, from 12 bytes."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=1)
    return scales, torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=1)


def _q4_or_5(blocks: Tensor, has_min: bool, has_fifth_bit: bool) -> _Parts:
    scale, least = _half(blocks, 0), _half(blocks, 2) if has_min else None
    rest = blocks[:, 4 if has_min else 2 :]
    if has_fifth_bit:
        return _Parts(_split(rest[:, 4:], 4, 16) | _fifth_bits(rest), scale, least)
    return _Parts(_split(rest, 4, 16), scale, least)


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, _half(blocks, 0))  # a signed byte plus 128


def _q2_k(blocks: Tensor) -> _Parts:
    factors, qweight = blocks[:, :16], _split(blocks[:, 16:80], 2, 32)
    return _k_quant(qweight, SuperBlockScales(factors & 15, factors >> 4, _half(blocks, 80), -_half(blocks, 82)))


def _q3_k(blocks: Tensor) -> _Parts:
    low, high = _split(blocks[:, 32:96], 2, 32), _split(blocks[:, :32], 1, 32)
    scales = _split(blocks[:, 96:104], 4, 8) | _split(blocks[:, 104:108], 2, 4) << 4  # plus 32
    # Without the high bit, 4 is subtracted: values from -4 to 3, plus the 4-bit zero point.
    qweight = low + 4 + (high << 2)
    return _k_quant(qweight, SuperBlockScales(scales + (SIGNED_ZERO_POINT - 32), None, _half(blocks, 108), None))


def _q4_k(blocks: Tensor) -> _Parts:
    factors = SuperBlockScales(*_sixes(blocks[:, 4:16]), _half(blocks, 0), -_half(blocks, 2))
    return _k_quant(_split(blocks[:, 16:], 4, 32), factors)


def _q5_k(blocks: Tensor) -> _Parts:
    factors = SuperBlockScales(*_sixes(blocks[:, 4:16]), _half(blocks, 0), -_half(blocks, 2))
    return _k_quant(_split(blocks[:, 48:], 4, 32) | _split(blocks[:, 16:48], 1, 32) << 4, factors)


def _q6_k(blocks: Tensor) -> _Parts:
    qweight = _split(blocks[:, :128], 4, 64) | _split(blocks[:, 128:192], 2, 32) << 4  # plus 32
    signed = blocks[:, 192:208] ^ 128  # a signed byte plus 128
    return _k_quant(qweight, SuperBlockScales(signed, None, _half(blocks, 208), None))


class BlockType(NamedTuple):
    """How a GGUF type stores weights.

    Attributes:
        bits: bits of a value, in memory.
        block_size: values of a block.
        block_bytes: bytes of a block.
        group_size: values that share a scale.
    """

    name: str
    bits: int
    block_size: int
    block_bytes: int
    group_size: int
    parts: Callable[[Tensor], _Parts]

    def row_bytes(self, k: int) -> int:
        """Returns the bytes of K values. Raises ValueError if they are not whole blocks."""
        if k % self.block_size:
            raise ValueError(f"{k} in_features are no whole blocks of {self.block_size}: {ADVICE}")
        return k // self.block_size * self.block_bytes


# By their numbers in GGUF files (ggml.h).
BLOCK_TYPES = {
    2: BlockType("Q4_0", 4, 32, 18, 32, partial(_q4_or_5, has_min=False, has_fifth_bit=False)),
    3: BlockType("Q4_1", 4, 32, 20, 32, partial(_q4_or_5, has_min=True, has_fifth_bit=False)),
    6: BlockType("Q5_0", 5, 32, 22, 32, partial(_q4_or_5, has_min=False, has_fifth_bit=True)),
    7: BlockType("Q5_1", 5, 32, 24, 32, partial(_q4_or_5, has_min=True, has_fifth_bit=True)),
    8: BlockType("Q8_0", 8, 32, 34, 32, _q8_0),
    10: BlockType("Q2_K", 4, 256, 84, 16, _q2_k),
    11: BlockType("Q3_K", 4, 256, 110, 16, _q3_k),
    12: BlockType("Q4_K", 4, 256, 144, 32, _q4_k),
    13: BlockType("Q5_K", 5, 256, 176, 32, _q5_k),
    14: BlockType("Q6_K", 6, 256, 210, 16, _q6_k),
}


@dataclass(frozen=True)
class Blocks(Format):
    """Blocks of one type: the tensor `blocks`, uint8 [N, bytes of a row]."""

    writable = False
    type: BlockType

    @property
    def name(self) -> str:  # type: ignore[override]  # that of others is one for the class
        return f"gguf {self.type.name}"

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        shape = n, self.type.row_bytes(k)
        blocks = expect("blocks", tensors.get("blocks"), shape, (torch.uint8,)).reshape(-1, self.type.block_bytes)
        qweight, *factors, super_blocks = self.type.parts(blocks)
        scales, mins = (None if each is None else each.reshape(n, -1) for each in factors)
        assert scales is not None
        if super_blocks is not None:
            parts: list[Any] = [None if each is None else each.reshape(n, -1) for each in super_blocks]
            super_blocks = SuperBlockScales(*parts)
        bits, group_size = self.type.bits, self.type.group_size
        return QuantizedTensor(qweight.reshape(n, k), scales, None, mins, bits, group_size, None, super_blocks)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        raise ValueError("GGUF blocks are not written")
