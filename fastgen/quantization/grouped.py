"""A weight in few bits with a scale per group of inputs: what every checkpoint format is read into."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.linear import grouped
from fastgen.ops.linear.grouped import Multiples

# What formats that pack integers into words have; blocks of GGUF have others, too.
BITS = (4, 8)
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class GroupedWeight(NamedTuple):
    """A weight, [outputs, inputs], each number of which stands for scale * (number - zero) or scale * number + minimum.

    Scale, zero and minimum belong to an output and a group of inputs: columns g * group_size up to (g + 1) * group_size
    of `numbers` are group g.
    """

    numbers: Tensor  # uint8 [outputs, inputs]: 0 to 2**bits - 1, one number a byte, columns in the order of `order`
    scales: Tensor  # [outputs, groups], float16, bfloat16 or float32
    zeros: Tensor | None  # uint8 [outputs, groups]: the number that stands for 0; without it 2**(bits - 1) ...
    minimums: Tensor | None  # ... unless these are given: [outputs, groups], the dtypes of scales; what 0 stands for
    bits: int  # 4, 5, 6 or 8
    group_size: int  # inputs per group
    order: Tensor | None  # int64 [inputs]: column i of `numbers` is the layer's input order[i]; None: as they are
    multiples: Multiples | None = None  # what scales and minimums are products of, where the file has them so


def dequantized(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight in floating point, [outputs, inputs] in the layer's own order of inputs.

    It is computed in float32 and rounded to `dtype` once.

    Raises:
        ValueError: as `check` does.
    """
    check(weight)
    found = values(weight, dtype)
    return found if weight.order is None else found[:, torch.argsort(weight.order)]


def values(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight in floating point with its columns as those of `numbers`, and nothing checked."""
    outputs, inputs = weight.numbers.shape
    found = weight.numbers.reshape(outputs, inputs // weight.group_size, weight.group_size).to(torch.float32)
    if weight.minimums is not None:
        found = found * _per_group(weight.scales) + _per_group(weight.minimums)
    elif weight.zeros is not None:
        found = (found - _per_group(weight.zeros)) * _per_group(weight.scales)
    else:
        found = (found - 2 ** (weight.bits - 1)) * _per_group(weight.scales)
    return found.view(outputs, inputs).to(dtype)


def _per_group(part: Tensor) -> Tensor:
    return part.to(torch.float32).unsqueeze(-1)


def check(weight: GroupedWeight) -> None:
    """That the parts fit together. It takes a pass over the order, and none over the numbers.

    Raises:
        ValueError: a part has another shape or dtype than `GroupedWeight` says, or the order is not a permutation.
    """
    numbers, scales, zeros, minimums, bits, group_size, order, _ = weight
    if bits not in grouped.BITS:
        raise ValueError(f"weights have {bits} bits: 4, 5, 6 and 8 are served")
    if numbers.dim() != 2 or numbers.dtype != torch.uint8:
        raise ValueError(f"numbers are {_described(numbers)}: they must be uint8 [outputs, inputs]")
    outputs, inputs = numbers.shape
    if group_size < 1 or inputs % group_size:
        raise ValueError(f"{inputs} inputs are not whole groups of {group_size}")
    groups = inputs // group_size
    if zeros is not None and minimums is not None:
        raise ValueError("a weight has zeros or minimums, not both")
    for name, part, dtypes in (
        ("scales", scales, _SCALE_DTYPES),
        ("zeros", zeros, (torch.uint8,)),
        ("minimums", minimums, _SCALE_DTYPES),
    ):
        if part is not None and (part.shape != (outputs, groups) or part.dtype not in dtypes):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} are {_described(part)}: they must be {wanted} {[outputs, groups]}")
    if order is not None:
        _check_order(order, inputs)


def _check_order(order: Tensor, inputs: int) -> None:
    if order.shape != (inputs,) or order.dtype != torch.int64:
        raise ValueError(f"the order is {_described(order)}: it must be int64 {[inputs]}")
    if not torch.equal(order.sort().values, torch.arange(inputs, device=order.device)):
        raise ValueError(f"the order does not name each of the {inputs} inputs once")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
