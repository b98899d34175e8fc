"""A recording whose batch size is a symbol: recorded once, specialized for any number of inputs.

Models say what they do in numbers: a tensor of [6, 64] may be one of 6 rows, or of 6 heads. So the function is recorded
for a prime number of inputs that divides no size of the model's. A size or a stride that it divides is then a multiple
of the batch, and the recording for another number of inputs is the same with that number in its place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from fastgen.decoding.captured.program import Prepared, Program
from fastgen.decoding.captured.recording import tensors_in
from fastgen.decoding.kv.exchange import Growing
from fastgen.decoding.operations import Constant, Operation, TensorRef

# Batches to record for: the first that no size of the model is a multiple of. There may be as many inputs at the most.
_PRIMES = ((17, 19, 23, 29, 31), (67, 71, 73, 79, 83), (257, 263, 269, 271, 277))
# Objects of these packages are looked through for a step's memory.
_OWN_PACKAGES = ("fastgen.", "transformers.generation.")


class NotSymbolic(Exception):
    """What was recorded says too little of other numbers of inputs."""


def primes(inputs: int, sizes: frozenset[int]) -> Iterator[int]:
    """Batches of `inputs` at the least that divide none of these sizes, smallest first, of about the same size."""
    for some in _PRIMES:
        if inputs <= some[0]:
            yield from (prime for prime in some if not any(size % prime == 0 for size in sizes if size))
            return


def tensors_of(*roots: Any) -> dict[str, Tensor]:
    """The tensors that objects of FastGen's hold, by where they hold them: alike for objects that were made alike."""
    found: dict[str, Tensor] = {}
    _walk(roots, "", found, set())
    return found


def _walk(each: Any, path: str, found: dict[str, Tensor], seen: set[int]) -> None:
    if isinstance(each, Tensor):
        found[path] = each
        return
    if isinstance(each, (tuple, list)):
        parts: Iterable[tuple[Any, Any]] = enumerate(each)
    elif isinstance(each, dict):
        parts = each.items()
    elif type(each).__module__.startswith(_OWN_PACKAGES) and not isinstance(each, (Growing, type)):
        parts = getattr(each, "__dict__", {}).items()
    else:
        return
    if id(each) not in seen:
        seen.add(id(each))
        for name, part in parts:
            _walk(part, f"{path}.{name}", found, seen)


