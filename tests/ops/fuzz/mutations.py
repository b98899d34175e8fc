"""Changes of an operator's arguments by the types of its schema: sizes, types, strides, what shares memory, numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ops.fuzz.guarded import Memory

_TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.int8, torch.bool, torch.complex64,
)  # fmt: skip
_INTS = (
    0, 1, -1, 2, 7, 32, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**31),
)  # fmt: skip
_FLOATS = (0.0, -1.0, 1.0, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 1e-320, 3.5)
_LARGEST = 2**12  # numbers of a tensor that is made


class Shared(NamedTuple):
    """In the place of a tensor: one in the memory of another argument, `offset` bytes behind its beginning."""

    source: Tensor
    other: Tensor
    offset: int


class Misaligned(NamedTuple):
    source: Tensor


def mutated(types: list[str], args: list[Any], rng: random.Random) -> list[Any]:
    args = [list(arg) if isinstance(arg, list) else arg for arg in args]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(args)) if args else 0
        if args:
            args[place] = _changed(types[place], args[place], args, rng)
    return args


def drawn(types: list[str], args: list[Any], rng: random.Random) -> list[Any]:
    """Arguments by the schema alone: of the ones that fit they have the types."""
    return [_any_of(type_, args, rng) for type_ in types]


def placed(args: list[Any], memory: Memory) -> list[Any]:
    """The arguments with their tensors in guarded memory; one that is given twice is there once."""
    places: dict[int, Any] = {}

    def place(arg: Any) -> Any:
        if isinstance(arg, list):
            return [place(each) for each in arg]
        if isinstance(arg, Shared):
            return _beside(place(arg.other), arg)
        if isinstance(arg, Misaligned):
            return memory.tensor(arg.source, offset=1)
        if not _is_plain(arg):
            return arg
        if id(arg) not in places:
            places[id(arg)] = memory.tensor(arg)
        return places[id(arg)]

    return [place(arg) for arg in args]


def _is_plain(arg: Any) -> bool:
    return (
        type(arg) is Tensor
        and arg.device.type == "cpu"
        and arg.layout is torch.strided
        and not arg.is_neg()
        and not arg.is_conj()
        and not arg.requires_grad
        and lacks(arg) == 0
    )


def lacks(tensor: Tensor) -> int:
    """Bytes that the storage of a tensor is too small by."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.device.type != "cpu":
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return max(end - tensor.untyped_storage().nbytes(), 0)


def _beside(other: Any, shared: Shared) -> Any:
    source = shared.source
    if not isinstance(other, Tensor) or not _is_plain(other) or other.numel() == 0 or source.numel() == 0:
        return source
    flat = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
    count = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    begin = shared.offset * source.element_size()
    end = begin + count * source.element_size()
    if end > flat.numel() or flat.data_ptr() % source.element_size():
        return source
    view = flat[begin:end].view(source.dtype).as_strided(source.shape, source.stride())
    try:
        view.copy_(source)
    except RuntimeError:  # an expanded tensor
        return source
    return view


def _tensors(args: list[Any]) -> list[Tensor]:
    flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
    return [each for each in flat if isinstance(each, Tensor)]


