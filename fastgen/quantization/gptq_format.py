"""The checkpoint format of GPTQ (AutoGPTQ, GPTQModel).

`qweight` is int32 [K * bits / 32, N], packed along K. `qzeros`, int32 [groups, N * bits / 32], and `scales`, [groups,
N], belong to groups along K; `g_idx`, [K], names the group of each in_feature. Version 1 stores a zero point minus 1,
modulo 2**bits, version 2 the zero point itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization import int32_packing
from fastgen.quantization.checkpoint import (
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
from fastgen.quantization.quantized_tensor import BITS, QuantizedTensor


class GPTQ(NamedTuple):
    """GPTQ, as a file's configuration says.

    Attributes:
        lowered: zero points are stored minus 1 (version 1).
        symmetric: every zero point is the middle of the range. Then the stored values tell the version, and count more
            than what the file says: files say version 1 and hold version 2.
        group_sizes: that the configuration names; empty if it does not.
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
                # The middle of the range in each value of an int32, and one less.
                exact = sum(2 ** (bits - 1) << shift for shift in range(0, 32, bits))
                lowered = sum((2 ** (bits - 1) - 1) << shift for shift in range(0, 32, bits))
                for value, is_lowered in ((exact - 2**32, False), (lowered, True)):
                    if stored.numel() and torch.all(stored == value):
                        return self._replace(lowered=is_lowered)
        return self

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        stored = tensors.get("qweight")
        bits = bits_of(k, stored.shape[0] if stored is not None and stored.dim() else 0, "qweight")
        stored = expect("qweight", stored, (-(-k * bits // 32), n), (torch.int32,))
        scales = tensors.get("scales")
        groups = scales.shape[0] if scales is not None and scales.dim() else 0
        group_size = whole_groups(k, groups, "scales", self.group_sizes)
        scales = expect("scales", scales, (groups, n), FLOATS)
        words = -(-n * bits // 32)
        zeros = expect("qzeros", tensors.get("qzeros"), (groups, words), (torch.int32,))
        zeros = int32_packing.unpacked(zeros, bits)[:, :n]
        if self.lowered:
            zeros = (zeros + 1) & (2**bits - 1)
        qweight = int32_packing.unpacked(stored.t(), bits)[:, :k]
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
            "qweight": int32_packing.packed(in_input_order(weight), weight.bits).t().contiguous(),
            "qzeros": int32_packing.packed(zeros.t(), weight.bits),
            "scales": weight.scales.t().contiguous(),
            "g_idx": groups_of(weight),
        }
