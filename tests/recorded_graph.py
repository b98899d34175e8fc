"""What a CUDA graph does, on the CPU: operators are recorded once and executed again on the same memory.

`RecordedGraph` stands in for a `torch.cuda.CUDAGraph`, so that code which is captured on a GPU can be tested without
one. As with a graph, addresses, sizes and host values are frozen when the function is captured, the function itself is
not called again, and what would make the host wait for the device is refused. It is stricter than a graph in what a
graph leaves undefined: memory that was freed is noticed, and memory that nothing has been written to is poisoned.

Only what goes through torch's dispatcher is seen. Kernels that are started in another way (Triton's) are not recorded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_aten = torch.ops.aten

# Results whose size, or a decision of the host's that, only the device knows.
_WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = frozenset({_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
)
# On the CPU these need no operator; on a GPU they copy to the host, or from it.
_TO_HOST = frozenset({Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__})
_FROM_HOST = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor})
# With a number in the place of a tensor these make a tensor of it on the host first.
_CHOOSING = frozenset({torch.where, Tensor.where})


@dataclass(frozen=True)
class _Place:
    """A tensor as a graph knows it: where it lies and how it is laid out."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Constant:
    """A host value, or a tensor without an address of its own (packed weights)."""

    value: Any


@dataclass(frozen=True)
class _Operation:
    function: Any
    leaves: list[_Place | _Constant]
    structure: Any
    # The result's tensors; None for those that lie in memory which was there before.
    fresh: list[_Place | None]


class RecordedGraph:
    """Records the operators that a function calls, and executes them again."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
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
        recorder = _Recorder()
        try:
            with _stream_capture(), _HostAccess(), recorder:
                result = function()
        finally:
            recorder.put_back()
        self._operations, self._storages, self._captured = recorder.operations, recorder.storages, True
        self._memory = _Memory(recorder.operations, recorder.storages)
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
        arguments: what each operator is called with, positional and named, with places in the list as leaves.
    """

    def __init__(self, operations: list[_Operation], storages: list[torch.UntypedStorage | StorageWeakRef]) -> None:
        self._places: dict[_Place, int] = {}
        self._values: list[Any] = []
        self._of_others: list[_Place] = []
        self.arguments: list[tuple[tuple, dict]] = []
        for operation in operations:
            numbers = [self._number(leaf, storages) for leaf in operation.leaves]
            self.arguments.append(tree_unflatten(numbers, operation.structure))

    def _number(self, leaf: _Place | _Constant, storages: list[torch.UntypedStorage | StorageWeakRef]) -> int:
        if isinstance(leaf, _Place):
            number = self._places.setdefault(leaf, len(self._values))
            if number < len(self._values):
                return number
            storage = storages[leaf.storage]
            if isinstance(storage, torch.UntypedStorage):
                self._values.append(_tensor(leaf, storage))
            else:
                self._of_others.append(leaf)
                self._values.append(None)
        else:
            self._values.append(leaf.value)
        return len(self._values) - 1

    @contextlib.contextmanager
    def filled(self, storages: list[torch.UntypedStorage]) -> Iterator[list[Any]]:
        """The list, for one replay: memory of others is not held beyond it."""
        for place in self._of_others:
            self._values[self._places[place]] = _tensor(place, storages[place.storage])
        try:
            yield self._values
        finally:
            for place in self._of_others:
                self._values[self._places[place]] = None


@torch.inference_mode()
def _tensor(place: _Place, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)


def _alive(storage: torch.UntypedStorage | StorageWeakRef) -> torch.UntypedStorage:
    if isinstance(storage, torch.UntypedStorage):
        return storage
    if storage.expired():
        raise RuntimeError("the graph uses memory that has been freed: keep what it reads and writes")
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata)


def _execute(
    operation: _Operation, arguments: tuple[tuple, dict], values: list[Any], storages: list[torch.UntypedStorage]
) -> None:
    if operation.function.overloadpacket in _UNINITIALISED:
        for place in filter(None, operation.fresh):
            _poison(_tensor(place, storages[place.storage]))
        return
    args, kwargs = arguments
    result = operation.function(
        *[values[part] if type(part) is int else _filled(part, values) for part in args],
        **{name: _filled(part, values) for name, part in kwargs.items()},
    )
    results = [result] if isinstance(result, Tensor) else _tensors(result)
    for place, tensor in zip(operation.fresh, results, strict=True):
        if place is not None:
            assert (tuple(tensor.shape), tensor.stride()) == (place.size, place.stride), operation.function
            # Bytes, because elements may share memory.
            storages[place.storage].copy_(tensor.untyped_storage())


def _filled(part: Any, values: list[Any]) -> Any:
    """An argument: the value at a place of the list, or a list of values."""
    return values[part] if type(part) is int else type(part)(_filled(each, values) for each in part)


_one_capture = threading.Lock()


@contextlib.contextmanager
def _stream_capture() -> Iterator[None]:
    """What torch answers while a stream is captured: Transformers then leaves out questions about values."""
    name, own = "torch.cuda.is_current_stream_capturing", threading.get_ident()
    # The function is one for all threads.
    with _one_capture, mock.patch(name, lambda: threading.get_ident() == own):
        yield


