"""Packed weights: their formats and layouts, and how quantised values are packed and read back.

A weight in groups has a quantised value q of 4 to 8 bits for each element, and a scale and a zero point or a min for
each out_feature and group of in_features:

    weight = scale * (q - zero)      or      weight = scale * q + min

Weights may be *rotated* before they are rounded: each group is multiplied with the Hadamard matrix H of its size, and
so are the activations. H H^T is the group size times the identity; the result is divided by that size, and so does not
change. An outlier is spread over its whole group, and costs less precision (Ashkboos et al., "QuaRot: Outlier-Free
4-Bit Inference in Rotated LLMs", 2024, section 3).

Scales and mins may be quantised themselves, in super-blocks, as in GGUF's K-quants: bytes times a float16 for 8 or 16
groups. With groups of 32 they take 5 bits for 8 weights, instead of 16 in float32.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.linear import PANEL

BITS = (4, 5, 6, 8)
# K that is packed together, which divides a group; with 5 and 6 bits, it has a slice of upper bits.
_SET_K = {4: 8, 5: 32, 6: 16, 8: 4}
# In rows, K is padded to a multiple of this: 16 bytes of 4 bits.
ROW_K = 32
# Float products are summed in blocks of this many k, which groups divide (csrc/cpu/isa.h).
_DEPTH = 256
# Smaller scales lose precision in float16.
_LEAST_HALF = 2.0**-18
# The zero point of quantised scales in super-blocks without mins.
SIGNED_ZERO_POINT = 128


class Layout(enum.Enum):
    """The layout of a weight, [N, K], in memory."""

    ROWS = "rows"  # contiguous along K, as in `nn.Linear`
    COLUMNS = "columns"  # contiguous along N, as in GPT-2's `Conv1D`
    PANELS = "panels"  # as the kernels on the CPU read it
    PLAIN = "plain"  # quantised values, a byte each, which no kernel reads


class Format(enum.Enum):
    """The format of a packed weight; that of other weights is their dtype."""

    EXACT = "exact"  # float32 that bfloat16 or float16 represents exactly
    BF16 = "bf16"  # rounded to bfloat16, for AMX or AVX-512 BF16
    GROUPS = "groups"  # quantised


class SuperBlockScales(NamedTuple):
    """Quantised scales and mins, and the factors of each super-block of 8 or 16 groups.

    Without mins, a super-block has 16 groups, and the zero point of their scales is `SIGNED_ZERO_POINT`.
    """

    scales: Tensor  # [N, groups], uint8
    mins: Tensor | None  # the same
    super_scales: Tensor  # [N, super-blocks], float16
    super_mins: Tensor | None  # the same

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Returns scales and mins, [N, groups], float32."""
        if self.mins is None or self.super_mins is None:
            return _scaled(self.super_scales, self.scales.float() - SIGNED_ZERO_POINT), None
        return _scaled(self.super_scales, self.scales), _scaled(self.super_mins, self.mins)


def _scaled(super_scales: Tensor, scales: Tensor) -> Tensor:
    groups = scales.shape[1] // super_scales.shape[1]
    return super_scales.float().repeat_interleave(groups, dim=1) * scales


