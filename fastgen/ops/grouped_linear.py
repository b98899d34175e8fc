"""Linear layers on weights of 4 or 8 bits in groups of inputs: those of quantised checkpoints, and FastGen's own.

    weight = scale * (number - zero)      or      weight = scale * number + minimum

with a scale, and a zero or a minimum, for each output and group. In the kernels, the inputs become multiples of a 127th
of the largest of their row and group. What these integers come to within a group is exact; groups are added in float32
(for groups of inputs see Dettmers and Zettlemoyer, "The case for 4-bit precision", 2023, section 2).

So a result differs from the product with the weight in float32 by rounding the inputs alone: by at most
`sum over groups of (largest input of the group) / 254 * sum of |weight|`. A row has the same result whatever the other
rows and the number of threads.

Weights may be *rotated* before they are rounded: each group is multiplied with the Hadamard matrix H of its size
n, and so are the inputs, before they are rounded. As H H^T = n, which the inputs are divided by, the product stays.
What is much larger than the rest of its group is spread over the whole group, and costs fewer digits (Ashkboos et al.,
"QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 3). The bound then holds for what is rotated.

Scales and minimums may be *multiples*: bytes times two numbers in float16 of eight groups in a row. GGUF's Q4_K has
them so. In groups of 32 they take 5 bits for 8 weights, where those in float32 take 16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows

# Outputs of a panel (csrc/cpu/grouped_linear.cpp).
_PANEL = 32
BITS = (4, 8)
# Smaller scales have too few digits in float16.
_LEAST_HALF = 2.0**-18
# Groups whose scales and minimums are multiples of the same numbers.
BLOCK_GROUPS = 8
# Of a panel's outputs, such numbers in float16: a scale and a minimum of each.
_UNIT_BYTES = 2 * 2 * _PANEL


class Multiples(NamedTuple):
    """Scales and minimums as bytes times a number for each block, which is eight groups in a row."""

    scales: Tensor  # [outputs, groups], uint8
    minimums: Tensor  # the same
    scale_units: Tensor  # [outputs, groups / 8], float16
    minimum_units: Tensor  # the same


class PackedWeight(NamedTuple):
    """What `pack` makes of a weight."""

    numbers: Tensor  # [panels, groups * group_size / 4 or 8, 32, 4], uint8: a line has 4 or 8 inputs of each output
    # [panels, groups, 32], float16 or float32. Multiples, of scales and minimums: uint8 [panels, blocks, 640], for each
    # block 32 units of scales and 32 of minimums in float16, then for each of its groups 32 bytes of scales and 32 of
    # minimums.
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
        numbers: [outputs, inputs], uint8, from 0 to 2**bits - 1.
        scales: [outputs, groups], floating: kept in float16 if that is what they are or changes none of them.
        zeros: [outputs, groups], uint8: the number that stands for 0; by default 2**(bits - 1), without minimums.
        minimums: [outputs, groups], floating: what is added instead.
        group_size: inputs of a group, from 8 to 256, in eights. The last group may have fewer.
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
    groups = inputs // group_size
    _check(numbers, multiples.scales.half(), None, multiples.minimums.half(), bits, group_size, None)
    for name, each, shape, dtype in (
        ("scales", multiples.scales, (outputs, groups), torch.uint8),
        ("minimums", multiples.minimums, (outputs, groups), torch.uint8),
        ("scale_units", multiples.scale_units, (outputs, groups // BLOCK_GROUPS), torch.float16),
        ("minimum_units", multiples.minimum_units, (outputs, groups // BLOCK_GROUPS), torch.float16),
    ):
        if each.shape != shape or each.dtype is not dtype:
            raise ValueError(f"{name} must be {dtype}, {list(shape)}, not {each.dtype}, {list(each.shape)}")
    if inputs % (group_size * BLOCK_GROUPS):
        raise ValueError(f"{inputs} inputs are no whole blocks of {BLOCK_GROUPS} groups of {group_size}")
    units = torch.stack([_by_panels(multiples.scale_units), _by_panels(multiples.minimum_units)], dim=2)
    each = torch.stack([_by_panels(multiples.scales), _by_panels(multiples.minimums)], dim=2)  # [panels, groups, 2, 32]
    octets = units.flatten(2).view(torch.uint8), each.unflatten(1, (-1, BLOCK_GROUPS)).flatten(2)
    lines = _in_lines(numbers, bits, group_size)
    return PackedWeight(lines, torch.cat(octets, dim=2), None, None, None, outputs, inputs, bits, group_size)


def _in_lines(numbers: Tensor, bits: int, group_size: int) -> Tensor:
    """The numbers as `PackedWeight` has them."""
    outputs, inputs = numbers.shape
    panels, groups = -(-outputs // _PANEL), -(-inputs // group_size)
    wide = torch.zeros(panels * _PANEL, groups * group_size, dtype=torch.uint8, device=numbers.device)
    wide[:outputs, :inputs] = numbers
    fours = wide.view(panels, _PANEL, -1, 4).transpose(1, 2)  # [panels, fours of inputs, outputs, 4]
    return (fours if bits == 8 else fours[:, 0::2] | fours[:, 1::2] << 4).contiguous()


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
    if bits not in BITS or not 8 <= group_size <= 256 or group_size % 8:
        raise ValueError(f"{bits} bits in groups of {group_size}: 4 or 8 bits, groups of 8 to 256 inputs, in eights")
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
    lines = weight.numbers[panels, :, lanes]  # [n, lines, 4]
    if weight.bits == 4:
        lines = torch.stack((lines & 15, lines >> 4), dim=2)
    return (
        lines.flatten(1)[:, : None if weight.rotated else weight.inputs],
        [None if factor is None else factor[panels, :, lanes] for factor in _factors(weight)],
    )


def _factors(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, zeros and minimums, [panels, groups, 32]."""
    if weight.scales.dtype is not torch.uint8:
        return weight.scales, weight.zeros, weight.minimums
    units = weight.scales[:, :, :_UNIT_BYTES].contiguous().view(torch.float16).unflatten(2, (1, 2, _PANEL))
    each = weight.scales[:, :, _UNIT_BYTES:].unflatten(2, (BLOCK_GROUPS, 2, _PANEL))
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


