"""A list of operators that a function has called, as `fastgen.decoding.captured.recording` records it."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from fastgen.interrupts import cached_property


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which takes thrice as long: a recording makes thousands
class TensorRef:
    """A tensor in a recording: its storage and its layout. Never changed."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(storage: int, tensor: Tensor) -> TensorRef:
        """Returns the reference of a tensor in the storage of this number."""
        size, stride = tuple(tensor.shape), tensor.stride()
        return TensorRef(storage, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def of_storage(self, storage: torch.UntypedStorage, begin: int = 0) -> Tensor:
        """Returns the tensor in this memory, with its offset increased by `begin` elements."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset + begin, self.size, self.stride)

    @property
    def end(self) -> int:
        """Number of bytes of the storage up to the last one that the tensor may touch."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize if all(self.size) else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are adjacent and in row-major order."""
        inner = itertools.accumulate(reversed(self.size[1:]), operator.mul, initial=1)
        layout = zip(self.size, self.stride, reversed(list(inner)), strict=True) if self.size else ()
        return all(size == 1 or stride == wanted for size, stride, wanted in layout)


@dataclass(frozen=True)
class Constant:
    """A host value, or a tensor without an address of its own."""

    value: Any


def storage_of(arg: TensorRef | Constant | None) -> int:
    """Returns the storage of an argument or result that is known to be a tensor in its own memory."""
    assert isinstance(arg, TensorRef), f"{arg} is no tensor in memory of its own"
    return arg.storage


@dataclass(frozen=True)
class Operation:
    """A call of an operator.

    Attributes:
        args: its arguments, flattened; `structure` restores them (torch.utils._pytree).
        outputs: the result's tensors; None for those in memory that existed before.
        in_place: the storages of arguments that it writes to.
    """

    function: Any
    args: list[TensorRef | Constant]
    structure: Any
    outputs: list[TensorRef | None]
    in_place: frozenset[int] = frozenset()

    @cached_property
    def used(self) -> frozenset[int]:
        """The storages of its arguments."""
        return frozenset(arg.storage for arg in self.args if isinstance(arg, TensorRef))

    @cached_property
    def made(self) -> frozenset[int]:
        """The storages of its results."""
        return frozenset(ref.storage for ref in self.outputs if ref is not None)

    @cached_property
    def written(self) -> frozenset[int]:
        """The storages that it makes or writes to."""
        return self.made | self.in_place

    @property
    def only_computes(self) -> bool:
        """Whether its only effect is to write what it computes from its arguments."""
        is_random = torch.Tag.nondeterministic_seeded in self.function.tags
        return self.function.namespace in ("aten", "prims", "fastgen") and not is_random

    @property
    def is_allocation(self) -> bool:
        """Whether it only allocates memory without writing to it."""
        return self.function.overloadpacket in UNINITIALISED


_aten = torch.ops.aten
# Products of two matrices, as in linear layers.
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})
UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
)


@cache
def structure_of(arguments: int) -> Any:
    """Returns the structure of an operation with this many arguments, all positional and none in a list."""
    return tree_structure(((None,) * arguments, {}))


class Recording:
    """The result of `record`.

    Attributes:
        operations: in order.
        storages: by number: memory that operations use.
        made: numbers of the storages that operations have made.
        host_values: numbers of the storages that hold host values.
        constants: operations whose results are equal in each replay, in order, once a graph pass has found them.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.storages: list[torch.UntypedStorage] = []
        self.made: set[int] = set()
        self.host_values: set[int] = set()
        self.constants: list[Operation] = []


@cache
def with_out(function: Any, results: int) -> tuple[Any, list[str]] | None:
    """Returns the overload of an operator that writes to preallocated results, and the names of those arguments."""
    wanted = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        written = [a for a in other._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in other._schema.arguments if a not in written]
        are_all = len(written) == len(function._schema.returns) == results
        if are_all and others == wanted and all(each.kwarg_only and str(each.type) == "Tensor" for each in written):
            return other, [each.name for each in written]
    return None
