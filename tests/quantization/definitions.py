"""Checkpoint formats written number by number from their definitions, with nothing of FastGen's but `QuantizedTensor`.

The definitions: AutoGPTQ and GPTQModel (`pack` of their linear layers), AutoAWQ (`WQLinear_GEMM`), compressed-tensors
(`pack_to_int32`), and ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from fastgen.quantization.quantized_tensor import QuantizedTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def random_weight(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group_size: int = 16,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    mins: bool = False,
    dtype: torch.dtype = torch.float16,
    scale: float = 0.02,
    seed: int | None = None,
) -> QuantizedTensor:
    """The last group of a row may be smaller. Without a seed, by torch's generator."""
    source = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    qweight = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=source)
    scales = ((torch.rand(outputs, groups, generator=source) + 0.5) * scale).to(dtype)
    zeros = None if symmetric else torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8, generator=source)
    least = (torch.randn(outputs, groups, generator=source) * 5 * scale).to(dtype) if mins else None
    order = None
    if act_order:  # within a group, files name the inputs in their own order
        parts = torch.randperm(inputs, generator=source).split(group_size)
        order = torch.cat([part.sort().values for part in parts])
    return QuantizedTensor(qweight, scales, zeros, least, bits, group_size, order)


def by_definition(weight: QuantizedTensor) -> Tensor:
    """What the weight stands for, [outputs, inputs] in float64."""
    group = torch.arange(weight.qweight.shape[1]) // weight.group_size
    qweight, scales = weight.qweight.double(), weight.scales[:, group].double()
    if weight.mins is not None:
        values = scales * qweight + weight.mins[:, group].double()
    else:
        zeros = 2 ** (weight.bits - 1) if weight.zeros is None else weight.zeros[:, group].double()
        values = scales * (qweight - zeros)
    found = torch.empty_like(values)
    found[:, slice(None) if weight.order is None else weight.order] = values
    return found


def gptq(weight: QuantizedTensor, *, version: int = 1, with_groups: bool = True) -> dict[str, Tensor]:
    qweight, zeros, groups = _plain(weight)
    stored = (zeros - 1) % 2**weight.bits if version == 1 else zeros
    found = {
        "qweight": _words(qweight.T, weight.bits, down=True),  # [inputs, outputs]
        "qzeros": _words(stored.T, weight.bits),
        "scales": weight.scales.t().contiguous(),
    }
    return found | ({"g_idx": groups} if with_groups else {})


def awq(weight: QuantizedTensor) -> dict[str, Tensor]:
    qweight, zeros, _ = _plain(weight)
    return {
        "qweight": _words(_awq_columns(qweight.T), 4),
        "qzeros": _words(_awq_columns(zeros.T), 4),
        "scales": weight.scales.t().contiguous(),
    }


