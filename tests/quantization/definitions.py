"""Checkpoint formats written number by number from their definitions, with nothing of FastGen's but `QuantizedTensor`.

The definitions: AutoGPTQ and GPTQModel (`pack` of their linear layers), AutoAWQ (`WQLinear_GEMM`) and
compressed-tensors (`pack_to_int32`). Blocks of GGUF are random bytes: what they stand for, the package gguf says.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastgen.quantization.checkpoint import QuantizedTensor

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


# Where the numbers in float16 are in a block of GGUF, and how large they are drawn. Blocks of the last are not kept.
_HALVES = {
    "Q4_0": ([0], 1e-2), "Q4_1": ([0, 2], 1e-2), "Q5_0": ([0], 5e-3), "Q5_1": ([0, 2], 5e-3), "Q8_0": ([0], 1e-3),
    "Q2_K": ([80, 82], 1e-3), "Q3_K": ([108], 3e-4), "Q4_K": ([0, 2], 1e-4), "Q5_K": ([0, 2], 1e-4),
    "Q6_K": ([208], 1e-5), "IQ4_NL": ([0], 1e-3),
}  # fmt: skip


def random_blocks(name: str, rows: int, inputs: int) -> Tensor:
    """Random blocks of GGUF whose scales leave a model's numbers small: [rows, bytes]."""
    import gguf

    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = torch.randint(0, 256, (rows * inputs // per_block, size), dtype=torch.uint8)
    places, small = _HALVES[name]
    for place in places:
        scales = (torch.rand(len(blocks), 1) * small).half() * (-1 if place and name in ("Q4_1", "Q5_1") else 1)
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    return blocks.view(rows, -1)
