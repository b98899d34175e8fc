"""Linear layers on group-quantised weights of 4 to 8 bits: those of quantised checkpoints, and FastGen's own.

    weight = scale * (q - zero)      or      weight = scale * q + min

with a quantised value q for each element, and a scale and a zero point or a min for each out_feature and group of
in_features. Activations stay floats, or are quantised to 8 bits.

**Floats.** The weight is dequantised in registers, exactly (csrc/cpu/gemm/panels.cpp). The result has the same bits as
`fastgen.ops.linear.kernels` with the unpacked weight, whatever M, the other rows and the number of threads are.

**8 bits.** The activations of a row and group become multiples of 1/127 of the largest of them. Products within a group
are exact, in integers; groups are added in float32 (see Dettmers and Zettlemoyer, "The case for 4-bit precision", 2023,
section 2). So a result differs from the product with the float32 weight only by rounding the activations: by at most
`sum over groups of (largest activation of the group) / 254 * sum of |weight|`. A row has the same result whatever the
other rows and the number of threads are.

Weights may be *rotated* before they are rounded: each group is multiplied with the Hadamard matrix H of its size, and
so are the activations. H H^T is the group size times the identity; the result is divided by that size, and so does not
change. An outlier is spread over its whole group, and costs less precision (Ashkboos et al., "QuaRot: Outlier-Free
4-Bit Inference in Rotated LLMs", 2024, section 3). The bound then holds for the rotated operands.

Scales and mins may be quantised themselves, in super-blocks, as in GGUF's K-quants: bytes times a float16 for 8 or 16
groups. With groups of 32 they take 5 bits for 8 weights, instead of 16 in float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows, with_shape_of

# N of a panel (csrc/cpu/gemm/packed.h).
_PANEL = 32
BITS = (4, 5, 6, 8)
# K that is packed together, which divides a group; with 5 and 6 bits, it has a slice of upper bits.
_SET_K = {4: 8, 5: 32, 6: 16, 8: 4}
# Float products are summed in blocks of this many k, which groups divide (csrc/cpu/isa.h).
_DEPTH = 256
# Smaller scales lose precision in float16.
_LEAST_HALF = 2.0**-18
# The zero point of quantised scales in super-blocks without mins.
SIGNED_ZERO_POINT = 128


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
    """A group-quantised weight, [N, K], in the layout of the kernels: in panels on a CPU, in rows on a GPU.

    In rows (`fastgen.ops.gpu.grouped_linear`), `qweight` is [N, K or K / 2] with K padded to a multiple of 32, and
    scales, zeros and mins are [groups, N].
    """

    # In panels [panels, slices, 32, 4], uint8: for each n of a panel, a slice has 4 k of 8 bits, or the lower 4 bits of
    # 8 k. With 5 and 6 bits, a slice with the upper bits of 32 or 16 k follows those slices (`_interleaved`).
    qweight: Tensor
    # [panels, groups, 32], float16 or float32. With super-blocks uint8 [panels, super-blocks, bytes]: 32 super-scales
    # and 32 super-mins in float16, then for each group 32 quantised scales and 32 mins.
    scales: Tensor
    zeros: Tensor | None  # zero points, uint8, laid out as scales without super-blocks
    mins: Tensor | None  # the same, of the type of the scales
    order: Tensor | None  # [K], int64: column i is in_feature order[i]
    n: int
    k: int
    bits: int
    group_size: int
    rotated: bool = False  # groups, and so activations, are multiplied with the Hadamard matrix
    in_rows: bool = False


def pack(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    mins: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    order: Tensor | None = None,
) -> PackedWeight:
    """Packs a weight [N, K] in panels, which are the same on every processor.

    Args:
        qweight: [N, K], uint8, from 0 to 2**bits - 1, of 4, 5, 6 or 8 bits.
        scales: [N, groups], floating: kept in float16 if that changes none of them.
        zeros: [N, groups], uint8: the zero points; by default 2**(bits - 1), without mins.
        mins: [N, groups], floating: added in place of a zero point.
        group_size: from 8 to 256, a multiple of 8; of 32 with 5 bits, of 16 with 6 bits. The last group may be smaller.
        order: [K], int64: column i is the layer's in_feature order[i].

    Checks nothing: `fastgen.quantization.checkpoint.check` and the kernels do.
    """
    n, k = qweight.shape
    factors = [each for each in (scales, mins) if each is not None]
    is_half = all(torch.equal(each.half().to(each.dtype), each) for each in factors)
    dtype = torch.float16 if is_half else torch.float32
    return PackedWeight(
        _interleaved(qweight, bits, group_size),
        _by_panels(scales.to(dtype)),
        None if zeros is None else _by_panels(zeros),
        None if mins is None else _by_panels(mins.to(dtype)),
        None if order is None else order.contiguous(),
        n,
        k,
        bits,
        group_size,
    )


def pack_super_blocks(qweight: Tensor, super_blocks: SuperBlockScales, *, bits: int, group_size: int) -> PackedWeight:
    """As `pack`, for scales and mins in super-blocks, which are kept. K is a multiple of a super-block."""
    n, k = qweight.shape
    scales, mins, super_scales, super_mins = super_blocks
    per_block = scales.shape[1] // super_scales.shape[1]
    # [panels, super-blocks or groups, 1 or 2, 32]
    super_factors = torch.stack([_by_panels(each) for each in (super_scales, super_mins) if each is not None], dim=2)
    factors = torch.stack([_by_panels(each) for each in (scales, mins) if each is not None], dim=2)
    octets = super_factors.flatten(2).view(torch.uint8), factors.unflatten(1, (-1, per_block)).flatten(2)
    slices = _interleaved(qweight, bits, group_size)
    return PackedWeight(slices, torch.cat(octets, dim=2), None, None, None, n, k, bits, group_size)


def _interleaved(qweight: Tensor, bits: int, group_size: int) -> Tensor:
    """Packs [N, K] as the `qweight` of a `PackedWeight` in panels."""
    n, k = qweight.shape
    panels, groups = -(-n // _PANEL), -(-k // group_size)
    padded = torch.zeros(panels * _PANEL, groups * group_size, dtype=torch.uint8, device=qweight.device)
    padded[:n, :k] = qweight
    fours = padded.view(panels, _PANEL, -1, 4).transpose(1, 2)  # [panels, K / 4, N of a panel, 4]
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


def rounded(weight: Tensor, bits: int, group_size: int, rotated: bool = False) -> PackedWeight:
    """Rounds a floating weight [N, K] to nearest, and packs it in panels.

    The scale of a group makes its largest weight 127 in 8 bits, or -8 in 4 bits, whatever its sign, so that all 16
    values are used. Scales are in float16 if all of them can be. Groups that are `rotated` have 32, 64 or 128 elements.

    Raises:
        RuntimeError: the shape or the sizes do not fit.
    """
    weight = weight.detach()
    least, most = torch.ops.fastgen.group_extremes.default(weight, group_size, rotated)
    scales = scales_of(least, most, bits)
    qweight = torch.ops.fastgen.round_to_panels.default(weight, scales.float(), bits, group_size, rotated)
    packed, (n, k) = _by_panels(scales), weight.shape
    return PackedWeight(qweight, packed, None, None, None, n, k, bits, group_size, rotated)


def scales_of(least: Tensor, most: Tensor, bits: int) -> Tensor:
    """Returns the scales of groups with these least and largest elements, float32.

    They are float16 if all of them are precise enough there, otherwise float32.
    """
    largest = torch.where(-least > most, -least, most)
    exact = largest / 127 if bits == 8 else torch.where(-least > most, least, most) / -8
    half = exact.half()
    sizes = half.abs()[exact != 0]
    is_half = bool(((sizes >= _LEAST_HALF) & sizes.isfinite()).all())
    return half if is_half else exact


def _by_panels(factors: Tensor) -> Tensor:
    """[N, groups] -> [panels, groups, 32]."""
    panels = -(-factors.shape[0] // _PANEL)
    padded = factors.new_zeros(panels * _PANEL, factors.shape[1])
    padded[: factors.shape[0]] = factors
    return padded.view(panels, _PANEL, -1).transpose(1, 2).contiguous()


def unpacked(weight: PackedWeight, which: Tensor | slice = slice(None)) -> tuple[Tensor, list[Tensor | None]]:
    """Inverts `pack` for all weight rows or some, [n] int64: returns qweight, [n, K], and [scales, zeros, mins].

    For a rotated weight, the last group is whole. With super-blocks, returns the products, in float32.
    """
    if isinstance(which, slice):
        which = torch.arange(weight.n, device=weight.qweight.device)[which]
    panels, lanes = which // _PANEL, which % _PANEL
    qweight = _deinterleaved(weight.qweight[panels, :, lanes], weight.bits)
    return (
        qweight[:, : None if weight.rotated else weight.k],
        [None if factor is None else factor[panels, :, lanes] for factor in _factors(weight)],
    )


def _factors(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns scales, zeros and mins, [panels, groups, 32]."""
    if weight.scales.dtype is not torch.uint8:
        return weight.scales, weight.zeros, weight.mins
    # 16 groups without mins, 8 or 16 with them: the size tells which.
    size = weight.scales.shape[2]
    kinds = 1 if size == 2 * _PANEL + 16 * _PANEL else 2
    head = kinds * 2 * _PANEL  # bytes of super-scales and super-mins
    factors = weight.scales[:, :, :head].contiguous().view(torch.float16).unflatten(2, (1, kinds, _PANEL)).float()
    each = weight.scales[:, :, head:].unflatten(2, (-1, kinds, _PANEL)).float()
    if kinds == 1:
        return (factors * (each - SIGNED_ZERO_POINT)).flatten(1, 2)[:, :, 0], None, None
    scales, mins = (factors * each).flatten(1, 2).unbind(2)
    return scales, None, mins


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


