"""Several elementwise operators and norms in one call, on the CPU, in float32, bfloat16 or float16.

A rotary position embedding, for example, consists of ten operators. With the small tensors of a decode step, launching
an operator takes longer than computing it. So this module is for small tensors; a few operators serve tensors of any
size, because torch's are slower.

Additions, subtractions, products, squares, cubes, ReLU, copies and conversions return the same bits as torch's
operators. The others are computed in float32 and rounded once. The relative error of SiLU, sigmoid and tanh is at most
2.4e-7, that of GELU 1e-6, and 2e-5 for arguments below -3. Norms are summed in another order than torch's.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, kv_write, rms_norm

_aten = torch.ops.aten
# As in csrc/cpu/elementwise/lines.h.
_COPY, _NEGATE, _ADD, _SUBTRACT, _MULTIPLY, _RELU, _SILU, _SIGMOID, _TANH, _GELU, _GELU_TANH, _RMS, _LAYER = range(13)
_FUNCTIONS = {
    _aten.neg.default: _NEGATE,
    _aten.relu.default: _RELU,
    _aten.silu.default: _SILU,
    _aten.sigmoid.default: _SIGMOID,
    _aten.tanh.default: _TANH,
    _aten.gelu.default: _GELU,
}
_ARITHMETIC = {_aten.add.Tensor: _ADD, _aten.sub.Tensor: _SUBTRACT, _aten.mul.Tensor: _MULTIPLY}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = {1: 3, 4: 4, 8: 5}  # by element size in bytes: other types, which are only copied
# Beyond this size, torch uses several threads if there are any.
_MAX_ELEMENTS = 2**15 - 1
_MAX_NORM_ELEMENTS = 2**14
_MOST_ELEMENTS = 2**28  # limit of the kernel
# Functions, and variants of GELU, for which torch has nothing faster: with planned memory, torch's layer norm allocates
# another result and copies it, and its tanh in GELU takes four times as long.
_OF_ANY_SIZE = {(_aten.native_layer_norm.default, None), (_aten.silu.default, None), (_aten.gelu.default, "tanh")}
_MAX_DIMS = 8
_MAX_STRIDE = 2**28
_OPERANDS = 3
_LENGTH = 2 + _MAX_DIMS + 7 + (1 + _OPERANDS) * (3 + _MAX_DIMS)  # integers of an instruction
_AS_FLOATS, _AS_INTEGERS = struct.Struct("=2d"), struct.Struct("=2q")


class Instruction(NamedTuple):
    """One operator.

    Attributes:
        out, operands: the result and up to three operands, all of one shape. The second may be a scalar.
        scalars: for a norm, eps and the offset that is added to the weight.
        rounds_scaled: as in `rms_norm`.
        position: if `out` is the first slice of a dimension: the index of the slice to write (one int64, read at
            execution), the dimension's stride, and its size. Nothing is written if the index is out of range.
    """

    kind: int
    out: Tensor
    operands: tuple[Tensor | float | None, ...]
    scalars: tuple[float, ...] = ()
    rounds_scaled: bool = False
    position: tuple[Tensor, int, int] | None = None


def _has_vectors() -> bool:
    """Whether the kernel's loops run in wide vectors, as torch's do."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def instructions(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor | None]
) -> list[Instruction] | None:
    """Returns the instructions that execute the operator `function(*args, **kwargs)`; None to call the operator itself.

    Args:
        results: its results, in the order in which it returns them: None for those that nobody reads.
    """
    maker = _MAKERS.get(function)
    if maker is None or not is_available():
        return None
    if function in (rms_norm.OPERATOR, kv_write.OPERATOR):  # they return nothing: the first argument's size decides
        results = args[:1]
    if not results or results[0] is None or any(result is not None for result in results[1:]):
        return None
    out = results[0]
    has_any_size = (function, kwargs.get("approximate")) in _OF_ANY_SIZE and out.dtype is torch.float32
    most = _MOST_ELEMENTS if has_any_size and _has_vectors() else _MAX_ELEMENTS
    is_served = out.device.type == "cpu" and out.numel() <= most and out.dim() <= _MAX_DIMS
    return maker(function, out, *args, **kwargs) if is_served else None


