"""The checkpoint format `pack-quantized` of compressed-tensors (llm-compressor): integers of 4 or 8 bits.

`weight_packed` is int32 [N, K * bits / 32], packed along K, `weight_scale` is [N, groups], and `weight_shape` holds N
and K. The zero point is 2**(bits - 1); asymmetric weights have `weight_zero_point`: int32 [N * bits / 32, groups],
packed along N, or int8 [N, groups] in older files. `weight_g_idx`, [K], names the group of each in_feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization import int32_packing
from fastgen.quantization.checkpoint import (
    ADVICE,
    FLOATS,
    bits_of,
    expect,
    groups_of,
    in_input_order,
    order_of,
    unless_symmetric,
    whole_groups,
    zeros_of,
)
from fastgen.quantization.quantized_tensor import QuantizedTensor


class PackQuantized(NamedTuple):
    """`pack-quantized`.

    Attributes:
        packed_zeros: zero points are packed into int32.
        group_sizes: that the configuration names; empty if it does not.
    """

    packed_zeros: bool = True
    group_sizes: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return "compressed-tensors"

    @property
    def writable(self) -> bool:
        return True

    def resolved(self, tensors: Mapping[str, Tensor]) -> PackQuantized:
        zeros = tensors.get("weight_zero_point")
        return self if zeros is None else self._replace(packed_zeros=zeros.dtype != torch.int8)

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
        qweight, order = int32_packing.unpacked(stored, bits)[:, :k], None
        if "weight_g_idx" in tensors:
            g_idx = expect("weight_g_idx", tensors["weight_g_idx"], (k,), (torch.int32, torch.int64))
            # -1 throughout stands for an order that was never set.
            order = None if bool((g_idx == -1).all()) else order_of(g_idx, group_size, "weight_g_idx")
        if order is not None:
            qweight = qweight[:, order]
        return QuantizedTensor(qweight.contiguous(), scales.contiguous(), zeros, None, bits, group_size, order)

    def _zeros(self, stored: Tensor, n: int, groups: int, bits: int) -> Tensor | None:
        if self.packed_zeros:
            words = -(-n * bits // 32)
            stored = expect("weight_zero_point", stored, (words, groups), (torch.int32,))
            zeros = int32_packing.unpacked(stored.t(), bits)[:, :n].t()
        else:
            stored = expect("weight_zero_point", stored, (n, groups), (torch.int8,))
            zeros = (stored.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        return unless_symmetric(zeros.contiguous(), bits)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        zeros, bits = zeros_of(weight), weight.bits
        return {
            "weight_packed": int32_packing.packed(in_input_order(weight), bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.qweight.shape, device=weight.qweight.device),
            "weight_zero_point": (
                int32_packing.packed(zeros.t(), bits).t().contiguous()
                if self.packed_zeros
                else (zeros.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
            ),
            "weight_g_idx": groups_of(weight),
        }
