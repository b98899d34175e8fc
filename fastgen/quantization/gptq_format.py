"""The checkpoint format of GPTQ (AutoGPTQ, GPTQModel).

Numbers are packed along the inputs: `qweight` is int32 [inputs * bits / 32, outputs]. `qzeros`, int32
[groups, outputs * bits / 32], and `scales`, [groups, outputs], belong to groups of inputs; `g_idx`, [inputs], names the
group of each input. Version 1 stores a zero minus 1, modulo 2**bits, version 2 the zero itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization import words
from fastgen.quantization.checkpoint import (
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
from fastgen.quantization.grouped import BITS, GroupedWeight


class GPTQ(NamedTuple):
    """GPTQ, as a file's configuration says.

    Attributes:
        lowered: zeros are stored minus 1 (version 1).
        symmetric: every zero is the middle of the range. Then the stored values tell the version, and count more
            than what the file says: files say version 1 and hold version 2.
        group_sizes: inputs per group that the configuration names; empty if it does not.
    """

    lowered: bool = True
    symmetric: bool = True
    group_sizes: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return "gptq"

    @property
    def writable(self) -> bool:
        return True

    def resolved(self, tensors: Mapping[str, Tensor]) -> GPTQ:
        stored, scales = tensors.get("qzeros"), tensors.get("scales")
        if not self.symmetric or stored is None or scales is None or stored.dim() != 2 or not scales.dim():
            return self
        for bits in BITS:
            if stored.shape[-1] * 32 == scales.shape[-1] * bits:
                # The middle of the range in each number of a word, as int32, and one less.
                middle = sum(2 ** (bits - 1) << shift for shift in range(0, 32, bits))
                lowered = sum((2 ** (bits - 1) - 1) << shift for shift in range(0, 32, bits))
                for value, is_lowered in ((middle - 2**32, False), (lowered, True)):
                    if stored.numel() and torch.all(stored == value):
                        return self._replace(lowered=is_lowered)
        return self

    def read(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        stored = tensors.get("qweight")
        bits = bits_of(inputs, stored.shape[0] if stored is not None and stored.dim() else 0, "qweight")
        stored = expect("qweight", stored, (-(-inputs * bits // 32), outputs), (torch.int32,))
        scales = tensors.get("scales")
        groups = scales.shape[0] if scales is not None and scales.dim() else 0
        group_size = whole_groups(inputs, groups, "scales", self.group_sizes)
        scales = expect("scales", scales, (groups, outputs), FLOATS)
        lines = -(-outputs * bits // 32)
        zeros = expect("qzeros", tensors.get("qzeros"), (groups, lines), (torch.int32,))
        zeros = words.unpacked(zeros, bits)[:, :outputs]
        if self.lowered:
            zeros = (zeros + 1) & (2**bits - 1)
        numbers = words.unpacked(stored.t(), bits)[:, :inputs]
        order = None
        if "g_idx" in tensors:
            g_idx = expect("g_idx", tensors["g_idx"], (inputs,), (torch.int32, torch.int64))
            order = order_of(g_idx, group_size, "g_idx")
        if order is not None:
            numbers = numbers[:, order]
        apart = unless_middle(zeros.t().contiguous(), bits)
        return GroupedWeight(numbers.contiguous(), scales.t().contiguous(), apart, None, bits, group_size, order)

    def write(self, weight: GroupedWeight) -> dict[str, Tensor]:
        zeros = zeros_of(weight)
        if self.lowered:
            zeros = (zeros - 1) & (2**weight.bits - 1)
        return {
            "qweight": words.packed(in_input_order(weight), weight.bits).t().contiguous(),
            "qzeros": words.packed(zeros.t(), weight.bits),
            "scales": weight.scales.t().contiguous(),
            "g_idx": groups_of(weight),
        }
