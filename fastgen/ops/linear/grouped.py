"""Linear layers on weights of 4 to 8 bits in groups of inputs: those of quantised checkpoints, and FastGen's own.

    weight = scale * (number - zero)      or      weight = scale * number + minimum

with a scale, and a zero or a minimum, for each output and group. The activations stay floats, or are rounded to 8 bits.

**Floats.** Numbers become the weight's in the registers, to the last bit (csrc/cpu/gemm/panels.cpp). The result has
the bits of `fastgen.ops.linear.gemm` with the unpacked weight, whatever the other rows and the number of
threads.

**8 bits.** Activations become multiples of a 127th of the largest of their row and group. What these integers come to
within a group is exact; groups are added in float32 (for groups of inputs see Dettmers and Zettlemoyer, "The case for
4-bit precision", 2023, section 2). So a result differs from the product with the weight in float32 by rounding the
activations alone: by at most `sum over groups of (largest input of the group) / 254 * sum of |weight|`. A row has the
same result whatever the other rows and the number of threads.

Weights may be *rotated* before they are rounded: each group is multiplied with the Hadamard matrix H of its size
n, and so are the inputs, before they are rounded. As H H^T = n, which the inputs are divided by, the product stays.
What is much larger than the rest of its group is spread over the whole group, and costs fewer digits (Ashkboos et al.,
"QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 3). The bound then holds for what is rotated.

Scales and minimums may be *multiples*: bytes times numbers in float16 of 8 or 16 groups in a row, as GGUF's types with
a K have them. In groups of 32 they take 5 bits for 8 weights, where those in float32 take 16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows

# Outputs of a panel (csrc/cpu/gemm/packed.h).
_PANEL = 32
BITS = (4, 5, 6, 8)
# Inputs of a set of lines, which groups are whole numbers of: of 5 and 6 bits, it has a line of upper bits.
_SET_INPUTS = {4: 8, 5: 32, 6: 16, 8: 4}
# Products of so many inputs are summed among themselves: groups of float products divide it (csrc/cpu/gemm/isa.h).
_DEPTH = 256
# Smaller scales have too few digits in float16.
_LEAST_HALF = 2.0**-18
# Without minimums, bytes of scales stand for themselves less this.
SIGNED_MIDDLE = 128


class Multiples(NamedTuple):
    """Scales and minimums as bytes times a number for each block, which is 8 or 16 groups in a row.

    Without minimums, a block has 16 groups, and a byte stands for itself less `SIGNED_MIDDLE`.
    """

    scales: Tensor  # [outputs, groups], uint8
    minimums: Tensor | None  # the same
    scale_units: Tensor  # [outputs, blocks], float16
    minimum_units: Tensor | None  # the same

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minimums, [outputs, groups], float32."""
        if self.minimums is None or self.minimum_units is None:
            return _multiplied(self.scale_units, self.scales.float() - SIGNED_MIDDLE), None
        found = _multiplied(self.scale_units, self.scales), _multiplied(self.minimum_units, self.minimums)
        return found


def _multiplied(units: Tensor, each: Tensor) -> Tensor:
    groups = each.shape[1] // units.shape[1]
    return units.float().repeat_interleave(groups, dim=1) * each


class PackedWeight(NamedTuple):
    """What `pack` makes of a weight."""

    # [panels, lines, 32, 4], uint8: a line has a word for each output of a panel, with 4 inputs of 8 bits or the lower
    # 4 bits of 8 inputs. Of 5 and 6 bits, a line with the upper bits of 32 or 16 inputs follows those (`_in_lines`).
    numbers: Tensor
    # [panels, groups, 32], float16 or float32. Multiples: uint8 [panels, blocks, bytes], for each block 32 units of
    # scales and 32 of minimums in float16, then for each of its groups 32 bytes of scales and 32 of minimums.
    scales: Tensor
    zeros: Tensor | None  # as scales that are no multiples, uint8
    minimums: Tensor | None  # the same, of the type of the scales
    order: Tensor | None  # [inputs], int64: which input each column belongs to
    outputs: int
    inputs: int
    bits: int
    group_size: int
    # Numbers are those of the weight times the Hadamard matrix of a group: inputs are multiplied with it, too.
    rotated: bool = False