class PackedWeight(NamedTuple):
    """A weight, [N, K], in the format and layout of a kernel.

    In groups it is in panels on a CPU, and in rows on a GPU. In rows, `qweight` is [N, K or K / 2] with K padded to a
    multiple of `ROW_K`, and scales, zeros and mins are [groups, N]. With 4 bits, 16 bytes hold 32 k: byte i has k = i
    in its lower nibble, and k = 16 + i in its upper one, so that neither q nor x must be reordered in registers. Scales
    are stored group by group, because a program needs those of all its n together.

    The formats `EXACT` and `BF16` are opaque panels, valid in this process. They have only `qweight`, n and k.
    """

    # Panels of groups are the same on every processor: [panels, slices, 32, 4], uint8. For each n of a panel, a slice
    # has 4 k of 8 bits, or the lower 4 bits of 8 k. With 5 and 6 bits, a slice with the upper bits of 32 or 16 k
    # follows those slices (`_interleaved`).
    qweight: Tensor
    # A tensor, [panels, groups, 32], float16 or float32. With super-blocks uint8 [panels, super-blocks, bytes]: 32
    # super-scales and 32 super-mins in float16, then for each group 32 quantised scales and 32 mins.
    scales: Any
    zeros: Tensor | None  # zero points, uint8, laid out as scales without super-blocks
    mins: Tensor | None  # the same, of the type of the scales
    order: Tensor | None  # [K], int64: column i is in_feature order[i]
    n: int
    k: int
    bits: int = 16
    group_size: int = 0
    rotated: bool = False  # groups, and so activations, are multiplied with the Hadamard matrix
    layout: Layout = Layout.PANELS
    format: Format = Format.GROUPS
    # Of a layer of a checkpoint (`fastgen.quantization.layer_weight`): the file's groups, which may be divided here,
    # and whether `keeps_floats`.
    file_group_size: int = 0
    takes_floats: bool = False


def pack(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    mins: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    order: Tensor | None = None,
    layout: Layout = Layout.PANELS,
) -> PackedWeight:
    """Packs a weight [N, K] in groups, on its own device.

    Args:
        qweight: [N, K], uint8, from 0 to 2**bits - 1, of 4, 5, 6 or 8 bits; in rows of 4 or 8.
        scales: [N, groups], floating: in panels kept in float16 if that changes none of them.
        zeros: [N, groups], uint8: the zero points; by default 2**(bits - 1), without mins.
        mins: [N, groups], floating: added in place of a zero point.
        group_size: in rows any; in panels from 8 to 256, a multiple of 8; of 32 with 5 bits, of 16 with 6 bits. The
            last group may be smaller.
        order: [K], int64: column i is the layer's in_feature order[i].

    Checks nothing: `fastgen.quantization.checkpoint.check` and the kernels do.
    """
    (n, k), order = qweight.shape, None if order is None else order.contiguous()
    if layout is Layout.ROWS:
        zeros, mins = (None if each is None else each.t().contiguous() for each in (zeros, mins))
        parts = _in_rows(qweight, bits), scales.t().contiguous(), zeros, mins, order
        return PackedWeight(*parts, n, k, bits, group_size, layout=layout)
    factors = [each for each in (scales, mins) if each is not None]
    is_half = all(torch.equal(each.half().to(each.dtype), each) for each in factors)
    dtype = torch.float16 if is_half else torch.float32
    return PackedWeight(
        _interleaved(qweight, bits, group_size),
        by_panels(scales.to(dtype)),
        None if zeros is None else by_panels(zeros),
        None if mins is None else by_panels(mins.to(dtype)),
        order,
        n,
        k,
        bits,
        group_size,
    )


def pack_super_blocks(qweight: Tensor, super_blocks: SuperBlockScales, *, bits: int, group_size: int) -> PackedWeight:
    """As `pack` in panels, for scales and mins in super-blocks, which are kept. K is a multiple of a super-block."""
    n, k = qweight.shape
    scales, mins, super_scales, super_mins = super_blocks
    per_block = scales.shape[1] // super_scales.shape[1]
    # [panels, super-blocks or groups, 1 or 2, 32]
    super_factors = torch.stack([by_panels(each) for each in (super_scales, super_mins) if each is not None], dim=2)
    factors = torch.stack([by_panels(each) for each in (scales, mins) if each is not None], dim=2)
    octets = super_factors.flatten(2).view(torch.uint8), factors.unflatten(1, (-1, per_block)).flatten(2)
    slices = _interleaved(qweight, bits, group_size)
    return PackedWeight(slices, torch.cat(octets, dim=2), None, None, None, n, k, bits, group_size)


