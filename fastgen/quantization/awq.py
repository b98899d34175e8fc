"""The checkpoint format of AWQ (AutoAWQ, `gemm`): 4 bits, packed along N.

`qweight` is int32 [K, N / 8], `qzeros` int32 [groups, N / 8] and holds the zero points themselves, `scales` is [groups,
N]. The eight values of an int32, from the lowest bits on, are those of n = 0, 2, 4, 6, 1, 3, 5 and 7 of its eight.
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
    expect,
    in_input_order,
    unless_symmetric,
    whole_groups,
    zeros_of,
)
from fastgen.quantization.quantized_tensor import QuantizedTensor

# The n that the i-th value of an int32 belongs to, and the inverse.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INVERSE = tuple(_ORDER.index(n) for n in range(8))
_BITS = 4


class AWQ(NamedTuple):
    """AWQ in the layout `gemm`.

    Attributes:
        group_sizes: that the configuration names; empty if it does not.
    """

    group_sizes: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return "awq"

    @property
    def writable(self) -> bool:
        return True

    def resolved(self, tensors: Mapping[str, Tensor]) -> AWQ:
        return self

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        if n % 8:
            raise ValueError(f"qweight has {n} out_features, which is no multiple of 8: {ADVICE}")
        stored = expect("qweight", tensors.get("qweight"), (k, n // 8), (torch.int32,))
        scales = tensors.get("scales")
        groups = scales.shape[0] if scales is not None and scales.dim() else 0
        group_size = whole_groups(k, groups, "scales", self.group_sizes)
        scales = expect("scales", scales, (groups, n), FLOATS)
        zeros = expect("qzeros", tensors.get("qzeros"), (groups, n // 8), (torch.int32,))
        apart = unless_symmetric(_unpacked(zeros), _BITS)
        return QuantizedTensor(_unpacked(stored), scales.t().contiguous(), apart, None, _BITS, group_size, None)

    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        return {
            "qweight": _packed(in_input_order(weight)),
            "qzeros": _packed(zeros_of(weight)),
            "scales": weight.scales.t().contiguous(),
        }


def _unpacked(stored: Tensor) -> Tensor:
    """[N, rows], from int32 [rows, N / 8]."""
    return _reordered(int32_packing.unpacked(stored, _BITS), _INVERSE).t().contiguous()


def _packed(qweight: Tensor) -> Tensor:
    return int32_packing.packed(_reordered(qweight.t(), _ORDER), _BITS)


def _reordered(qweight: Tensor, order: tuple[int, ...]) -> Tensor:
    """The columns, eight at a time, in this order."""
    return qweight.reshape(qweight.shape[0], -1, 8)[:, :, list(order)].flatten(1)