def _awq_columns(values: np.ndarray) -> np.ndarray:
    found = np.empty_like(values)
    for word in range(values.shape[1] // 8):
        for place, column in enumerate(AWQ_ORDER):
            found[:, 8 * word + place] = values[:, 8 * word + column]
    return found


def pack_quantized(weight: QuantizedTensor, *, packed_zeros: bool = True) -> dict[str, Tensor]:
    qweight, zeros, groups = _plain(weight)
    found = {
        "weight_packed": _words(qweight, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(qweight.shape),
    }
    if weight.zeros is not None:
        found["weight_zero_point"] = (
            _words(zeros, weight.bits, down=True)
            if packed_zeros
            else torch.from_numpy(zeros - 2 ** (weight.bits - 1)).to(torch.int8)
        )
    return found | ({"weight_g_idx": groups} if weight.order is not None else {})


def _plain(weight: QuantizedTensor) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Numbers in the layer's order of inputs, zeros, and the group of each input."""
    outputs, inputs = weight.qweight.shape
    order = list(range(inputs)) if weight.order is None else weight.order.tolist()
    qweight, groups = np.zeros((outputs, inputs), dtype=np.int64), [0] * inputs
    for column, place in enumerate(order):
        qweight[:, place] = weight.qweight[:, column].numpy()
        groups[place] = column // weight.group_size
    zeros = np.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=np.int64)
    if weight.zeros is not None:
        zeros = weight.zeros.numpy().astype(np.int64)
    return qweight, zeros, torch.tensor(groups, dtype=torch.int32)


def _words(values: np.ndarray, bits: int, down: bool = False) -> Tensor:
    """Integers packed along the rows, or down the columns, into words of 32 bits."""
    if down:
        return _words(values.T, bits).t().contiguous()
    rows, columns = values.shape
    each = 32 // bits
    words = np.zeros((rows, -(-columns // each)), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            words[row, column // each] |= np.uint32(int(values[row, column]) << bits * (column % each))
    return torch.from_numpy(words.view(np.int32).copy())


# Blocks of GGUF, each from its quantised values. What they stand for is in `random_block`.


def q4_0(scale: float, qweight: list[int]) -> bytes:
    return struct.pack("<e", scale) + _half_and_half(qweight)


def q4_1(scale: float, minimum: float, qweight: list[int]) -> bytes:
    return struct.pack("<2e", scale, minimum) + _half_and_half(qweight)


def q5_0(scale: float, qweight: list[int]) -> bytes:
    return struct.pack("<eI", scale, _bits(qweight, 4)) + _half_and_half(qweight)


def q5_1(scale: float, minimum: float, qweight: list[int]) -> bytes:
    return struct.pack("<2eI", scale, minimum, _bits(qweight, 4)) + _half_and_half(qweight)


def q8_0(scale: float, qweight: list[int]) -> bytes:
    return struct.pack("<e32b", scale, *qweight)


def q2_k(scale: float, minimum: float, scales: list[int], mins: list[int], qweight: list[int]) -> bytes:
    """16 scales and 16 mins of 4 bits, and 256 values of 2 bits."""
    factors = bytes(scales[i] | mins[i] << 4 for i in range(16))
    return factors + _twos(qweight) + struct.pack("<2e", scale, minimum)


def q3_k(scale: float, scales: list[int], qweight: list[int]) -> bytes:
    """16 scales of 6 bits, and 256 values of 3 bits, whose upper bits lie apart."""
    high = bytes(sum((qweight[32 * j + i] >> 2) << j for j in range(8)) for i in range(32))
    low = bytes(scales[i] & 15 | (scales[i + 8] & 15) << 4 for i in range(8))
    upper = bytes(sum((scales[4 * j + i] >> 4) << 2 * j for j in range(4)) for i in range(4))
    return high + _twos(qweight) + low + upper + struct.pack("<e", scale)


def q4_k(scale: float, minimum: float, scales: list[int], mins: list[int], qweight: list[int]) -> bytes:
    """8 scales and 8 mins of 6 bits, and 256 values."""
    return struct.pack("<2e", scale, minimum) + _sixes(scales, mins) + _fours(qweight, 32)


def q5_k(scale: float, minimum: float, scales: list[int], mins: list[int], qweight: list[int]) -> bytes:
    """The same with values of 5 bits, whose upper bits lie apart."""
    high = bytes(sum((qweight[32 * j + i] >> 4) << j for j in range(8)) for i in range(32))
    return struct.pack("<2e", scale, minimum) + _sixes(scales, mins) + high + _fours(qweight, 32)


def q6_k(scale: float, scales: list[int], qweight: list[int]) -> bytes:
    """16 scales of 8 bits with a sign, and 256 values of 6 bits, whose upper two lie apart."""
    low = bytearray()
    for first in range(0, 256, 128):
        low += bytes(qweight[first + i] & 15 | (qweight[first + 64 + i] & 15) << 4 for i in range(64))
    high = bytearray()
    for first in range(0, 256, 128):
        high += bytes(sum((qweight[first + 32 * j + i] >> 4) << 2 * j for j in range(4)) for i in range(32))
    return bytes(low) + bytes(high) + struct.pack("<16be", *scales, scale)


def _half_and_half(qweight: list[int]) -> bytes:
    return bytes(qweight[i] & 15 | (qweight[i + 16] & 15) << 4 for i in range(16))


def _bits(qweight: list[int], bit: int) -> int:
    return sum((number >> bit & 1) << i for i, number in enumerate(qweight))


def _twos(qweight: list[int]) -> bytes:
    found = bytearray()
    for first in range(0, 256, 128):
        found += bytes(sum((qweight[first + 32 * j + i] & 3) << 2 * j for j in range(4)) for i in range(32))
    return bytes(found)


def _fours(qweight: list[int], width: int) -> bytes:
    found = bytearray()
    for first in range(0, 256, 2 * width):
        found += bytes(qweight[first + i] & 15 | (qweight[first + width + i] & 15) << 4 for i in range(width))
    return bytes(found)


def _sixes(scales: list[int], mins: list[int]) -> bytes:
    six = bytearray(12)
    for i in range(4):
        six[i] = scales[i] | (scales[i + 4] >> 4) << 6
        six[i + 4] = mins[i] | (mins[i + 4] >> 4) << 6
        six[i + 8] = scales[i + 4] & 15 | (mins[i + 4] & 15) << 4
    return bytes(six)


def random_block(name: str) -> tuple[bytes, list[float]]:
    """A block of this type with random values, and what it stands for."""

    def draw(least: int, most: int, count: int) -> list[int]:
        return torch.randint(least, most, (count,)).tolist()

    d, m = (float(x) for x in (torch.randn(2) * 0.1).half())
    if name in ("Q4_0", "Q5_0"):
        middle = 8 if name == "Q4_0" else 16
        qweight = draw(0, 2 * middle, 32)
        return {"Q4_0": q4_0, "Q5_0": q5_0}[name](d, qweight), [d * (n - middle) for n in qweight]
    if name in ("Q4_1", "Q5_1"):
        qweight = draw(0, 16 if name == "Q4_1" else 32, 32)
        return {"Q4_1": q4_1, "Q5_1": q5_1}[name](d, m, qweight), [d * n + m for n in qweight]
    if name == "Q8_0":
        qweight = draw(-128, 128, 32)
        return q8_0(d, qweight), [d * n for n in qweight]
    if name == "Q2_K":
        scales, mins, qweight = draw(0, 16, 16), draw(0, 16, 16), draw(0, 4, 256)
        values = [d * scales[i // 16] * n - m * mins[i // 16] for i, n in enumerate(qweight)]
        return q2_k(d, m, scales, mins, qweight), values
    if name == "Q3_K":
        scales, qweight = draw(0, 64, 16), draw(0, 8, 256)
        return q3_k(d, scales, qweight), [d * (scales[i // 16] - 32) * (n - 4) for i, n in enumerate(qweight)]
    if name in ("Q4_K", "Q5_K"):
        scales, mins, qweight = draw(0, 64, 8), draw(0, 64, 8), draw(0, 16 if name == "Q4_K" else 32, 256)
        values = [d * scales[i // 32] * n - m * mins[i // 32] for i, n in enumerate(qweight)]
        return {"Q4_K": q4_k, "Q5_K": q5_k}[name](d, m, scales, mins, qweight), values
    assert name == "Q6_K"
    scales, qweight = draw(-128, 128, 16), draw(0, 64, 256)
    return q6_k(d, scales, qweight), [d * scales[i // 16] * (n - 32) for i, n in enumerate(qweight)]
