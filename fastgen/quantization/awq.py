"""The checkpoint format of AWQ (AutoAWQ, `gemm`): 4 bits, packed along the outputs.

`qweight` is int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8] and holds the zeros themselves, `scales`
is [groups, outputs]. The eight numbers of a word, from the lowest bits on, are those of outputs 0, 2, 4, 6, 1, 3, 5
and 7 of the word's eight.
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
    expect,
    in_input_order,
    unless_middle,
    whole_groups,
    zeros_of,
)
from fastgen.quantization.grouped import GroupedWeight

# The output that the i-th number of a word belongs to, and where the number of each output is.
_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = tuple(_OUTPUTS.index(output) for output in range(8))
_BITS = 4


class AWQ(NamedTuple):
    """AWQ in the layout `gemm`.

    Attributes:
        group_sizes: inputs per group that the configuration names; empty if it does not.
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

    def read(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        if outputs % 8:
            raise ValueError(f"qweight is of {outputs} outputs, which are no whole words of 8: {ADVICE}")
        stored = expect("qweight", tensors.get("qweight"), (inputs, outputs // 8), (torch.int32,))
        scales = tensors.get("scales")
        groups = scales.shape[0] if scales is not None and scales.dim() else 0
        group_size = whole_groups(inputs, groups, "scales", self.group_sizes)
        scales = expect("scales", scales, (groups, outputs), FLOATS)
        zeros = expect("qzeros", tensors.get("qzeros"), (groups, outputs // 8), (torch.int32,))
        apart = unless_middle(_unpacked(zeros), _BITS)
        return GroupedWeight(_unpacked(stored), scales.t().contiguous(), apart, None, _BITS, group_size, None)

    def write(self, weight: GroupedWeight) -> dict[str, Tensor]:
        return {
            "qweight": _packed(in_input_order(weight)),
            "qzeros": _packed(zeros_of(weight)),
            "scales": weight.scales.t().contiguous(),
        }


def _unpacked(stored: Tensor) -> Tensor:
    """Numbers, [outputs, rows], from words, [rows, outputs / 8]."""
    return _reordered(words.unpacked(stored, _BITS), _PLACES).t().contiguous()


def _packed(numbers: Tensor) -> Tensor:
    return words.packed(_reordered(numbers.t(), _OUTPUTS), _BITS)


def _reordered(numbers: Tensor, places: tuple[int, ...]) -> Tensor:
    """The columns, eight at a time, in the order of `places`."""
    return numbers.reshape(numbers.shape[0], -1, 8)[:, :, list(places)].flatten(1)