class _HostAccess(TorchFunctionMode):
    """Refuses what a GPU would copy to the host or from pageable memory, and a CPU has no operator for."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from_host = func in _FROM_HOST and not (args and isinstance(args[0], Tensor) and func is not Tensor.new_tensor)
        from_host |= func in _CHOOSING and any(isinstance(argument, (bool, int, float)) for argument in args)
        if func in _TO_HOST or from_host:
            _refuse(func.__name__, "copies between pageable host memory and the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.storages: list[torch.UntypedStorage | StorageWeakRef] = []
        self._numbers: dict[int, int] = {}  # of storages, by address of the storage object
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: list[Tensor] = []
        self._host: set[int] = set()  # storages of tensors made from host values
        self._generators: dict[torch.Generator, Tensor] = {}
        self._remember(torch.default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        arguments = _tensors((args, kwargs))
        if any(type(argument).__torch_dispatch__ is not Tensor.__torch_dispatch__ for argument in arguments):
            return NotImplemented  # the subclass calls operators with ordinary tensors, and those come here
        self._check(func, args, kwargs)
        # In inference mode composed operators arrive in one piece; the synchronising one may be inside.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func is _aten.lift_fresh.default:
            return self._lift(func, args)

        for written in _written(func, args, kwargs):
            self._save(written)
        for generator in kwargs.values():
            if isinstance(generator, torch.Generator):
                self._remember(generator)
        leaves, structure = tree_flatten((args, kwargs))
        places = [self._place(leaf) for leaf in leaves]
        result = func(*args, **kwargs)
        fresh = [self._allocate(tensor) for tensor in _tensors(result)]
        if func._schema.is_mutable or any(place is not None for place in fresh) or not fresh:
            self.operations.append(_Operation(func, places, structure, fresh))
        return result

    def put_back(self) -> None:
        """A capture executes nothing: restores what was written, and poisons what was made."""
        for storage, before in self._saved.values():
            storage.copy_(before)
        for generator, state in self._generators.items():
            generator.set_state(state)
        with torch.inference_mode():
            for tensor in self._made:
                _poison(tensor)

    def _check(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Refuses operators that could not be captured on a GPU."""
        packet = func.overloadpacket
        host = [tensor for tensor in _tensors((args, kwargs)) if _key(tensor) in self._host]
        if packet in _INDEXING:
            masked = any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
            # x[mask] = number is a masked fill.
            if masked and not (packet is _aten.index_put_ and len(args[1]) == 1 and host and args[2] is host[0]):
                _refuse(func, "waits for the device (an index is a boolean mask)")
            if host and not masked:
                _refuse(func, "copies from pageable host memory to the device")
        elif _WAITING & set(func.tags) and kwargs.get("output_size") is None:
            _refuse(func, "waits for the device")
        elif host and func not in (_aten.fill_.Tensor, _aten.lift_fresh.default):
            _refuse(func, "copies from pageable host memory to the device")
        elif packet in (_aten.copy_, _aten._to_copy):
            source = args[1] if packet is _aten.copy_ else args[0]
            target = args[0].device if packet is _aten.copy_ else kwargs.get("device") or source.device
            if target.type != source.device.type and not (kwargs.get("non_blocking") and source.is_pinned()):
                _refuse(func, f"copies from {source.device} to {target}, and not from pinned memory without waiting")

    def _lift(self, func: Any, args: tuple) -> Tensor:
        """A tensor of host values, made by torch for `x[i] = number` or for a list of indices: frozen."""
        (lifted,) = args
        self._number(lifted.untyped_storage(), own=True)
        self._host.add(_key(lifted))
        return func(lifted)

    def _place(self, leaf: Any) -> _Place | _Constant:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return _Constant(leaf)
        assert not leaf.is_conj() and not leaf.is_neg(), "lazy conjugates are not recorded"
        number = self._number(leaf.untyped_storage(), own=False)
        return _Place(number, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())

    def _allocate(self, tensor: Tensor) -> _Place | None:
        if tensor.untyped_storage()._cdata in self._numbers:
            return None
        self._number(tensor.untyped_storage(), own=True)
        place = self._place(tensor)
        assert isinstance(place, _Place)
        self._made.append(tensor.detach())
        return place

    def _number(self, storage: torch.UntypedStorage, own: bool) -> int:
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            # A weak reference keeps the storage object, not its memory: its address stays a name for it.
            self.storages.append(storage if own else StorageWeakRef(storage))
        return number

    def _save(self, tensor: Tensor) -> None:
        """Keeps the contents of memory that was there before the capture, when it is first written to."""
        number = self._number(tensor.untyped_storage(), own=False)
        if isinstance(self.storages[number], StorageWeakRef) and number not in self._saved:
            self._saved[number] = tensor.untyped_storage(), tensor.untyped_storage().clone()

    def _remember(self, generator: torch.Generator) -> None:
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()


def _refuse(function: Any, reason: str) -> None:
    raise RuntimeError(f"operation not permitted when stream is capturing: {function} {reason}")


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dictionaries, in order. torch's own function takes twice as long or longer."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return _tensors(list(tree.values()))
    return [tensor for part in tree for tensor in _tensors(part)] if isinstance(tree, tuple | list) else []


def _key(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    arguments = func._schema.arguments
    values = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([values.get(name) for name in changed])


def _poison(tensor: Tensor) -> None:
    """Fills the memory that a tensor lies in with what nobody can take for a result."""
    dtype = tensor.dtype
    everything = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    if dtype.is_floating_point or dtype.is_complex:
        everything.fill_(float("nan"))
    else:
        everything.fill_(True if dtype is torch.bool else torch.iinfo(dtype).max)