def unpacked(weight: PackedWeight, which: Tensor | slice = slice(None)) -> tuple[Tensor, list[Tensor | None]]:
    """Inverts `pack` for all weight rows or some, [n] int64: returns qweight, [n, K], and [scales, zeros, mins].

    For a rotated weight, the last group is whole. With super-blocks, returns the products, in float32.
    """
    factors = weight.scales, weight.zeros, weight.mins
    if weight.layout is Layout.PLAIN:
        return weight.qweight[which], [None if each is None else each[which] for each in factors]
    if weight.layout is Layout.ROWS:
        qweight = _from_rows(weight.qweight[which], weight.bits)
        return qweight[:, : weight.k], [None if each is None else each.t()[which] for each in factors]
    if isinstance(which, slice):
        which = torch.arange(weight.n, device=weight.qweight.device)[which]
    panels, lanes = which // PANEL, which % PANEL
    qweight = _deinterleaved(weight.qweight[panels, :, lanes], weight.bits)
    return (
        qweight[:, : None if weight.rotated else weight.k],
        [None if each is None else each[panels, :, lanes] for each in _factors(weight)],
    )


def rows(weight: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of a weight in panels, [n, K], in a floating type: those that `which`, [n] int64, names.

    Raises:
        IndexError: there is no such row.
        ValueError: the weight is rotated, which mixes its in_features.
    """
    if weight.rotated:
        raise ValueError("rows of a rotated weight")
    # Zeros, because uninitialised memory must not be read while a step is recorded.
    like = torch.zeros(0, dtype=dtype, device=which.device)
    sizes = weight.n, weight.k, weight.bits, weight.group_size
    try:
        found = torch.ops.fastgen.grouped_rows.default(like, which.contiguous(), *weight[:4], *sizes)
    except RuntimeError as error:
        if "index out of range" not in str(error):
            raise
        raise IndexError(f"no such row: the weight has {weight.n}") from None
    return found if weight.order is None else found[:, weight.order.argsort()]


def values(qweight: Tensor, factors: list[Tensor | None], bits: int, group_size: int) -> Tensor:
    """Returns the dequantised weight, [N, K], in float32; the factors are scales, zeros and mins."""
    missing = -qweight.shape[1] % group_size  # of the last group
    whole = F.pad(qweight, (0, missing)) if missing else qweight
    groups = whole.unflatten(1, (-1, group_size)).float()
    scales, zeros, mins = (None if each is None else each.float().unsqueeze(2) for each in factors)
    assert scales is not None
    if mins is not None:
        found = groups * scales + mins
    else:
        found = (groups - (2.0 ** (bits - 1) if zeros is None else zeros)) * scales
    return found.flatten(1)[:, : qweight.shape[1]]


def keeps_floats(weight: PackedWeight) -> bool:
    """Whether linear ops with float activations serve a weight in panels, with the bits of those of the unpacked one.

    They do not serve rotated groups, groups that do not divide 256, and zero points whose products with their scales
    are not exact in float32. With 16-bit scales, no format in use has these.
    """
    if weight.rotated or _DEPTH % weight.group_size:
        return False
    if weight.zeros is None or weight.scales.dtype is torch.float16:
        return True
    return bool((weight.scales.double() * weight.zeros == (weight.scales * weight.zeros).double()).all())


def scales_of(least: Tensor, most: Tensor, bits: int) -> Tensor:
    """Returns the scales of groups with these least and largest elements, float32.

    The scale of a group makes its largest element 127 in 8 bits, or -8 in 4 bits, whatever its sign, so that all 16
    values are used. Scales are float16 if all of them are precise enough there, otherwise float32.
    """
    largest = torch.where(-least > most, -least, most)
    exact = largest / 127 if bits == 8 else torch.where(-least > most, least, most) / -8
    half = exact.half()
    sizes = half.abs()[exact != 0]
    is_half = bool(((sizes >= _LEAST_HALF) & sizes.isfinite()).all())
    return half if is_half else exact


# ---- panels


def by_panels(factors: Tensor) -> Tensor:
    """[N, groups] -> [panels, groups, 32]."""
    panels = -(-factors.shape[0] // PANEL)
    padded = factors.new_zeros(panels * PANEL, factors.shape[1])
    padded[: factors.shape[0]] = factors
    return padded.view(panels, PANEL, -1).transpose(1, 2).contiguous()


def _interleaved(qweight: Tensor, bits: int, group_size: int) -> Tensor:
    """Packs [N, K] as the `qweight` of a `PackedWeight` in panels."""
    n, k = qweight.shape
    panels, groups = -(-n // PANEL), -(-k // group_size)
    padded = torch.zeros(panels * PANEL, groups * group_size, dtype=torch.uint8, device=qweight.device)
    padded[:n, :k] = qweight
    fours = padded.view(panels, PANEL, -1, 4).transpose(1, 2)  # [panels, K / 4, N of a panel, 4]
    if bits == 8:
        return fours.contiguous()
    low = fours & 15 if bits > 4 else fours
    nibbles = low[:, 0::2] | low[:, 1::2] << 4
    if bits == 4:
        return nibbles.contiguous()
    in_set = _SET_K[bits] // 4
    high = (fours >> 4).unflatten(1, (-1, in_set))
    upper = torch.zeros_like(high[:, :, 0])
    for four in range(in_set):
        upper |= high[:, :, four] << (four * (bits - 4))
    return torch.cat((nibbles.unflatten(1, (-1, in_set // 2)), upper.unsqueeze(2)), dim=2).flatten(1, 2)


def _deinterleaved(slices: Tensor, bits: int) -> Tensor:
    """Inverts `_interleaved` for some weight rows, [n, slices, 4]: [n, K], with the padding of the last group."""
    if bits == 8:
        return slices.flatten(1)
    if bits == 4:
        return torch.stack((slices & 15, slices >> 4), dim=2).flatten(1)
    in_set = _SET_K[bits] // 4
    sets = slices.unflatten(1, (-1, in_set // 2 + 1))
    nibbles, upper = sets[:, :, :-1], sets[:, :, -1:]
    low = torch.stack((nibbles & 15, nibbles >> 4), dim=3).flatten(2, 3)  # [n, sets, fours, 4]
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=slices.device).view(1, 1, -1, 1)
    return (low | (upper >> shifts & 2 ** (bits - 4) - 1) << 4).flatten(1)


def _factors(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns scales, zeros and mins, [panels, groups, 32]."""
    if weight.scales.dtype is not torch.uint8:
        return weight.scales, weight.zeros, weight.mins
    # 16 groups without mins, 8 or 16 with them: the size tells which.
    size = weight.scales.shape[2]
    kinds = 1 if size == 2 * PANEL + 16 * PANEL else 2
    head = kinds * 2 * PANEL  # bytes of super-scales and super-mins
    factors = weight.scales[:, :, :head].contiguous().view(torch.float16).unflatten(2, (1, kinds, PANEL)).float()
    each = weight.scales[:, :, head:].unflatten(2, (-1, kinds, PANEL)).float()
    if kinds == 1:
        return (factors * (each - SIGNED_ZERO_POINT)).flatten(1, 2)[:, :, 0], None, None
    scales, mins = (factors * each).flatten(1, 2).unbind(2)
    return scales, None, mins


# ---- rows


def _in_rows(qweight: Tensor, bits: int) -> Tensor:
    """Packs [N, K] as the `qweight` of a `PackedWeight` in rows."""
    padded = F.pad(qweight, (0, -qweight.shape[1] % ROW_K))
    if bits == 4:
        low, high = padded.unflatten(1, (-1, 2, ROW_K // 2)).unbind(2)
        padded = (low | high << 4).flatten(1)
    return padded.contiguous()


def _from_rows(packed: Tensor, bits: int) -> Tensor:
    """Inverts `_in_rows` for some weight rows: [n, K], with its padding."""
    if bits == 8:
        return packed
    octets = packed.unflatten(1, (-1, 1, ROW_K // 2))
    return torch.cat((octets & 15, octets >> 4), dim=2).flatten(1)
