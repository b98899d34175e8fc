"""The interface of all checkpoint formats, and checks that they share.

A format is read for one layer at a time, from tensors with their names in the file, without the layer's own name:
`qweight`, `weight_packed` and so on. Any mismatch raises a one-line error that names the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fastgen.quantization.quantized_tensor import BITS, QuantizedTensor

# Advice to the user for all of these errors.
ADVICE = "the file is damaged or of another format; fetch it again"


@dataclass(frozen=True)
class Format(ABC):
    """How the weight of a linear layer, [N, K], is stored.

    Attributes:
        name: its name in reports.
        tensors: names of the tensors that a layer may have in the files, besides a bias; each low-bit layer has the
            first.
        writable: whether `write` reproduces what was read.
        group_sizes: group sizes in the configuration; empty if it has none.
    """

    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]
    writable: ClassVar[bool] = True
    group_sizes: frozenset[int] = field(default=frozenset(), kw_only=True)

    def resolved(self, tensors: Mapping[str, Tensor]) -> Format:
        """Returns the format, completed with what only the values of a layer's tensors reveal."""
        return self

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        """Reads the weight from these tensors. Raises ValueError if they do not fit."""

    @abstractmethod
    def write(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """Inverts `read`: returns all tensors that the format may have, on the same device."""


def bits_of(columns: int, words: int, what: str) -> int:
    """Returns the bits of a value if this many columns fill this many 32-bit words. Raises ValueError if not 4 or 8."""
    for bits in BITS:
        if -(-columns * bits // 32) == words:
            return bits
    raise ValueError(f"{what} has {words} words for {columns} values, which is neither 4 nor 8 bits: {ADVICE}")


def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Returns the tensor, which must exist with this shape and one of these dtypes."""
    if tensor is None:
        raise ValueError(f"{name} is missing: {ADVICE}")
    if tensor.shape != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(_short(dtype) for dtype in dtypes)
        found = f"{_short(tensor.dtype)} {list(tensor.shape)}"
        raise ValueError(f"{name} is {found} and must be {wanted} {list(shape)}: {ADVICE}")
    return tensor


def whole_groups(k: int, groups: int, what: str, sizes: Collection[int] = ()) -> int:
    """Returns the group size, which must divide K.

    sizes: group sizes in the configuration, if any; -1 or 0 means one group for all of K.
    """
    if groups < 1 or k % groups:
        raise ValueError(f"{what} has {groups} groups for {k} in_features, which are no whole groups: {ADVICE}")
    size = k // groups
    if sizes and size not in sizes and not (groups == 1 and any(each < 1 or each >= k for each in sizes)):
        raise ValueError(f"{what} has groups of {size}, and the configuration says {sorted(sizes)}: {ADVICE}")
    return size


def order_of(groups: Tensor, group_size: int, name: str) -> Tensor | None:
    """Returns the in_features sorted by the group that each belongs to; None if they are already sorted.

    groups: [K], integers. Each group must have `group_size` of them.
    """
    groups = groups.to(torch.int64)
    count = groups.numel() // group_size
    if groups.numel() and (int(groups.min()) < 0 or int(groups.max()) >= count):
        raise ValueError(
            f"{name} names groups {int(groups.min())} to {int(groups.max())}, and there are {count}: {ADVICE}"
        )
    sizes = torch.bincount(groups, minlength=count)
    if not torch.all(sizes == group_size):
        uneven = int(torch.nonzero(sizes != group_size)[0])
        raise ValueError(f"group {uneven} in {name} has {int(sizes[uneven])} in_features, not {group_size}: {ADVICE}")
    order = torch.argsort(groups, stable=True)
    return None if torch.equal(order, torch.arange(groups.numel(), device=groups.device)) else order


def groups_of(weight: QuantizedTensor) -> Tensor:
    """Returns the group of each in_feature, [K] in int32, as `order_of` reads it."""
    k = weight.qweight.shape[1]
    sorted_groups = torch.arange(k, device=weight.qweight.device, dtype=torch.int32) // weight.group_size
    if weight.order is None:
        return sorted_groups
    return torch.empty_like(sorted_groups).index_copy_(0, weight.order, sorted_groups)


def in_input_order(weight: QuantizedTensor) -> Tensor:
    """Returns `qweight` with its columns in the layer's own order."""
    return weight.qweight if weight.order is None else weight.qweight[:, torch.argsort(weight.order)]


def unless_symmetric(zeros: Tensor, bits: int) -> Tensor | None:
    """Returns the zero points; None if all are the middle of the range, which need not be stored."""
    return None if torch.all(zeros == 2 ** (bits - 1)) else zeros


def zeros_of(weight: QuantizedTensor) -> Tensor:
    """Returns the zero points, [N, groups], even if they are not stored."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8, device=weight.scales.device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- int32 bit packing: values of 4 or 8 bits, the first in the lowest bits


def unpack_int32(words: Tensor, bits: int) -> Tensor:
    """Unpacks words, [rows, words] in int32, into values: uint8, [rows, words * 32 / bits]."""
    # As one row: a tensor of one row may have any stride, and then cannot be viewed as another type.
    octets = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), 4 * words.shape[1])
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def pack_int32(values: Tensor, bits: int) -> Tensor:
    """Packs values, [rows, columns] in uint8, into words, [rows, words] in int32; zeros fill the last word."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    octets = values if bits == 8 else values[:, ::2] | (values[:, 1::2] << 4)
    return octets.reshape(-1).contiguous().view(torch.int32).view(len(octets), octets.shape[1] // 4)
