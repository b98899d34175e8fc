"""A graph for the CPU: the operators of a function, recorded once and executed again on the same memory.

The recorded operators run one after the other, with their results in memory that was planned ahead. No module runs, and
nearly all operators need no view and no allocation.

Products with a weight use the kernel that `fastgen.ops.linear.choose` selects. Small elementwise operators become one
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fastgen import patching
from fastgen.decoding import linear_ops, lm_head, program_memory, recorded_graph
from fastgen.decoding.captured.recording import record, tensors_in
from fastgen.decoding.program_memory import Growing
from fastgen.decoding.recorded_graph import COPIES, Constant, Operation, Recording, TensorRef, storage_of, with_out
from fastgen.memory import no_collection
from fastgen.ops import elementwise, runtime, search_step

# Shared by all programs: `fastgen.decoding.captured.graph.taken` lets one call at a time run programs, and a program
# passes results to the next one only in tensors that existed before the capture.
memory = program_memory.Arena()

_running: ContextVar[bool] = ContextVar("fastgen_program", default=False)


def is_running() -> bool:
    """Whether this thread is inside a program, which a signal handler or a finalizer may have interrupted."""
    return _running.get()


class Program:
    """Records a function, and executes it again. It has the methods of `fastgen.decoding.captured.graph.Graph`.

    With a `Prepared`, it needs no capture.

    Attributes:
        follows: whether the captured program stays valid when buffers of `growing` get other memory.
    """

    def __init__(
        self, memory: program_memory.Arena = memory, growing: Growing | None = None, prepared: Prepared | None = None
    ) -> None:
        self._memory, self._growing = memory, growing
        self._calls = linear_ops.Calls()
        self._chunks: set[program_memory.Chunk] = set()
        self.follows = False
        if prepared is not None:
            with torch._C._InferenceMode(True):
                self.take(prepared)

    def capture(self, function: Callable[[], object]) -> None:
        """Records what `function` does, and undoes what it writes.

        Raises:
            RuntimeError: the function does something that cannot be captured on a GPU.
        """
        with torch._C._InferenceMode(True), no_collection(), patching.held(_running, True):
            self.take(prepared(function, self._memory))

    def take(self, prepared: Prepared) -> None:
        """Compiles a prepared recording, which later replays execute."""
        compiler = _Compiler(prepared, self._growing)
        self._calls, self._chunks = linear_ops.Calls(compiler.calls()), prepared.chunks
        self.follows = compiler.follows

    def replay(self) -> None:
        """Executes the program on the present contents of its memory."""
        before = _running.get()
        _running.set(True)  # `patching.held` would cost 3 us in each replay
        try:
            with torch._C._InferenceMode(True), runtime.for_replay():
                for call in self.calls(planned=not runtime.is_profiled()):
                    call()
        finally:
            _running.set(before)

    def calls(self, planned: bool) -> Sequence[Callable[[], object]]:
        """Returns the calls of the next replay: operators one by one, or with command lists of several if `planned`."""
        return self._calls.now(planned)


def prepared(
    function: Callable[[], object], memory: program_memory.Arena = memory, scratch: frozenset[int] = frozenset()
) -> Prepared:
    """Records a function and prepares it for execution. `scratch` is as in `record`.

    Raises:
        RuntimeError: the function does something that cannot be captured on a GPU, or there is too little memory.
    """
    return Prepared.of(record(function, scratch)[0], memory)


# What an operator compiles to: instructions on small tensors, a linear op, or a call.
_Work = list[elementwise.Instruction] | linear_ops.AnyLinearOp | Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A recording after the graph passes, with its memory planned.

    Attributes:
        groups: its operations in execution order; products with one input form a group.
        storages: by number: memory that operations use, except that of results.
        places: for storages that the recording makes: the chunk, and the offset in it in bytes.
        made: numbers of the storages that the recording makes.
        read, written: numbers of the storages that operations read, or write to.
        host_values: numbers of the storages that hold host values.
        constants: the operations that make storages of equal contents in each replay, in order.
        follows: whether it stays valid with buffers that get other memory; None if that is not known.
    """

    groups: list[list[Operation]]
    storages: list[torch.UntypedStorage]
    places: dict[int, tuple[program_memory.Chunk, int]]
    made: frozenset[int]
    read: frozenset[int]
    written: frozenset[int]
    host_values: frozenset[int] = frozenset()
    constants: Sequence[Operation] = ()
    follows: bool | None = None

    @staticmethod
    def of(recording: Recording, memory: program_memory.Arena) -> Prepared:
        """Prepares a recording. Raises RuntimeError if it is incomplete, or there is too little memory."""
        _check_that_all_is_written(recording)
        host_values = frozenset(recording.host_values)
        recording = recorded_graph.run_passes(recording)
        recording.operations = lm_head.with_greedy_heads(recording.operations)
        groups = _grouped(recording.operations)
        return Prepared(
            groups,
            recording.storages,
            places=memory.place(_lifetimes(recording, groups)),
            made=frozenset(recording.made),
            read=frozenset(storage for each in recording.operations for storage in each.used),
            written=frozenset(storage for each in recording.operations for storage in each.written),
            host_values=host_values,
            constants=recording.constants,
        )

    @property
    def operations(self) -> Iterator[Operation]:
        return itertools.chain.from_iterable(self.groups)

    @property
    def all_operations(self) -> Iterator[Operation]:
        """Iterates over all operations, those that made the constants first."""
        return itertools.chain(self.constants, self.operations)

    @property
    def chunks(self) -> set[program_memory.Chunk]:
        """The chunks that hold the results."""
        return {chunk for chunk, _ in self.places.values()}


