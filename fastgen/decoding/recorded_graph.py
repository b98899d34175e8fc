"""A recorded graph: the operators that a function has called (`fastgen.decoding.captured.recording`), and graph passes.

The passes turn it into one of fewer operators with the same results. They rely on nothing that may differ between
replays. The contents of storages that existed before the recording may differ; only what a replay itself writes is
known.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from fastgen.interrupts import cached_property
from fastgen.ops import packed_attention


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


# ---- graph passes

# They use the shape and dtype of their tensor, not its contents.
_BY_LAYOUT = frozenset(
    {_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.zeros_like, _aten.ones_like, _aten.full_like}
)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default


def run_passes(recording: Recording) -> Recording:
    """Returns the recording without allocations, constants, unneeded copies, and results that nothing reads.

    An addition after a product becomes its bias. An embedding becomes an `index_select`, which writes directly to its
    result; torch's own operator makes a copy. Attention of sequences becomes FastGen's operator if that is faster.

    A constant stays in the storage that the recording has for it, which is then no longer in `made`.
    """
    found = Recording()
    found.storages = recording.storages
    operations = [_selected(each) for each in recording.operations if not each.is_allocation]
    constants = _constants(operations)
    found.made = recording.made - constants
    found.constants = [each for each in operations if each.made and each.made <= constants]
    operations = [each for each in operations if not each.made or not each.made <= constants]
    operations = _with_own_attention(_without_copies(operations), recording)
    found.operations = _needed(_with_biases(operations), found.made)
    read = frozenset[int]().union(*(each.used for each in found.operations))
    found.constants = _needed(found.constants, constants, read)
    return found


def _constants(operations: list[Operation]) -> set[int]:
    """Returns the storages that a single operator writes, once, and always with the same contents."""
    writers = Counter(storage for each in operations for storage in (*each.made, *each.in_place))
    found: set[int] = set()
    for each in operations:
        # The memory of a sparse tensor is unknown, so its contents may change.
        is_dense = not any(isinstance(arg, Constant) and isinstance(arg.value, torch.Tensor) for arg in each.args)
        is_pure = is_dense and each.only_computes and not each.in_place and None not in each.outputs
        inputs = frozenset() if each.function.overloadpacket in _BY_LAYOUT else each.used
        if is_pure and inputs <= found and all(writers[storage] == 1 for storage in each.made):
            found |= each.made
    return found


def _without_copies(operations: list[Operation]) -> list[Operation]:
    """Has readers of a copy read the original, if neither of the two is written to until the last reader."""
    writes: defaultdict[int, list[int]] = defaultdict(list)
    reads: defaultdict[int, list[int]] = defaultdict(list)
    outside: set[int] = set()  # storages that are read as another dtype, or beyond their first result
    results = {ref.storage: ref for each in operations for ref in each.outputs if ref is not None}
    for number, each in enumerate(operations):
        for storage in (*each.made, *each.in_place):
            writes[storage].append(number)
        for arg in each.args:
            if isinstance(arg, TensorRef):
                reads[arg.storage].append(number)
                result = results.get(arg.storage)
                if result is None or arg.dtype is not result.dtype or arg.end > result.end:
                    outside.add(arg.storage)

    originals: dict[int, tuple[TensorRef, TensorRef]] = {}  # by the copy's storage: the original and the copy

    def original(arg: TensorRef | Constant) -> TensorRef | Constant:
        if not isinstance(arg, TensorRef) or arg.storage not in originals:
            return arg
        source, copy = originals[arg.storage]
        return dataclasses.replace(arg, storage=source.storage, offset=arg.offset - copy.offset + source.offset)

    found = []
    for number, each in enumerate(operations):
        if not originals.keys().isdisjoint(each.used):
            each = dataclasses.replace(each, args=[original(arg) for arg in each.args])
        found.append(each)
        source, copy = each.args[0] if each.args else None, each.outputs[0] if each.outputs else None
        if each.function not in COPIES or not isinstance(source, TensorRef) or copy is None:
            continue
        last = max(reads[copy.storage], default=number)
        is_written = len(writes[copy.storage]) > 1 or any(number < at <= last for at in writes[source.storage])
        if _has_layout(source, copy) and not is_written and copy.storage not in outside:
            originals[copy.storage] = source, copy
    return found


def _with_own_attention(operations: list[Operation], recording: Recording) -> list[Operation]:
    used = frozenset(storage for each in operations for storage in each.used)
    return [
        _own_attention(each, used, recording) or each if each.function is _ATTENTION else each for each in operations
    ]


def _own_attention(operation: Operation, used: frozenset[int], recording: Recording) -> Operation | None:
    """Returns FastGen's operator for attention of sequences over all of their tokens, or None if it does not serve."""
    args, options = tree_unflatten(operation.args, operation.structure)
    scale = options.pop("scale", Constant(None))
    out, sums = operation.outputs
    # No dropout, no mask, not causal, and the log-sum-exp is not read.
    is_plain = all(isinstance(each, Constant) and not each.value for each in (*args[3:], *options.values()))
    if not is_plain or out is None or sums is None or sums.storage in used:
        return None
    given = (*args[:3], out)
    parts = [part for each in given if (part := _as_row(each, recording)) is not None]
    if len(parts) < len(given):
        return None
    query, keys, values, result = parts[0], parts[1], parts[2], parts[3].transpose(0, 1)
    dim = query.shape[-1]
    if not (result.is_contiguous() and packed_attention.serves(query, keys, values)):
        return None
    batch, length = out.size[0], out.size[2]
    *args, output = (
        dataclasses.replace(one, size=tuple(part.shape), stride=part.stride())
        for one, part in zip(given, (query, keys, values, result), strict=True)
    )
    lengths = torch.full((batch,), length, dtype=torch.int64, device="cpu")
    options = [Constant(lengths), Constant(packed_attention.scale_of(dim, scale.value))]
    return Operation(packed_attention.OPERATOR, [*args, *options], structure_of(5), [output])


