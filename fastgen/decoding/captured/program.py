"""A graph for the CPU: what a function does, recorded once and executed again on the same memory.

The recorded operators are executed one after the other, with their results in memory that was planned ahead. Between
two of them there is one call from Python and nothing else: no module, no view, no allocation.

Products with a weight become FastGen's where that is measured to be faster, and small elementwise operators one call.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fastgen.decoding import products
from fastgen.decoding.captured.recording import Constant, Operation, Place, Recording, record, tensors_in
from fastgen.ops import elementwise

_aten = torch.ops.aten
_ALIGNMENT = 64  # results begin at a multiple of this in memory: a cache line


class Program:
    """Records a function, and executes it again. Has the methods of `fastgen.decoding.captured.graph.Graph`."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def capture(self, function: Callable[[], Any]) -> None:
        """Records what `function` does. What it writes is undone.

        Raises:
            RuntimeError: it does what cannot be captured on a GPU.
        """
        with torch.inference_mode():
            recording, _ = record(function)
            self._calls = _Compiler(recording).calls()

    def replay(self) -> None:
        """Executes it on the memory as it is."""
        with torch.inference_mode():
            for call in self._calls:
                call()


class _Bound(NamedTuple):
    """An operator with its arguments, and its results where they are to be; None for one that lies in an argument."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Tensor | None]

    def instructions(self) -> list[elementwise.Instruction]:
        """What a small elementwise operator does; of any other nothing."""
        if self.kwargs or len(self.results) != 1 or self.results[0] is None or not elementwise.is_available():
            return []
        return elementwise.instructions(self.function, self.args, self.results[0]) or []

    def call(self) -> Callable[[], object]:
        if not any(result is not None for result in self.results):
            return partial(self.function, *self.args, **self.kwargs)
        if len(self.results) == 1:
            # With factors, which are the only named arguments, it is none of a layer.
            product = None if self.kwargs else _product(self.function, self.args, self.results[0])
            if product is not None:
                return product
            found = _with_out(self.function)
            if found is not None:
                function, name = found
                return partial(function, *self.args, **self.kwargs, **{name: self.results[0]})
        return partial(_execute, partial(self.function, *self.args, **self.kwargs), self.results)


class _Compiler:
    """From a recording to calls."""

    def __init__(self, recording: Recording) -> None:
        self._operations = [each for each in recording.operations if not each.is_allocation]
        _check_that_all_is_written(recording, self._operations)
        self._storages = recording.storages
        self._begins, size = _planned(recording, self._operations)
        self._memory = torch.empty(size, dtype=torch.uint8).untyped_storage()

    def calls(self) -> list[Callable[[], object]]:
        """Elementwise operators that follow one another, and are small, are one call."""
        found: list[Callable[[], object]] = []
        bound = map(self._bound, self._operations)
        pairs = ((each, each.instructions()) for each in bound)
        for are_small, group in itertools.groupby(pairs, lambda pair: bool(pair[1])):
            operations, instructions = zip(*group, strict=True)
            if are_small and len(operations) > 1:
                found.append(elementwise.bound(list(itertools.chain.from_iterable(instructions))))
            else:
                found += [operation.call() for operation in operations]
        return found

    def _bound(self, operation: Operation) -> _Bound:
        args, kwargs = tree_unflatten([self._value(leaf) for leaf in operation.leaves], operation.structure)
        results = [None if place is None else self._value(place) for place in operation.fresh]
        return _Bound(operation.function, args, kwargs, results)

    def _value(self, leaf: Place | Constant) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        begin = self._begins.get(leaf.storage)
        storage = self._storages[leaf.storage] if begin is None else self._memory
        offset = leaf.offset + (begin or 0) // leaf.dtype.itemsize
        return torch.empty(0, dtype=leaf.dtype).set_(storage, offset, leaf.size, leaf.stride)


def _check_that_all_is_written(recording: Recording, operations: list[Operation]) -> None:
    """Raises RuntimeError where an operator reads memory that no recorded one has written.

    Then there is a kernel that the recorder has not seen: one that is not called through torch's dispatcher.
    """
    written: set[int] = set()
    for operation in operations:
        used = {leaf.storage for leaf in operation.leaves if isinstance(leaf, Place)} & recording.made
        if not operation.function._schema.is_mutable and not used <= written:
            raise RuntimeError(f"{operation.function} reads what no operator of torch's has written")
        written |= used | {place.storage for place in operation.fresh if place is not None}


def _execute(function: Callable[[], Any], results: list[Tensor | None]) -> None:
    """For an operator that cannot write to memory that is there."""
    found = function()
    for tensor, result in zip(tensors_in(found), results, strict=True):
        if result is not None:
            result.copy_(tensor)


@cache
def _with_out(function: Any) -> tuple[Any, str] | None:
    """The form of an operator that writes its only result to memory that is there, and the name of that argument."""
    wanted = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        written = [a for a in other._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in other._schema.arguments if a not in written]
        is_one = len(written) == 1 and written[0].kwarg_only and str(written[0].type) == "Tensor"
        if is_one and others == wanted:
            return other, written[0].name
    return None


def _product(function: Any, args: list[Any], result: Tensor) -> Callable[[], object] | None:
    """A product with a weight, where one of FastGen's own takes less time; None for anything else."""
    if function not in (_aten.mm.default, _aten.addmm.default):
        return None
    return products.faster(result, args[-2], args[-1].t(), args[0] if function is _aten.addmm.default else None)


def _planned(recording: Recording, operations: list[Operation]) -> tuple[dict[int, int], int]:
    """Where the storages that a recording makes itself begin in one piece of memory, and how large that is, in bytes.

    Each has its place from the operation that first uses it to the last one. The largest are placed first, each in the
    first gap that is free for so long (TurboTransformers, Fang et al., PPoPP 2021, Algorithm 1, with one chunk).
    """
    uses: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for number, operation in enumerate(operations):
        for place in (*operation.leaves, *operation.fresh):
            if isinstance(place, Place) and place.storage in recording.made:
                uses[place.storage] = uses.get(place.storage, (number,))[0], number
                sizes[place.storage] = max(sizes.get(place.storage, 0), place.end)
    placed: list[tuple[int, int, int]] = []  # (begin, end, storage), in this order
    begins: dict[int, int] = {}
    for storage, size in sorted(sizes.items(), key=lambda item: -item[1]):
        begin, (first, last) = 0, uses[storage]
        for other_begin, other_end, other in placed:
            if uses[other][0] <= last and first <= uses[other][1]:
                if begin + size <= other_begin:
                    break
                begin = max(begin, other_end)
        begins[storage] = begin
        bisect.insort(placed, (begin, -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT, storage))
    return begins, max((end for _, end, _ in placed), default=0)
