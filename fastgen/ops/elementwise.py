"""Several elementwise operators in one call, on the CPU, for small tensors in float32 or bfloat16.

A rotary position embedding, say, is spelled out as ten operators. With the few numbers of a decoding step, starting an
operator takes longer than computing it. Each gives the bits that torch's gives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library

_aten = torch.ops.aten
# As in csrc/cpu/elementwise.cpp.
_COPY = 0
_KINDS = {
    _aten.neg.default: 1,
    _aten.add.Tensor: 2,
    _aten.sub.Tensor: 3,
    _aten.mul.Tensor: 4,
}
_TYPES = (torch.float32, torch.bfloat16)
# With more numbers, torch's operators gain more by their loops than starting them costs.
_MAX_NUMBERS = 2**14
_MAX_DIMS = 8
_MAX_STRIDE = 2**28
_LENGTH = 3 + _MAX_DIMS + 3 * (2 + _MAX_DIMS)  # numbers of an instruction


class Instruction(NamedTuple):
    """One of the operators: its result and its operands, all of one shape. One with a single operand has it twice."""

    kind: int
    out: Tensor
    first: Tensor
    second: Tensor


@functools.cache
def is_available() -> bool:
    """Whether there is a kernel in this process."""
    return _library.has_kernel("fastgen::elementwise")


def instructions(function: Any, args: Sequence[Any], out: Tensor) -> list[Instruction] | None:
    """What writes the result of `function(*args)`, an operator of torch, to `out`; None if it is no such operator."""
    if not is_available() or out.dtype not in _TYPES or out.numel() > _MAX_NUMBERS or out.dim() > _MAX_DIMS:
        return None
    if function is _aten.cat.default:
        return _concatenation(out, *args)
    if function not in _KINDS or not all(_fits(operand, out) for operand in args):
        return None
    operands = [operand.expand_as(out) for operand in args]
    return [Instruction(_KINDS[function], out, operands[0], operands[-1])]


def _concatenation(out: Tensor, parts: list[Tensor], dim: int = 0) -> list[Instruction] | None:
    begin, found = 0, []
    for part in parts:
        if part.dim() != out.dim() or not _fits(part, out):
            return None
        size = part.shape[dim]
        found.append(Instruction(_COPY, out.narrow(dim, begin, size), part, part))
        begin += size
    return found


def _fits(operand: Any, out: Tensor) -> bool:
    is_alike = isinstance(operand, Tensor) and operand.dtype is out.dtype and operand.device.type == "cpu"
    return is_alike and all(stride <= _MAX_STRIDE for stride in operand.stride())


def bound(found: Sequence[Instruction]) -> functools.partial[None]:
    """The call that executes them, one after the other.

    Where everything is and how it is laid out is worked out here: at each call only memory and code are handed over.
    """
    memory: dict[int, Tensor] = {}  # all of a storage, by the address of the storage object, which it holds
    code = [_encoded(each, memory) for each in found if each.out.numel()]
    lines = torch.tensor(code, dtype=torch.int64, device="cpu").view(len(code), _LENGTH)
    return functools.partial(torch.ops.fastgen.elementwise.default, list(memory.values()), lines)


def _encoded(instruction: Instruction, memory: dict[int, Tensor]) -> list[int]:
    """An instruction as the kernel reads it (`Instruction` in csrc/cpu/elementwise.cpp)."""
    kind, out, *operands = instruction
    line = [kind, out.itemsize, out.dim(), *_filled(out.shape)]
    for tensor in (out, *operands):
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            memory[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage)
        place = list(memory).index(storage._cdata)
        line += [place, int(tensor.storage_offset()) * tensor.itemsize, *_filled(tensor.stride())]
    return line


def _filled(numbers: Sequence[int]) -> list[int]:
    return [*numbers, *[0] * (_MAX_DIMS - len(numbers))]


backend = functools.partial(_library.backend, "fastgen::elementwise")
_library.define("elementwise(Tensor(a!)[] memory, Tensor code) -> ()")