def grouped_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, dequantized(weight), bias)`, with x rounded to 8 bits; not differentiable.

    x is [..., inputs] in float32, bfloat16 or float16, as is the result; the bias [outputs] in any of them. A row and
    group of x that holds anything infinite or NaN gives NaN.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    rows = as_rows(x)
    if rows.shape[1] != weight.inputs:
        raise RuntimeError(f"grouped_linear: {rows.shape[1]} inputs for a weight of {weight.inputs}")
    sizes = weight.outputs, weight.bits, weight.group_size, weight.rotated
    y = torch.ops.fastgen.grouped_linear.default(rows, *weight[:5], bias, *sizes)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.outputs)


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
    outputs = rest[-4]
    return x.new_empty(x.shape[0], outputs)


def _fake_nothing(*arguments: Any) -> None:
    """What writes into its arguments returns nothing."""


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
    f"grouped_linear(Tensor x, Tensor {_PACKED}, int outputs, int bits, int group_size, bool rotated) -> Tensor",
    fake=_fake_linear,
)
_library.define(
    f"grouped_linear_out(Tensor(a!) out, Tensor x, Tensor {_PACKED}, int bits, int group_size, bool rotated) -> ()",
    fake=_fake_nothing,
)
# Several of them with the same x; and a plan of that (`fastgen.ops.planned`).
_SEVERAL = (
    "Tensor x, Tensor[] numbers, Tensor[] scales, Tensor?[] zeros, Tensor?[] minimums, Tensor? order, Tensor?[] bias, "
    "int bits, int group_size, bool rotated"
)
_library.define(f"grouped_linears_out(Tensor(a!)[] out, {_SEVERAL}) -> ()", fake=_fake_nothing)
_library.define(f"plan_grouped_linears(Tensor(a!)[] out, {_SEVERAL}) -> Tensor")
backend = functools.partial(_library.backend, "fastgen::grouped_linear_out")