def _changed(type_: str, arg: Any, args: list[Any], rng: random.Random) -> Any:
    if "List" in type_:
        return _changed_list(type_, list(arg or []), args, rng)
    if arg is None or (type_.startswith("Optional") and rng.random() < 0.2):
        return None if arg is not None else _any_of(type_.removeprefix("Optional[").rstrip("]"), args, rng)
    if isinstance(arg, Tensor):
        return _changed_tensor(arg, args, rng)
    if isinstance(arg, bool):
        return not arg
    if isinstance(arg, int):
        return rng.choice((*_INTS, arg + 1, arg - 1, arg * 2, arg // 2, -arg))
    if isinstance(arg, float):
        return rng.choice(_FLOATS)
    return arg


def _changed_list(type_: str, items: list[Any], args: list[Any], rng: random.Random) -> list[Any]:
    change = rng.choice(("item", "item", "item", "drop", "again", "more", "none", "swap"))
    if change == "none" or not items:
        return [] if items else [_any_of("Tensor", args, rng)]
    at = rng.randrange(len(items))
    if change == "item":
        inner = "Optional[Tensor]" if "Optional" in type_ else "Tensor"
        items[at] = _changed(inner, items[at], args, rng)
    elif change == "drop":
        del items[at]
    elif change == "again":
        items.append(items[at])
    elif change == "more":
        items.insert(at, _any_of("Tensor", args, rng))
    else:
        other = rng.randrange(len(items))
        items[at], items[other] = items[other], items[at]
    return items


def _any_of(type_: str, args: list[Any], rng: random.Random) -> Any:
    if type_.startswith("Optional"):
        return None if rng.random() < 0.3 else _any_of(type_[len("Optional[") : -1], args, rng)
    if type_.startswith("List"):
        return [_any_of(type_[len("List[") : -1], args, rng) for _ in range(rng.randrange(3))]
    if type_ == "bool":
        return rng.random() < 0.5
    if type_ == "float":
        return rng.choice(_FLOATS)
    if type_ == "int":
        return rng.choice(_INTS)
    known = _tensors(args)
    if known and rng.random() < 0.5:
        return rng.choice(known)
    return _made([rng.choice((0, 1, 2, 3, 5, 8, 16, 32)) for _ in range(rng.randrange(5))], rng.choice(_TYPES), rng)


def _made(shape: list[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    numel = 1
    for place, size in enumerate(shape):
        if size * numel > _LARGEST:
            shape[place] = 1
        numel *= shape[place]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else rng.choice((2, 5, 127)), shape).to(dtype)


def _changed_tensor(x: Tensor, args: list[Any], rng: random.Random) -> Any:
    # What a change before this one has made larger than memory, or has taken the memory of, stays as it is.
    return rng.choice(_CHANGES)(x, args, rng) if _is_plain(x) and x.numel() <= _LARGEST * 16 else x


def _other_type(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    return x.to(rng.choice(_TYPES))


def _other_size(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    shape = list(x.shape)
    if not shape:
        return x.expand(rng.choice((1, 2)))
    dim = rng.randrange(len(shape))
    shape[dim] = max(rng.choice((0, 1, shape[dim] - 1, shape[dim] + 1, 2 * shape[dim], shape[dim] + 16)), 0)
    return _made(shape, x.dtype, rng)


def _other_dims(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    change = rng.randrange(4)
    if change == 0:
        return x.unsqueeze(rng.randrange(x.dim() + 1))
    if change == 1 and x.dim():
        return x.select(rng.randrange(x.dim()), 0) if min(x.shape) else x.flatten()
    return x.transpose(0, -1) if change == 2 and x.dim() else x.flatten()


def _stepped(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    """The same numbers, with gaps between them, or in another order in memory."""
    if x.dim() == 0 or x.numel() == 0:
        return x.clone()
    dim = rng.randrange(x.dim())
    if rng.random() < 0.5:
        return x.transpose(dim, -1).contiguous().transpose(dim, -1)
    return x.repeat_interleave(2, dim).unflatten(dim, (-1, 2)).select(dim + 1, 0)


def _expanded(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    """Numbers that share memory, maybe far more than there is memory."""
    if x.dim() == 0 or not x.numel():
        return x.expand(3) if x.dim() == 0 else x
    dim = rng.randrange(x.dim())
    some = x.narrow(dim, 0, 1)
    size = x.shape[dim] if rng.random() < 0.6 else 2 ** rng.choice((1, 5, 20, 31, 33, 40, 60))
    shape = list(x.shape)
    shape[dim] = size
    try:
        return some.expand(shape)
    except RuntimeError:  # more than 2**63 numbers
        return some


def _overlapping(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    """Rows that begin in each other."""
    if x.dim() < 2 or not x.numel():
        return x
    strides = list(x.contiguous().stride())
    strides[0] = max(strides[0] - rng.choice((1, strides[0] // 2 or 1)), 0)
    return torch.as_strided(x.contiguous(), x.shape, strides)


def _other_numbers(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    if x.numel() == 0:
        return x
    other = x.clone()
    flat = other.view(-1) if other.is_contiguous() else other.reshape(-1)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(flat.numel())
        if x.dtype is torch.bool:
            flat[at] = not flat[at]
        elif x.dtype.is_floating_point or x.dtype.is_complex:
            flat[at] = torch.tensor(rng.choice(_FLOATS), dtype=torch.float64).to(x.dtype)
        else:
            limits = torch.iinfo(x.dtype)
            flat[at] = min(max(rng.choice(_INTS), limits.min), limits.max)
    return flat.view(x.shape)


def _shared(x: Tensor, args: list[Any], rng: random.Random) -> Any:
    """In the memory of another argument, or of a part of itself."""
    others = [each for each in _tensors(args) if each is not x and _is_plain(each) and each.numel()]
    if not others:
        return x
    other = rng.choice(others)
    if rng.random() < 0.3 and other.dtype is x.dtype and other.shape == x.shape:
        return other
    return Shared(x, other, rng.choice((0, 0, 0, 1, 3)))


def _misaligned(x: Tensor, args: list[Any], rng: random.Random) -> Any:
    return Misaligned(x) if x.numel() and x.element_size() > 1 else x


def _without_memory(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    """A storage that has become smaller than the tensor says."""
    other = x.clone()
    other.untyped_storage().resize_(rng.choice((0, other.untyped_storage().nbytes() // 2)))
    return other


def _elsewhere(x: Tensor, args: list[Any], rng: random.Random) -> Tensor:
    """On no device, or laid out in another way."""
    change = rng.randrange(4)
    if change == 0:
        return x.to("meta")
    if change == 1 and x.dim() and not x.is_complex():
        return x.to_sparse()
    if change == 2 and x.is_floating_point():
        return torch._neg_view(x)
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x.to("meta")


_CHANGES: list[Callable[[Tensor, list[Any], random.Random], Any]] = [
    _other_type, _other_size, _other_size, _other_dims, _stepped, _expanded, _expanded, _overlapping, _other_numbers,
    _other_numbers, _shared, _shared, _misaligned, _without_memory, _elsewhere,
]  # fmt: skip