class _Compiler:
    """Compiles a prepared recording to calls."""

    def __init__(self, prepared: Prepared, growing: Growing | None) -> None:
        self._growing = growing
        known = prepared.follows
        self.follows = growing is not None and (
            growing.serves(prepared.all_operations, prepared.storages) if known is None else known
        )
        self._groups, self._storages, self._places = prepared.groups, prepared.storages, prepared.places
        self._read, self._written = prepared.read, prepared.written
        self._heads: dict[int, lm_head.GreedyHead] = {}

    def calls(self) -> list[Callable[[], object] | linear_ops.PanelOps]:
        """Returns the calls. Adjacent small elementwise operators become one call, as do the products of a group."""
        found: list[Callable[[], object] | linear_ops.PanelOps] = []
        calls = (call for group in self._groups for call in linear_ops.batched([self._call_of(each) for each in group]))
        for are_small, neighbours in itertools.groupby(calls, lambda call: isinstance(call, list)):
            some: list[Any] = list(neighbours)
            found += [elementwise.bound(list(itertools.chain.from_iterable(some)))] if are_small else some
        return found

    def _call_of(self, operation: Operation) -> _Work:
        args, kwargs = tree_unflatten([self._value(arg) for arg in operation.args], operation.structure)
        function = operation.function
        results: list[Any] = [ref and self._value(ref) for ref in operation.outputs]
        if function is lm_head.APPROXIMATE_LOGITS:
            head = self._heads[storage_of(operation.outputs[0])] = lm_head.GreedyHead(*results, *args)
            return partial(head.multiply)
        if function is lm_head.ARGMAX:
            return partial(self._heads[storage_of(operation.args[0])].find, *results)
        if function is lm_head.TOP_TWO:
            return partial(self._heads[storage_of(operation.args[2])].find_two, *args[:2], *args[3:5])
        read = [
            None if each is None or each.storage not in self._read else self._value(each) for each in operation.outputs
        ]
        work: _Work | None = None
        if self._growing is None or not self._growing.touches(operation, self._storages):
            work = elementwise.instructions(function, args, kwargs, read)
        # Named arguments would be alpha and beta: such a product is no linear layer.
        if work is None and not kwargs and len(results) == 1 and results[0] is not None:
            work = linear_ops.of(operation, args, results[0], self._written)
        if work is not None:
            return work
        if not any(result is not None for result in results):
            return partial(function, *args, **kwargs)
        # Of the variants with `out`, one copies twice, and the other cannot change the dtype.
        if function in COPIES and results[0] is not None:
            return partial(torch.ops.aten.copy_.default, results[0], args[0])
        if function is torch.ops.aten.argmax.default and args[1:] in ((-1,), (1,)) and results[0] is not None:
            own = search_step.argmax_into(results[0], args[0])
            if own is not None:
                return own
        writing = with_out(function, len(results))
        if writing is not None and None not in operation.outputs:
            return partial(writing[0], *args, **kwargs, **dict(zip(writing[1], results, strict=True)))
        return partial(_execute, partial(function, *args, **kwargs), read)

    def _value(self, arg: TensorRef | Constant) -> Any:
        if isinstance(arg, Constant):
            return arg.value
        chunk, begin = self._places.get(arg.storage, (None, 0))
        storage = self._storages[arg.storage] if chunk is None else chunk.storage
        found = arg.of_storage(storage, begin // arg.dtype.itemsize)
        if self._growing is not None and self.follows and chunk is None:
            self._growing.note(found, storage)
        return found


def _check_that_all_is_written(recording: Recording) -> None:
    """Raises RuntimeError if an operator reads memory that no recorded one has written.

    Then the recorder has missed a kernel, which is not called through torch's dispatcher.
    """
    written: set[int] = set()
    for operation in recording.operations:
        if operation.is_allocation:
            continue
        used = operation.used & recording.made
        if not operation.in_place and not used <= written:
            raise RuntimeError(f"{operation.function} reads what no operator of torch's has written")
        written |= used | operation.made


def _execute(function: Callable[[], Any], results: list[Tensor | None]) -> None:
    """Runs an operator that cannot write to preallocated memory, and copies its results there."""
    found = function()
    for tensor, result in zip(tensors_in(found), results, strict=True):
        if result is not None:
            result.copy_(tensor)


def _grouped(operations: list[Operation]) -> list[list[Operation]]:
    """Reorders operators so that products with one input form a group, none of which reads what another one writes."""
    found: list[list[Operation]] = []
    taken: set[int] = set()  # numbers of operators that belong to an earlier group
    for number, first in enumerate(operations):
        if number in taken:
            continue
        group, written, others = [first], first.made, 0
        read = linear_ops.input_of(first)
        for behind in range(number + 1, len(operations)) if read is not None else ():
            if behind in taken:
                continue
            other = operations[behind]
            if linear_ops.input_of(other) == read and not written & other.used:
                group.append(other)
                taken.add(behind)
            else:
                others += 1
                if others > 2 or other.function._schema.is_mutable:  # an activation may come after a gate
                    break
            written |= other.made
        found.append(group)
    return found


def _lifetimes(recording: Recording, groups: list[list[Operation]]) -> dict[int, program_memory.Buffer]:
    """Returns the lifetimes of storages that a recording makes, by number. A group is executed at one moment."""
    made = recording.made
    refs = [[p for each in group for p in (*each.args, *each.outputs) if isinstance(p, TensorRef)] for group in groups]
    return program_memory.lifetimes([(ref.storage, ref.end) for ref in some if ref.storage in made] for some in refs)