def _function(function: Any, out: Tensor, x: Tensor, *, approximate: str = "none") -> list[Instruction] | None:
    kind = _FUNCTIONS[function] if approximate == "none" else _GELU_TANH
    return [Instruction(kind, out, (x,))] if _are_float_tensors(out, x) else None


def _arithmetic(function: Any, out: Tensor, *operands: Any, alpha: float = 1) -> list[Instruction] | None:
    if alpha != 1 or not all(_is_scalar(each, out.dtype) or _are_float_tensors(out, each) for each in operands):
        return None
    tensors = tuple(each.expand_as(out) if isinstance(each, Tensor) else float(each) for each in operands)
    return [Instruction(_ARITHMETIC[function], out, tensors)]


def _power(function: Any, out: Tensor, x: Tensor, exponent: float) -> list[Instruction] | None:
    # In half precision, whether torch rounds between two products depends on a number's place in memory.
    if exponent not in ((2, 3) if out.dtype is torch.float32 else (2,)) or not _are_float_tensors(out, x):
        return None
    return [Instruction(_MULTIPLY, out, (x, x)), Instruction(_MULTIPLY, out, (out, x))][: int(exponent) - 1]


def _copied(function: Any, out: Tensor, source: Tensor, **options: Any) -> list[Instruction] | None:
    """A copy, or a conversion between floating types."""
    is_same = source.dtype is out.dtype and (out.dtype in _TYPES or out.itemsize in _BYTES)
    if not (is_same or {source.dtype, out.dtype} <= _TYPES.keys()) or not (_fits(out) and _fits(source)):
        return None
    return [Instruction(_COPY, out, (source,))]


def _concatenated(function: Any, out: Tensor, parts: list[Tensor], dim: int = 0) -> list[Instruction] | None:
    begin, found = 0, []
    for part in parts:
        is_alike = part.dim() == out.dim() and part.dtype is out.dtype
        copy = _copied(function, out.narrow(dim, begin, part.shape[dim]), part) if is_alike else None
        if copy is None:
            return None
        found += copy
        begin += part.shape[dim]
    return found