def pack(
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    order: Tensor | None = None,
) -> PackedWeight:
    """A weight [outputs, inputs] in the layout of the kernels, which is the same on every processor.

    Args:
        numbers: [outputs, inputs], uint8, from 0 to 2**bits - 1, of 4, 5, 6 or 8 bits.
        scales: [outputs, groups], floating: kept in float16 if that is what they are or changes none of them.
        zeros: [outputs, groups], uint8: the number that stands for 0; by default 2**(bits - 1), without minimums.
        minimums: [outputs, groups], floating: what is added instead.
        group_size: inputs of a group, from 8 to 256, in eights; of 5 bits in 32s, of 6 bits in 16s. The last group may
            have fewer.
        order: [inputs], int64: the column i is that of the layer's input order[i].

    Raises:
        ValueError: shapes, types or sizes are not as above.
    """
    _check(numbers, scales, zeros, minimums, bits, group_size, order)
    outputs, inputs = numbers.shape
    factors = [each for each in (scales, minimums) if each is not None]
    is_half = all(torch.equal(each.half().to(each.dtype), each) for each in factors)
    dtype = torch.float16 if is_half else torch.float32
    return PackedWeight(
        _in_lines(numbers, bits, group_size),
        _by_panels(scales.to(dtype)),
        None if zeros is None else _by_panels(zeros),
        None if minimums is None else _by_panels(minimums.to(dtype)),
        None if order is None else order.contiguous(),
        outputs,
        inputs,
        bits,
        group_size,
    )


def pack_multiples(numbers: Tensor, multiples: Multiples, *, bits: int, group_size: int) -> PackedWeight:
    """`pack` for scales and minimums that are multiples, and stay so. The inputs are whole blocks.

    Raises:
        ValueError: shapes, types or sizes are not as `Multiples` and `pack` say.
    """
    outputs, inputs = numbers.shape
    scales, minimums, scale_units, minimum_units = multiples
    blocks = scale_units.shape[1] if scale_units.dim() == 2 else 0
    groups = inputs // group_size
    per_block = groups // max(blocks, 1)
    _check(numbers, scales.half(), None, None if minimums is None else minimums.half(), bits, group_size, None)
    if (minimums is None) != (minimum_units is None) or per_block not in ((8, 16) if minimums is not None else (16,)):
        raise ValueError(f"{groups} groups in {blocks} blocks: 8 or 16 groups in each, and 16 without minimums")
    if inputs != blocks * per_block * group_size:
        raise ValueError(f"{inputs} inputs are no whole blocks of {per_block} groups of {group_size}")
    for name, each, shape, dtype in (
        ("scales", scales, (outputs, groups), torch.uint8),
        ("minimums", minimums, (outputs, groups), torch.uint8),
        ("scale_units", scale_units, (outputs, blocks), torch.float16),
        ("minimum_units", minimum_units, (outputs, blocks), torch.float16),
    ):
        if each is not None and (each.shape != shape or each.dtype is not dtype):
            raise ValueError(f"{name} must be {dtype}, {list(shape)}, not {each.dtype}, {list(each.shape)}")
    # [panels, blocks or groups, 1 or 2, 32]
    units = torch.stack([_by_panels(each) for each in (scale_units, minimum_units) if each is not None], dim=2)
    factors = torch.stack([_by_panels(each) for each in (scales, minimums) if each is not None], dim=2)
    octets = units.flatten(2).view(torch.uint8), factors.unflatten(1, (-1, per_block)).flatten(2)
    lines = _in_lines(numbers, bits, group_size)
    return PackedWeight(lines, torch.cat(octets, dim=2), None, None, None, outputs, inputs, bits, group_size)


