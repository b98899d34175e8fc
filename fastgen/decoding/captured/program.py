"""A graph for the CPU: what a function does, recorded once and executed again on the same memory.

The recorded operators are executed one after the other, with their results in memory that was planned ahead. Between
two of them there is one call from Python and nothing else: no module, no view, no allocation.

Products with a weight become FastGen's where that is measured to be faster, and small elementwise operators one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fastgen.decoding import arena, products
from fastgen.decoding.captured.recording import Constant, Operation, Place, Recording, record, tensors_in
from fastgen.ops import elementwise

# Of all programs: `fastgen.decoding.captured.graph.taken` lets one call at a time use programs, and what one of them
# leaves for the next one is in tensors that were there before the capture.
memory = arena.Arena()


class Program:
    """Records a function, and executes it again. Has the methods of `fastgen.decoding.captured.graph.Graph`."""

    def __init__(self, memory: arena.Arena = memory) -> None:
        self._memory = memory
        self._calls: list[Callable[[], object]] = []
        self._chunks: set[arena.Chunk] = set()

    def capture(self, function: Callable[[], Any]) -> None:
        """Records what `function` does. What it writes is undone.

        Raises:
            RuntimeError: it does what cannot be captured on a GPU.
        """
        with torch.inference_mode():
            recording, _ = record(function)
            compiler = _Compiler(recording, self._memory)
            self._calls, self._chunks = compiler.calls(), compiler.chunks

    def replay(self) -> None:
        """Executes it on the memory as it is."""
        with torch.inference_mode():
            for call in self._calls:
                call()


# What an operator becomes: what it does to small tensors, a product, or a call.
_Work = list[elementwise.Instruction] | products.Product | Callable[[], object]


class _Compiler:
    """From a recording to calls."""

    def __init__(self, recording: Recording, memory: arena.Arena) -> None:
        operations = [each for each in recording.operations if not each.is_allocation]
        _check_that_all_is_written(recording, operations)
        self._groups = _grouped(operations)
        self._storages = recording.storages
        self._read = set[int]().union(*map(_storages, operations))
        self._places = memory.place(_lifetimes(recording, self._groups))
        self.chunks = {chunk for chunk, _ in self._places.values()}

    def calls(self) -> list[Callable[[], object]]:
        """Small elementwise operators that follow one another are one call, and so are the products of a group."""
        found: list[Callable[[], object]] = []
        works = (work for group in self._groups for work in products.together([self._work(each) for each in group]))
        for are_small, some in itertools.groupby(works, lambda work: isinstance(work, list)):
            if are_small:
                found.append(elementwise.bound(list(itertools.chain.from_iterable(some))))
            else:
                found += some
        return found

    def _work(self, operation: Operation) -> _Work:
        args, kwargs = tree_unflatten([self._value(leaf) for leaf in operation.leaves], operation.structure)
        results = [None if place is None else self._value(place) for place in operation.fresh]
        if not any(result is not None for result in results):
            return partial(operation.function, *args, **kwargs)
        if len(results) == 1:
            call = operation.function, args, results[0]
            # A product with alpha or beta, the only named arguments, is none of a linear layer.
            work = None if kwargs else elementwise.instructions(*call) or products.of(*call)
            if work:
                return work
            if operation.function is torch.ops.aten.clone.default:  # whose form with `out` copies twice
                return partial(torch.ops.aten.copy_.default, results[0], args[0])
            found = _with_out(operation.function)
            if found is not None:
                return partial(found[0], *args, **kwargs, **{found[1]: results[0]})
        # What nobody reads, as the statistics of a layer norm, is not copied.
        places = zip(results, operation.fresh, strict=True)
        results = [result if place is not None and place.storage in self._read else None for result, place in places]
        return partial(_execute, partial(operation.function, *args, **kwargs), results)

    def _value(self, leaf: Place | Constant) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        chunk, begin = self._places.get(leaf.storage, (None, 0))
        storage = self._storages[leaf.storage] if chunk is None else chunk.storage
        offset = leaf.offset + begin // leaf.dtype.itemsize
        return torch.empty(0, dtype=leaf.dtype).set_(storage, offset, leaf.size, leaf.stride)


def _check_that_all_is_written(recording: Recording, operations: list[Operation]) -> None:
    """Raises RuntimeError where an operator reads memory that no recorded one has written.

    Then there is a kernel that the recorder has not seen: one that is not called through torch's dispatcher.
    """
    written: set[int] = set()
    for operation in operations:
        used = _storages(operation) & recording.made
        if not operation.function._schema.is_mutable and not used <= written:
            raise RuntimeError(f"{operation.function} reads what no operator of torch's has written")
        written |= used | _fresh(operation)


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


def _grouped(operations: list[Operation]) -> list[list[Operation]]:
    """The operators in an order in which products with one input are a group: none reads what another one writes."""
    found, left = [], list(operations)
    while left:
        group, written, others = left[:1], _fresh(left[0]), 0
        for other in left[1:] if left[0].function in products.OPERATORS else []:
            is_alike = other.function in products.OPERATORS and other.leaves[-2] == left[0].leaves[-2]
            if is_alike and not written & _storages(other):
                group.append(other)
            else:
                others += 1
                if others > 2 or other.function._schema.is_mutable:  # between a gate and the rest is an activation
                    break
            written |= _fresh(other)
        found.append(group)
        left = left[1:] if len(group) == 1 else [each for each in left if not any(each is one for one in group)]
    return found


def _fresh(operation: Operation) -> set[int]:
    return {place.storage for place in operation.fresh if place is not None}


def _storages(operation: Operation) -> set[int]:
    return {leaf.storage for leaf in operation.leaves if isinstance(leaf, Place)}


def _lifetimes(recording: Recording, groups: list[list[Operation]]) -> dict[int, arena.Buffer]:
    """Of the storages that a recording makes itself, by number. What is in a group is executed at one moment."""
    made = recording.made
    places = [[p for each in group for p in (*each.leaves, *each.fresh) if isinstance(p, Place)] for group in groups]
    return arena.lifetimes([(place.storage, place.end) for place in some if place.storage in made] for some in places)