def _rms_norm(
    function: Any, out: Tensor, _: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> list[Instruction] | None:
    eps, offset, rounds_scaled = options
    if out.numel() > _MAX_NORM_ELEMENTS or not out.numel() or not _are_float_tensors(out, x, weight):
        return None
    return [Instruction(_RMS, out, (x, weight.expand_as(out)), (eps, offset), rounds_scaled)]


def _layer_norm(
    function: Any, out: Tensor, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> list[Instruction] | None:
    given = [each for each in (x, weight, bias) if each is not None]
    if len(shape) != 1 or not out.numel() or not _are_float_tensors(out, *given):
        return None
    parts = tuple(each if each is None else each.expand_as(out) for each in (weight, bias))
    return [Instruction(_LAYER, out, (x, *parts), (eps, 0.0))]


def _kv_written(
    function: Any,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    row_map: Tensor | None = None,
) -> list[Instruction] | None:
    """Copies K and V once each. Returns None if rows have their own positions: two copies per row take longer."""
    caches = key_cache, value_cache
    if position.numel() != 1 or row_map is not None or not all(cache.shape[2] for cache in caches):
        return None
    found: list[Instruction] = []
    for part, cache in zip((keys, values), caches, strict=True):
        copy = _copied(function, cache.select(2, 0), part)
        if copy is None:
            return None
        found.append(copy[0]._replace(position=(position.reshape(()), cache.stride(2), cache.shape[2])))
    return found


_MAKERS: dict[Any, Callable[..., list[Instruction] | None]] = {
    **dict.fromkeys(_FUNCTIONS, _function),
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    _aten.pow.Tensor_Scalar: _power,
    _aten.clone.default: _copied,
    _aten._to_copy.default: _copied,
    _aten.cat.default: _concatenated,
    _aten.native_layer_norm.default: _layer_norm,
    rms_norm.OPERATOR: _rms_norm,
    kv_write.OPERATOR: _kv_written,
}


def _are_float_tensors(out: Tensor, *operands: Any) -> bool:
    """Whether all are tensors of one type that the kernel computes with."""
    is_served = out.dtype in _TYPES and _fits(out)
    return is_served and all(isinstance(each, Tensor) and each.dtype is out.dtype and _fits(each) for each in operands)


def _is_scalar(operand: Any, dtype: torch.dtype) -> bool:
    """Whether this is a scalar: any for float32; in half precision, only one that the type represents exactly."""
    is_scalar = isinstance(operand, int | float) and dtype in _TYPES
    return is_scalar and (dtype is torch.float32 or torch.tensor(float(operand)).to(dtype).item() == operand)


def _fits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and all(stride <= _MAX_STRIDE for stride in tensor.stride())


def bound(found: Sequence[Instruction]) -> functools.partial[None]:
    """Returns the call that executes the instructions, one after the other.

    Addresses and layouts are resolved here: each call passes only memory and code.
    """
    memory: dict[int, Tensor] = {}  # all of a storage, by the address of the storage object, which it holds
    code = [_encoded(each, memory) for each in found if each.out.numel()]
    lines = torch.tensor(code, dtype=torch.int64, device="cpu").view(len(code), _LENGTH)
    return functools.partial(torch.ops.fastgen.elementwise.default, list(memory.values()), lines)


def gelu_tanh(x: Tensor) -> Tensor:
    """`torch.nn.functional.gelu(x, approximate="tanh")`; not differentiable. A large tensor takes a third of the time.

    x may have any shape and floating type. It must own memory: it cannot be a tensor under vmap, or in a recording.
    """
    if x.numel() > _MAX_ELEMENTS:
        out = torch.empty_like(x)
        found = instructions(_aten.gelu.default, (x,), {"approximate": "tanh"}, [out])
        if found is not None:
            bound(found)()
            return out
    return F.gelu(x, approximate="tanh")


def _encoded(instruction: Instruction, memory: dict[int, Tensor]) -> list[int]:
    """Encodes an instruction for the kernel (`Instruction` in csrc/cpu/elementwise.cpp)."""
    kind, out, operands, given, rounds_scaled, position = instruction
    scalars = given or [each if isinstance(each, float) else 0.0 for each in operands]
    bits = _AS_INTEGERS.unpack(_AS_FLOATS.pack(*[*scalars, 0.0, 0.0][:2]))
    line = [kind, out.dim(), *_padded(out.shape), *bits, int(rounds_scaled)]
    line += [-1, 0, 0, 0] if position is None else [*_place(position[0], memory), *position[1:]]
    for tensor in (out, *operands, *[None] * (_OPERANDS - len(operands))):
        if isinstance(tensor, Tensor):
            place, begin = _place(tensor, memory)
            type_ = _TYPES[tensor.dtype] if tensor.dtype in _TYPES else _BYTES[tensor.itemsize]
            line += [place, type_, begin, *_padded(tensor.stride())]
        else:
            line += [-1, 0, 0, *_padded(())]
    return line


def _place(tensor: Tensor, memory: dict[int, Tensor]) -> tuple[int, int]:
    """Returns the index of a tensor's storage in `memory`, and its offset there in bytes."""
    storage = tensor.untyped_storage()
    if storage._cdata not in memory:
        memory[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return list(memory).index(storage._cdata), int(tensor.storage_offset()) * tensor.itemsize


def _padded(sizes: Sequence[int]) -> list[int]:
    return [*sizes, *[0] * (_MAX_DIMS - len(sizes))]


is_available = _library.availability("fastgen::elementwise")
_library.define("elementwise(Tensor(a!)[] memory, Tensor code) -> ()")