class SymbolicRecording:
    """What was recorded for `batch` inputs.

    Args:
        prepared: behind the graph passes.
        buffers: tensors of the step that was recorded (`tensors_of`), which another one has others for. Anything else
            is shared.
        growing: those of the buffers that may grow.

    Raises:
        NotSymbolic: it holds for this batch only.
    """

    def __init__(
        self,
        prepared: Prepared,
        batch: int,
        buffers: Mapping[str, Tensor],
        growing: Growing | None,
    ) -> None:
        self._batch = batch
        self.follows = growing is not None and growing.serves(prepared.operations, prepared.storages)
        if growing is not None and not self.follows:
            raise NotSymbolic("sizes of buffers that may grow are a part of what was recorded")
        number = {storage._cdata: at for at, storage in enumerate(prepared.storages)}
        self._buffer_at: dict[int, str] = {}  # by number of its storage, which of the buffers
        self._shapes: dict[str, tuple[int, ...]] = {}
        for at, buffer in buffers.items():
            if (storage := number.get(buffer.untyped_storage()._cdata)) is not None:
                self._buffer_at.setdefault(storage, at)
                self._shapes[at] = tuple(buffer.shape)
        grow = (lambda storage: False) if growing is None else growing.has
        self._growing = {at for at in self._buffer_at if grow(prepared.storages[at])}
        # What is in buffers, other steps have elsewhere.
        kept: list[Any] = [None if at in self._buffer_at else storage for at, storage in enumerate(prepared.storages)]
        self._prepared = replace(prepared, storages=kept)
        self._of_constants = {storage for each in prepared.constants for storage in each.made}
        own = self._buffer_at.keys() | prepared.made | self._of_constants
        self._shared = set(range(len(prepared.storages))) - own
        if prepared.written & self._shared:
            raise NotSymbolic("it writes to memory that is not the step's own")
        self._scaled = {id(each): _scaled_arguments(each, batch) for each in self._all()}
        self._check()

    def _all(self) -> Iterator[Operation]:
        return itertools.chain(self._prepared.constants, self._prepared.operations)

    def _check(self) -> None:
        for each in self._all():
            for ref in (*each.args, *each.outputs):
                if isinstance(ref, Constant) and isinstance(ref.value, Tensor):
                    raise NotSymbolic("a tensor without an address of its own")
                if isinstance(ref, TensorRef) and ref.storage not in self._growing:
                    self._mapped(ref, 1, 1, self._prepared.storages, {})
                    if ref.storage in self._shared and any(size and size % self._batch == 0 for size in ref.size):
                        raise NotSymbolic(f"a tensor of {ref.size} that is not the step's own")

    @property
    def shared(self) -> list[torch.UntypedStorage]:
        """What is read of memory that is not the step's own: of weights."""
        used = frozenset[int]().union(*(each.used for each in self._all()))
        return [self._prepared.storages[number] for number in used & self._shared]

    def specialize(self, buffers: Mapping[str, Tensor], batch: int, inputs: int, growing: Growing | None) -> Program:
        """The program for the first `inputs` of a step, which has these buffers for `batch` inputs.

        Args:
            buffers: those of the step, by the same names.
        """
        assert inputs <= self._batch, "memory was planned for the batch that was recorded"
        self._check_buffers(buffers, batch)
        storages = list(self._prepared.storages)
        for number, at in self._buffer_at.items():
            storages[number] = buffers[at].untyped_storage()

        for number in self._of_constants:
            size = _scale(storages[number].nbytes(), self._batch, inputs)
            storages[number] = torch.empty(size, dtype=torch.uint8).untyped_storage()

        def of(ref: Any) -> Any:
            return self._mapped(ref, inputs, batch, storages, buffers) if isinstance(ref, TensorRef) else ref

        def specialized(operation: Operation) -> Operation:
            args = [of(arg) for arg in operation.args]
            for at in self._scaled[id(operation)]:
                args[at] = Constant(args[at].value // self._batch * inputs)
            outputs = [of(ref) for ref in operation.outputs]
            return Operation(operation.function, args, operation.structure, outputs, operation.in_place)

        with torch._C._InferenceMode(True):
            for each in self._prepared.constants:
                _execute(specialized(each), storages)
        groups = [[specialized(each) for each in group] for group in self._prepared.groups]
        prepared = replace(self._prepared, groups=groups, storages=storages, follows=self.follows)
        return Program(growing=growing, prepared=prepared)

    def _check_buffers(self, buffers: Mapping[str, Tensor], batch: int) -> None:
        """Raises NotSymbolic unless these differ from those of the recorded step in the number of inputs alone."""
        growing = {self._buffer_at[storage] for storage in self._growing}
        for at, shape in self._shapes.items():
            expected = tuple(_scale(size, self._batch, batch) for size in shape)
            there = tuple(buffers[at].shape) if at in buffers else None
            if there is None or len(there) != len(shape) or (at not in growing and there != expected):
                raise NotSymbolic(f"{at[1:]} is {there} in place of {expected}")

    def _mapped(
        self, ref: TensorRef, inputs: int, batch: int, storages: Sequence[Any], buffers: Mapping[str, Tensor]
    ) -> TensorRef:
        """The tensor of so many inputs, where a buffer has `batch`."""
        prime, storage = self._batch, ref.storage
        if storage in self._shared:
            return ref
        if storage in self._growing:  # whole, or with its first two dimensions as one
            buffer = buffers[self._buffer_at[storage]]
            whole = buffer if len(ref.size) == buffer.dim() else buffer.flatten(0, 1)
            return TensorRef.of(storage, whole[: _scale(ref.size[0], prime, inputs)])
        sizes = tuple(_scale(size, prime, inputs) for size in ref.size)
        if storage not in self._buffer_at:
            batch = inputs
        strides = tuple(_scale(stride, prime, batch) for stride in ref.stride)
        offset = self._offset(ref, batch) if ref.offset else 0
        return TensorRef(storage, ref.dtype, sizes, strides, offset)

    def _offset(self, ref: TensorRef, batch: int) -> int:
        """Where the tensor begins: a number of rows from the beginning, or somewhere in the first row."""
        prime = self._batch
        rows = [stride for size, stride in zip(ref.size, ref.stride, strict=True) if size % prime == 0 and stride]
        is_in_row = bool(rows) and ref.offset < min(rows)
        if is_in_row and not any(stride % prime == 0 for stride in ref.stride if stride):
            return ref.offset
        if ref.offset % prime or not (rows or any(stride % prime == 0 for stride in ref.stride if stride)):
            raise NotSymbolic(f"a tensor that begins at {ref.offset} of memory for {prime} inputs")
        return ref.offset // prime * batch


def _scale(size: int, prime: int, batch: int) -> int:
    return size if size % prime else size // prime * batch


def _execute(operation: Operation, storages: Sequence[Any]) -> None:
    """Computes a constant."""
    of = partial(_tensor, storages)
    args, kwargs = tree_unflatten([of(arg) for arg in operation.args], operation.structure)
    results = tensors_in(operation.function(*args, **kwargs))
    for ref, result in zip(operation.outputs, results, strict=True):
        of(ref).copy_(result)


def _tensor(storages: Sequence[Any], arg: Any) -> Any:
    if isinstance(arg, TensorRef):
        return torch.empty(0, dtype=arg.dtype).set_(storages[arg.storage], arg.offset, arg.size, arg.stride)
    return arg.value


def _scaled_arguments(operation: Operation, prime: int) -> list[int]:
    """Which of the arguments are sizes that are multiples of the batch."""
    places = range(len(operation.args))
    args, kwargs = tree_unflatten(list(places), operation.structure)
    names = [argument.name for argument in operation.function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    found = [at for name in _sizes_in(operation.function) & given.keys() for at in tree_leaves(given[name])]
    constants = ((at, operation.args[at]) for at in found)
    numbers = ((at, arg.value) for at, arg in constants if isinstance(arg, Constant) and type(arg.value) is int)
    return [at for at, number in numbers if number and number % prime == 0]


@cache
def _sizes_in(function: Any) -> frozenset[str]:
    """The names of an operator's arguments that are sizes."""
    if function.overloadpacket is torch.ops.aten.arange:
        return frozenset(("start", "end"))
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\?? (\w+)", str(function._schema)))
