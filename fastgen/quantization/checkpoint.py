"""A group-quantised weight, the form into which every checkpoint format is read, and the interface of the formats.

A format is read for one layer at a time, from tensors with their names in the file, without the layer's own name:
`qweight`, `weight_packed` and so on. Any mismatch raises a one-line error that names the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear import weights
from fastgen.ops.linear.weights import SuperBlockScales

# For formats that pack values into int32; GGUF blocks have other numbers, too.
BITS = (4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class QuantizedTensor(NamedTuple):
    """A weight, [N, K], whose quantised values q represent scale * (q - zero) or scale * q + min.

    Each n and group along K has a scale, and a zero point or a min: columns g * group_size up to (g + 1) * group_size
    of `qweight` are group g.
    """

    qweight: Tensor  # uint8 [N, K]: 0 to 2**bits - 1, a value per byte, columns in the order of `order`
    scales: Tensor  # [N, groups], float16, bfloat16 or float32
    zeros: Tensor | None  # zero points, uint8 [N, groups]; without them 2**(bits - 1) ...
    mins: Tensor | None  # ... unless these are given: [N, groups], the dtypes of scales
    bits: int  # 4, 5, 6 or 8
    group_size: int
    order: Tensor | None  # int64 [K]: column i of `qweight` is the layer's in_feature order[i]; None: in order
    super_blocks: SuperBlockScales | None = None  # the factors of scales and mins, in K-quants


def dequantized(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in floating point, [N, K] in the layer's own order of in_features.

    It is computed in float32 and rounded to `dtype` once. Raises ValueError as `check` does.
    """
    check(weight)
    found = values(weight, dtype)
    return found if weight.order is None else found[:, torch.argsort(weight.order)]


def values(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in floating point, with columns in the order of `qweight`. Checks nothing."""
    factors = [weight.scales, weight.zeros, weight.mins]
    return weights.values(weight.qweight, factors, weight.bits, weight.group_size).to(dtype)


def check(weight: QuantizedTensor) -> None:
    """Checks that the parts fit together. Reads the order once, and `qweight` not at all.

    Raises:
        ValueError: a part has another shape or dtype than in `QuantizedTensor`, or the order is not a permutation.
    """
    qweight, scales, zeros, mins, bits, group_size, order, _ = weight
    if bits not in weights.BITS:
        raise ValueError(f"weights have {bits} bits: 4, 5, 6 and 8 are served")
    if qweight.dim() != 2 or qweight.dtype != torch.uint8:
        raise ValueError(f"qweight is {_described(qweight)}: it must be uint8 [N, K]")
    n, k = qweight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"{k} in_features are not whole groups of {group_size}")
    groups = k // group_size
    if zeros is not None and mins is not None:
        raise ValueError("a weight has zeros or mins, not both")
    for name, part, dtypes in (
        ("scales", scales, FLOATS),
        ("zeros", zeros, (torch.uint8,)),
        ("mins", mins, FLOATS),
    ):
        if part is not None and (part.shape != (n, groups) or part.dtype not in dtypes):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} are {_described(part)}: they must be {wanted} {[n, groups]}")
    if order is not None:
        _check_order(order, k)


def _check_order(order: Tensor, k: int) -> None:
    if order.shape != (k,) or order.dtype != torch.int64:
        raise ValueError(f"the order is {_described(order)}: it must be int64 {[k]}")
    if not torch.equal(order.sort().values, torch.arange(k, device=order.device)):
        raise ValueError(f"the order does not name each of the {k} in_features once")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# ---- the interface of formats

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