def _in_lines(numbers: Tensor, bits: int, group_size: int) -> Tensor:
    """The numbers as `PackedWeight` has them."""
    outputs, inputs = numbers.shape
    panels, groups = -(-outputs // _PANEL), -(-inputs // group_size)
    wide = torch.zeros(panels * _PANEL, groups * group_size, dtype=torch.uint8, device=numbers.device)
    wide[:outputs, :inputs] = numbers
    fours = wide.view(panels, _PANEL, -1, 4).transpose(1, 2)  # [panels, fours of inputs, outputs, 4]
    if bits == 8:
        return fours.contiguous()
    low = fours & 15 if bits > 4 else fours
    words = low[:, 0::2] | low[:, 1::2] << 4
    if bits == 4:
        return words.contiguous()
    in_set = _SET_INPUTS[bits] // 4
    high = (fours >> 4).unflatten(1, (-1, in_set))
    line = torch.zeros_like(high[:, :, 0])
    for four in range(in_set):
        line |= high[:, :, four] << (four * (bits - 4))
    return torch.cat((words.unflatten(1, (-1, in_set // 2)), line.unsqueeze(2)), dim=2).flatten(1, 2)


def _from_lines(lines: Tensor, bits: int) -> Tensor:
    """The inverse for some outputs, [n, lines, 4]: [n, inputs], with the padding of the last group."""
    if bits == 8:
        return lines.flatten(1)
    if bits == 4:
        return torch.stack((lines & 15, lines >> 4), dim=2).flatten(1)
    in_set = _SET_INPUTS[bits] // 4
    sets = lines.unflatten(1, (-1, in_set // 2 + 1))
    words, line = sets[:, :, :-1], sets[:, :, -1:]
    low = torch.stack((words & 15, words >> 4), dim=3).flatten(2, 3)  # [n, sets, fours, 4]
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=lines.device).view(1, 1, -1, 1)
    return (low | (line >> shifts & 2 ** (bits - 4) - 1) << 4).flatten(1)


def rounded(weight: Tensor, bits: int, group_size: int, rotated: bool = False) -> PackedWeight:
    """A weight [outputs, inputs], floating, rounded to the nearest numbers, and packed.

    The scale of a group makes its largest weight 127 of 8 bits, or -8 of 4 bits, whichever sign that has: so all 16
    numbers are used. It is one of float16 if all of them are. Groups that are `rotated` have 32, 64 or 128 inputs.

    Raises:
        RuntimeError: the shape or the sizes do not fit.
    """
    weight = weight.detach()
    least, most = torch.ops.fastgen.group_extremes.default(weight, group_size, rotated)
    scales = scales_of(least, most, bits)
    numbers = torch.ops.fastgen.round_to_panels.default(weight, scales.float(), bits, group_size, rotated)
    packed, (outputs, inputs) = _by_panels(scales), weight.shape
    return PackedWeight(numbers, packed, None, None, None, outputs, inputs, bits, group_size, rotated)


def scales_of(least: Tensor, most: Tensor, bits: int) -> Tensor:
    """The scales of groups whose least and largest numbers are these, which are in float32.

    In float16 if it holds all of them with enough digits, else in float32.
    """
    largest = torch.where(-least > most, -least, most)
    exact = largest / 127 if bits == 8 else torch.where(-least > most, least, most) / -8
    half = exact.half()
    sizes = half.abs()[exact != 0]
    is_half = bool(((sizes >= _LEAST_HALF) & sizes.isfinite()).all())
    return half if is_half else exact


def _check(
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minimums: Tensor | None,
    bits: int,
    group_size: int,
    order: Tensor | None,
) -> None:
    step = max(8, _SET_INPUTS.get(bits, 8))
    if bits not in BITS or not 8 <= group_size <= 256 or group_size % step:
        raise ValueError(
            f"{bits} bits in groups of {group_size}: 4, 5, 6 or 8 bits, groups of 8 to 256 inputs, in eights, of 5 "
            "bits in 32s and of 6 bits in 16s"
        )
    if numbers.dim() != 2 or numbers.dtype is not torch.uint8 or not numbers.numel():
        raise ValueError(f"numbers must be uint8, [outputs, inputs], not {numbers.dtype}, {list(numbers.shape)}")
    shape = torch.Size((numbers.shape[0], -(-numbers.shape[1] // group_size)))
    for name, each in (("scales", scales), ("zeros", zeros), ("minimums", minimums)):
        if each is not None and each.shape != shape:
            raise ValueError(f"{name} must be [outputs, groups] = {list(shape)}, not {list(each.shape)}")
    if not scales.is_floating_point() or (zeros is not None and zeros.dtype is not torch.uint8):
        raise ValueError(f"scales must be floating and zeros uint8, not {scales.dtype}")
    if zeros is not None and minimums is not None:
        raise ValueError("a weight has zeros or minimums, not both")
    if order is not None and not torch.equal(order.sort().values, torch.arange(numbers.shape[1], device=order.device)):
        raise ValueError("the order must name every input once")


def _by_panels(factors: Tensor) -> Tensor:
    """[outputs, groups] -> [panels, groups, 32]."""
    panels = -(-factors.shape[0] // _PANEL)
    wide = factors.new_zeros(panels * _PANEL, factors.shape[1])
    wide[: factors.shape[0]] = factors
    return wide.view(panels, _PANEL, -1).transpose(1, 2).contiguous()


def unpacked(weight: PackedWeight, outputs: Tensor | slice = slice(None)) -> tuple[Tensor, list[Tensor | None]]:
    """What `pack` was given, of all outputs or some, [n] int64: numbers, [n, inputs], scales, zeros and minimums.

    Of a rotated weight, the numbers of the last group are all there. Multiples are multiplied, in float32.
    """
    if isinstance(outputs, slice):
        outputs = torch.arange(weight.outputs, device=weight.numbers.device)[outputs]
    panels, lanes = outputs // _PANEL, outputs % _PANEL
    numbers = _from_lines(weight.numbers[panels, :, lanes], weight.bits)
    return (
        numbers[:, : None if weight.rotated else weight.inputs],
        [None if factor is None else factor[panels, :, lanes] for factor in _factors(weight)],
    )


def _factors(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, zeros and minimums, [panels, groups, 32]."""
    if weight.scales.dtype is not torch.uint8:
        return weight.scales, weight.zeros, weight.minimums
    # 16 groups without minimums, 8 or 16 with them: their sizes tell them apart.
    size = weight.scales.shape[2]
    kinds = 1 if size == 2 * _PANEL + 16 * _PANEL else 2
    unit_bytes = kinds * 2 * _PANEL
    units = weight.scales[:, :, :unit_bytes].contiguous().view(torch.float16).unflatten(2, (1, kinds, _PANEL))
    each = weight.scales[:, :, unit_bytes:].unflatten(2, (-1, kinds, _PANEL)).float()
    if kinds == 1:
        return (units.float() * (each - SIGNED_MIDDLE)).flatten(1, 2)[:, :, 0], None, None
    scales, minimums = (units.float() * each).flatten(1, 2).unbind(2)
    return scales, None, minimums


def dequantized(weight: PackedWeight, dtype: torch.dtype, outputs: Tensor | slice = slice(None)) -> Tensor:
    """The weight, [outputs, inputs], in a floating type, or some of its outputs; computed in float32, rounded once."""
    found = values(*unpacked(weight, outputs), weight.bits, weight.group_size)
    if weight.rotated:
        found = rotated(found, weight.group_size)[:, : weight.inputs] / weight.group_size
    return (found if weight.order is None else found[:, weight.order.argsort()]).to(dtype)


def rotated(x: Tensor, group_size: int) -> Tensor:
    """x [..., whole groups], each group times the Hadamard matrix of its size, a power of two; in floating point."""
    matrix = x.new_ones(1, 1)
    while matrix.shape[0] < group_size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return (x.unflatten(-1, (-1, group_size)) @ matrix).flatten(-2)


def values(numbers: Tensor, factors: list[Tensor | None], bits: int, group_size: int) -> Tensor:
    """What numbers stand for, [outputs, inputs], in float32; the factors are scales, zeros and minimums."""
    # By input: the last group may have fewer of them.
    scales, zeros, minimums = (
        None if each is None else each.float().repeat_interleave(group_size, dim=1)[:, : numbers.shape[1]]
        for each in factors
    )
    assert scales is not None
    if minimums is not None:
        return scales * numbers + minimums
    return scales * (numbers - (2.0 ** (bits - 1) if zeros is None else zeros))


def rows(weight: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Lines of the weight, [n, inputs], in a floating type: those that `which`, [n] int64, names.

    Raises:
        IndexError: there is no such line.
        ValueError: the weight is rotated: its numbers are not those of single inputs.
    """
    if weight.rotated:
        raise ValueError("lines of a rotated weight")
    # Zeros: while a step is recorded, what nobody has written must not be read.
    like = torch.zeros(0, dtype=dtype, device=which.device)
    sizes = weight.outputs, weight.inputs, weight.bits, weight.group_size
    try:
        found = torch.ops.fastgen.grouped_rows.default(like, which.contiguous(), *weight[:4], *sizes)
    except RuntimeError as error:
        if "index out of range" not in str(error):
            raise
        raise IndexError(f"a line that a weight with {weight.outputs} of them does not have") from None
    return found if weight.order is None else found[:, weight.order.argsort()]


def grouped_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, floats: bool = False) -> Tensor:
    """`torch.nn.functional.linear(x, dequantized(weight), bias)`, summed in float32; not differentiable.

    x is [..., inputs] in float32, bfloat16 or float16, as is the result; the bias [outputs] in any of them.

    Args:
        floats: x stays as it is, for a weight that `keeps_floats` is True of. Otherwise it is rounded to 8 bits, and a
            row and group of x that holds anything infinite or NaN gives NaN.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    rows = as_rows(x)
    if rows.shape[1] != weight.inputs:
        raise RuntimeError(f"grouped_linear: {rows.shape[1]} inputs for a weight of {weight.inputs}")
    sizes = weight.outputs, weight.bits, weight.group_size, weight.rotated, floats
    y = torch.ops.fastgen.grouped_linear.default(rows, *weight[:5], bias, *sizes)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.outputs)


def keeps_floats(weight: PackedWeight) -> bool:
    """Whether there are products with float activations that have the bits of those of the unpacked weight.

    There are none for rotated groups, for groups that do not divide 256 inputs, and for zeros whose products with their
    scales float32 does not hold. No format in use has these, with scales of 16 bits.
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
    """Why products with weights in groups are not faster than others in this process, or None."""
    if not is_available():
        return _library.load("CPU") or "no kernel for this processor"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "this processor does not have AVX2, or may not use it"
    return None


def _fake_extremes(weight: Tensor, group_size: int, rotated: bool) -> Tensor:
    return weight.new_empty(2, weight.shape[0], -(-weight.shape[1] // group_size), dtype=torch.float32)


def _fake_panels(weight: Tensor, scales: Tensor, bits: int, group_size: int, rotated: bool) -> Tensor:
    panels, lines = -(-weight.shape[0] // _PANEL), scales.shape[1] * group_size * bits // 32
    return weight.new_empty(panels, lines, _PANEL, 4, dtype=torch.uint8)


def _fake_rows(like: Tensor, which: Tensor, *rest: Any) -> Tensor:
    inputs = rest[-3]
    return like.new_empty(which.shape[0], inputs)


def _fake_linear(x: Tensor, *rest: Any) -> Tensor:
    outputs = rest[6]
    return x.new_empty(x.shape[0], outputs)


def _fake_nothing(*arguments: Any) -> None:
    """What writes into its arguments returns nothing."""


_SIZES = "int bits, int group_size, bool rotated, bool floats"
_PACKED = "numbers, Tensor scales, Tensor? zeros, Tensor? minimums, Tensor? order, Tensor? bias"
_library.define(
    "group_extremes(Tensor weight, int group_size, bool rotated) -> Tensor",
    fake=_fake_extremes,
)
_library.define(
    "round_to_panels(Tensor weight, Tensor scales, int bits, int group_size, bool rotated) -> Tensor",
    fake=_fake_panels,
)
_library.define(
    "grouped_rows(Tensor like, Tensor which, Tensor numbers, Tensor scales, Tensor? zeros, Tensor? minimums, "
    "int outputs, int inputs, int bits, int group_size) -> Tensor",
    fake=_fake_rows,
)
_library.define(
    f"grouped_linear(Tensor x, Tensor {_PACKED}, int outputs, {_SIZES}) -> Tensor",
    fake=_fake_linear,
)
_library.define(
    f"grouped_linear_out(Tensor(a!) out, Tensor x, Tensor {_PACKED}, {_SIZES}) -> ()",
    fake=_fake_nothing,
)
# Several of them with the same x.
_library.define(
    "grouped_linear_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] numbers, Tensor[] scales, Tensor?[] zeros, "
    f"Tensor?[] minimums, Tensor? order, Tensor?[] bias, {_SIZES}) -> ()",
    fake=_fake_nothing,
)
backend = functools.partial(_library.backend, "fastgen::grouped_linear_out")
OPERATOR = torch.ops.fastgen.grouped_linear.default
