"""What a CUDA graph does, on the CPU: operators are recorded once and executed again on the same memory.

`RecordedGraph` stands in for a `torch.cuda.CUDAGraph`, so that code which is captured on a GPU can be tested without
one. It records what a `Program` records (`fastgen.decoding.captured.recording`), and executes the operators as they
are. It is stricter than a graph in what a graph leaves undefined: memory that was freed is noticed, and memory that
nothing has been written to is poisoned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_unflatten

from fastgen.decoding.captured.recording import record, tensors_in
from fastgen.decoding.recorded_graph import Constant, Operation, TensorRef


class RecordedGraph:
    """Records the operators that a function calls, and executes them again."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        # By number: memory of the graph's own, which lives as long as it, or a weak reference to memory of others.
        self._storages: list[torch.UntypedStorage | StorageWeakRef] = []
        self._captured = False

    def capture(self, function: Callable[[], Any]) -> Any:
        """Calls `function` once, records it, and undoes what it has written.

        Returns:
            What `function` returned. Tensors that it made are poisoned (NaN, the largest integer, True) until `replay`.

        Raises:
            RuntimeError: the function does what cannot be captured on a GPU, or the graph is there already. Whatever
                the function raises is passed on; memory is put back then, too.
        """
        if self._captured:
            raise RuntimeError("the graph has been captured before; make a new one")
        recording, result = record(function)
        self._operations, self._captured = recording.operations, True
        self._storages = [
            storage if number in recording.made | recording.host_values else StorageWeakRef(storage)
            for number, storage in enumerate(recording.storages)
        ]
        self._memory = _Memory(self._operations, self._storages)
        with torch.inference_mode():
            for operation in self._operations:
                for ref in filter(None, operation.outputs):
                    _poison(_tensor(ref, _alive(self._storages[ref.storage])))
        return result

    @property
    def operators(self) -> list[str]:
        """Names of the recorded operators, as "aten::add.Tensor", in their order."""
        return [str(operation.function) for operation in self._operations]

    @torch.inference_mode()
    def replay(self) -> None:
        """Executes the operators on the memory they were recorded with. Random operators draw anew.

        Raises:
            RuntimeError: nothing was captured, or memory that the graph reads or writes has been freed.
        """
        if not self._captured:
            raise RuntimeError("replay before capture")
        storages = [_alive(storage) for storage in self._storages]
        with self._memory.filled(storages) as values:
            for operation, arguments in zip(self._operations, self._memory.arguments, strict=True):
                _execute(operation, arguments, values, storages)


class _Memory:
    """The tensors and constants of a graph's operators in one list, so that a replay makes each tensor once at most.

    Attributes:
        arguments: what each operator is called with, positional and named, with positions in the list as leaves.
    """

    def __init__(self, operations: list[Operation], storages: list[torch.UntypedStorage | StorageWeakRef]) -> None:
        self._numbers_by_ref: dict[TensorRef, int] = {}
        self._values: list[Any] = []
        self._of_others: list[TensorRef] = []
        self.arguments: list[tuple[tuple, dict]] = []
        for operation in operations:
            numbers = [self._number(arg, storages) for arg in operation.args]
            self.arguments.append(tree_unflatten(numbers, operation.structure))

    def _number(self, arg: TensorRef | Constant, storages: list[torch.UntypedStorage | StorageWeakRef]) -> int:
        if isinstance(arg, TensorRef):
            number = self._numbers_by_ref.setdefault(arg, len(self._values))
            if number < len(self._values):
                return number
            storage = storages[arg.storage]
            if isinstance(storage, torch.UntypedStorage):
                self._values.append(_tensor(arg, storage))
            else:
                self._of_others.append(arg)
                self._values.append(None)
        else:
            self._values.append(arg.value)
        return len(self._values) - 1

    @contextlib.contextmanager
    def filled(self, storages: list[torch.UntypedStorage]) -> Iterator[list[Any]]:
        """The list, for one replay: memory of others is not held beyond it."""
        for ref in self._of_others:
            self._values[self._numbers_by_ref[ref]] = _tensor(ref, storages[ref.storage])
        try:
            yield self._values
        finally:
            for ref in self._of_others:
                self._values[self._numbers_by_ref[ref]] = None


@torch.inference_mode()
def _tensor(ref: TensorRef, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


def _alive(storage: torch.UntypedStorage | StorageWeakRef) -> torch.UntypedStorage:
    if isinstance(storage, torch.UntypedStorage):
        return storage
    if storage.expired():
        raise RuntimeError("the graph uses memory that has been freed: keep what it reads and writes")
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata)


def _execute(
    operation: Operation, arguments: tuple[tuple, dict], values: list[Any], storages: list[torch.UntypedStorage]
) -> None:
    if operation.is_allocation:
        for ref in filter(None, operation.outputs):
            _poison(_tensor(ref, storages[ref.storage]))
        return
    args, kwargs = arguments
    result = operation.function(
        *[values[part] if type(part) is int else _filled(part, values) for part in args],
        **{name: _filled(part, values) for name, part in kwargs.items()},
    )
    results = [result] if isinstance(result, Tensor) else tensors_in(result)
    for ref, tensor in zip(operation.outputs, results, strict=True):
        if ref is not None:
            assert (tuple(tensor.shape), tensor.stride()) == (ref.size, ref.stride), operation.function
            # Bytes, because elements may share memory.
            storages[ref.storage].copy_(tensor.untyped_storage())


def _filled(part: Any, values: list[Any]) -> Any:
    """An argument: the value at a place of the list, or a list of values."""
    return values[part] if type(part) is int else type(part)(_filled(each, values) for each in part)


def _poison(tensor: Tensor) -> None:
    """Fills the memory that a tensor lies in with what nobody can take for a result."""
    dtype = tensor.dtype
    everything = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    if dtype.is_floating_point or dtype.is_complex:
        everything.fill_(float("nan"))
    else:
        everything.fill_(True if dtype is torch.bool else torch.iinfo(dtype).max)