def rows(weight: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of the weight, [n, K], in a floating type: those that `which`, [n] int64, names.

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


def grouped_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, floats: bool = False) -> Tensor:
    """`torch.nn.functional.linear(x, the dequantised weight, bias)`, summed in float32; not differentiable.

    x is [..., K] in float32, bfloat16 or float16, as is the result; the bias [N] in any of them.

    Args:
        floats: keep x in floating point, for a weight of which `keeps_floats` is true. Otherwise x is quantised to 8
            bits, and infinities or NaN in a group of x give NaN.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    rows = as_rows(x)
    if rows.shape[1] != weight.k:
        raise RuntimeError(f"grouped_linear: x is [..., {rows.shape[1]}], the weight [{weight.n}, {weight.k}]")
    sizes = weight.n, weight.bits, weight.group_size, weight.rotated, floats
    return with_shape_of(x, torch.ops.fastgen.grouped_linear.default(rows, *weight[:5], bias, *sizes))


def keeps_floats(weight: PackedWeight) -> bool:
    """Whether products with float activations serve the weight, with the bits of those of the unpacked weight.

    They do not serve rotated groups, groups that do not divide 256, and zero points whose products with their scales
    are not exact in float32. With 16-bit scales, no format in use has these.
    """
    if weight.rotated or _DEPTH % weight.group_size:
        return False
    if weight.zeros is None or weight.scales.dtype is torch.float16:
        return True
    return bool((weight.scales.double() * weight.zeros == (weight.scales * weight.zeros).double()).all())


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process."""
    return _library.has_kernel("fastgen::grouped_linear_out") and _library.has_kernel("fastgen::grouped_rows")


