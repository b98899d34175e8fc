"""The checkpoint format `pack-quantized` of compressed-tensors (llm-compressor): integers of 4 or 8 bits.

Numbers are packed along the inputs: `weight_packed` is int32 [outputs, inputs * bits / 32], `weight_scale` is
[outputs, groups], and `weight_shape` holds outputs and inputs. A number stands for itself minus 2**(bits - 1).
`weight_zero_point` is there for asymmetric weights: int32 [outputs * bits / 32, groups], packed along the outputs, or
int8 [outputs, groups] in older files. `weight_g_idx`, [inputs], names the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization import words
from fastgen.quantization.checkpoint import (
    ADVICE,
    FLOATS,
    bits_of,
    expect,
    groups_of,
    in_input_order,
    order_of,
    unless_middle,
    whole_groups,
    zeros_of,
)
from fastgen.quantization.grouped import GroupedWeight


class PackQuantized(NamedTuple):
    """`pack-quantized`.

    Attributes:
        packed_zeros: zero points are packed into words.
        group_sizes: inputs per group that the configuration names; empty if it does not.
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

    def read(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        stored = tensors.get("weight_packed")
        lines = stored.shape[1] if stored is not None and stored.dim() == 2 else 0
        bits = bits_of(inputs, lines, "weight_packed")
        stored = expect("weight_packed", stored, (outputs, lines), (torch.int32,))
        shape = expect("weight_shape", tensors.get("weight_shape"), (2,), (torch.int32, torch.int64))
        if shape.tolist() != [outputs, inputs]:
            raise ValueError(f"weight_shape is {shape.tolist()}, and the layer's {[outputs, inputs]}: {ADVICE}")
        scales = tensors.get("weight_scale")
        groups = scales.shape[1] if scales is not None and scales.dim() == 2 else 0
        group_size = whole_groups(inputs, groups, "weight_scale", self.group_sizes)
        scales = expect("weight_scale", scales, (outputs, groups), FLOATS)
        zeros = None
        if "weight_zero_point" in tensors:
            zeros = self._zeros(tensors["weight_zero_point"], outputs, groups, bits)
        numbers, order = words.unpacked(stored, bits)[:, :inputs], None
        if "weight_g_idx" in tensors:
            g_idx = expect("weight_g_idx", tensors["weight_g_idx"], (inputs,), (torch.int32, torch.int64))
            # -1 throughout stands for an order that was never set.
            order = None if bool((g_idx == -1).all()) else order_of(g_idx, group_size, "weight_g_idx")
        if order is not None:
            numbers = numbers[:, order]
        return GroupedWeight(numbers.contiguous(), scales.contiguous(), zeros, None, bits, group_size, order)

    def _zeros(self, stored: Tensor, outputs: int, groups: int, bits: int) -> Tensor | None:
        if self.packed_zeros:
            lines = -(-outputs * bits // 32)
            stored = expect("weight_zero_point", stored, (lines, groups), (torch.int32,))
            zeros = words.unpacked(stored.t(), bits)[:, :outputs].t()
        else:
            stored = expect("weight_zero_point", stored, (outputs, groups), (torch.int8,))
            zeros = (stored.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        return unless_middle(zeros.contiguous(), bits)

    def write(self, weight: GroupedWeight) -> dict[str, Tensor]:
        zeros, bits = zeros_of(weight), weight.bits
        return {
            "weight_packed": words.packed(in_input_order(weight), bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.numbers.shape, device=weight.numbers.device),
            "weight_zero_point": (
                words.packed(zeros.t(), bits).t().contiguous()
                if self.packed_zeros
                else (zeros.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
            ),
            "weight_g_idx": groups_of(weight),
        }