def _as_row(ref: TensorRef, recording: Recording) -> torch.Tensor | None:
    """Returns [batch, heads, length, dim] as [heads, tokens, dim] in the same memory; None if its layout differs."""
    storage = recording.storages[ref.storage]
    return packed_attention.as_row(ref.of_storage(storage))


def _with_biases(operations: list[Operation]) -> list[Operation]:
    """Merges a product and a bias that is added to it right after into one operator."""
    uses = Counter(storage for each in operations for storage in each.used)
    found: list[Operation] = []
    for each in operations:
        product = _with_bias(found[-1], each) if found else None
        if product is not None and uses[storage_of(each.args[0])] == 1:
            found[-1] = product
        else:
            found.append(each)
    return found


def _with_bias(product: Operation, addition: Operation) -> Operation | None:
    """Returns the merged operator, in float32 only: in half precision, product and sum are each rounded."""
    if product.function is not _aten.mm.default or addition.function is not _aten.add.Tensor:
        return None
    (result,), (out,) = product.outputs, addition.outputs
    if result is None or out is None or len(addition.args) != 2:  # a third argument is a factor
        return None
    x, bias = addition.args
    if not (isinstance(x, TensorRef) and isinstance(bias, TensorRef) and x.storage == result.storage):
        return None
    n = result.size[1]
    is_one_type = x.dtype is bias.dtype is out.dtype is torch.float32
    is_bias = bias.size[-1:] == (n,) and math.prod(bias.size) == n and bias.stride[-1] == 1
    is_whole = all(each.is_contiguous and math.prod(each.size) == math.prod(result.size) for each in (result, x, out))
    if not (is_one_type and is_bias and is_whole and x.size[-1] == n and x.offset == result.offset):
        return None
    column = dataclasses.replace(bias, size=(n,), stride=(1,))
    rows = dataclasses.replace(out, size=result.size, stride=result.stride)
    return Operation(_aten.addmm.default, [column, *product.args], structure_of(3), [rows])


def _selected(operation: Operation) -> Operation:
    """Returns an embedding as an `index_select` of rows, [tokens, width]; any other operator unchanged."""
    if operation.function is not _aten.embedding.default:
        return operation
    weight, ids = operation.args[:2]
    (result,) = operation.outputs
    if not isinstance(ids, TensorRef) or result is None:
        return operation
    if not (ids.size and ids.is_contiguous and result.is_contiguous):
        return operation
    tokens = math.prod(ids.size)
    row = dataclasses.replace(ids, size=(tokens,), stride=(1,))
    rows = dataclasses.replace(result, size=(tokens, result.size[-1]), stride=(result.size[-1], 1))
    return Operation(_aten.index_select.default, [weight, Constant(0), row], structure_of(3), [rows])


def _has_layout(one: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors have the same dtype, sizes and strides."""
    distances = [[d for n, d in zip(each.size, each.stride, strict=True) if n > 1] for each in (one, other)]
    return one.dtype is other.dtype and one.size == other.size and distances[0] == distances[1]


def _needed(operations: list[Operation], made: set[int], later: Iterable[int] = ()) -> list[Operation]:
    """Returns the operations without those that only compute results which neither these nor `later` read."""
    read = set(later)
    found = []
    for each in reversed(operations):
        if not each.only_computes or not each.written or not each.written <= made or each.written & read:
            found.append(each)
            read |= each.used
    return found[::-1]