def unavailable() -> str | None:
    """Returns why products with group-quantised weights gain nothing in this process; None if they do."""
    if not is_available():
        return _library.load("CPU") or "no kernel for this processor"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "this processor does not have AVX2, or may not use it"
    return None


def _fake_panels(weight: Tensor, scales: Tensor, bits: int, group_size: int, rotated: bool) -> Tensor:
    panels, slices = -(-weight.shape[0] // _PANEL), scales.shape[1] * group_size * bits // 32
    return weight.new_empty(panels, slices, _PANEL, 4, dtype=torch.uint8)


_SIZES = "int bits, int group_size, bool rotated, bool floats"
_PACKED = "qweight, Tensor scales, Tensor? zeros, Tensor? mins, Tensor? order, Tensor? bias"
_library.define(
    "group_extremes(Tensor weight, int group_size, bool rotated) -> Tensor",
    fake=lambda weight, size, rotated: weight.new_empty(
        2, weight.shape[0], -(-weight.shape[1] // size), dtype=torch.float32
    ),
)
_library.define(
    "round_to_panels(Tensor weight, Tensor scales, int bits, int group_size, bool rotated) -> Tensor",
    fake=_fake_panels,
)
_library.define(
    "grouped_rows(Tensor like, Tensor which, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? mins, "
    "int n, int k, int bits, int group_size) -> Tensor",
    fake=lambda like, which, *rest: like.new_empty(which.shape[0], rest[-3]),  # [n, K]
)
_library.define(
    f"grouped_linear(Tensor x, Tensor {_PACKED}, int n, {_SIZES}) -> Tensor",
    fake=lambda x, *rest: x.new_empty(x.shape[0], rest[6]),  # [M, N]
)
_library.define(
    f"grouped_linear_out(Tensor(a!) out, Tensor x, Tensor {_PACKED}, {_SIZES}) -> ()", fake=lambda *arguments: None
)
# Several linear ops on the same x.
_library.define(
    "grouped_linear_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] qweight, Tensor[] scales, Tensor?[] zeros, "
    f"Tensor?[] mins, Tensor? order, Tensor?[] bias, {_SIZES}) -> ()",
    fake=lambda *arguments: None,
)
OPERATOR = torch.ops.fastgen.grouped_linear.default
