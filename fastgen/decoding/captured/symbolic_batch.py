"""A recording whose batch size is a symbol: recorded for two numbers of inputs, specialized for any.

A recording only contains numbers: a tensor of [6, 64] may have 6 rows, or 6 heads. So the same function is recorded for
two numbers of inputs. Each size, stride, offset and argument is a linear function through its values in the two. One
that is equal in both does not depend on the batch. If anything else differs, there is no such recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fastgen.decoding import program_memory
from fastgen.decoding.captured.program import Prepared, Program
from fastgen.decoding.captured.recording import tensors_in
from fastgen.decoding.program_memory import Growing
from fastgen.decoding.recorded_graph import Constant, Operation, TensorRef

# Pairs of numbers of inputs to record for: primes, so that few sizes are multiples of them. Two pairs for each range.
_BATCHES = ((13, 17), (11, 19), (61, 67), (59, 71), (251, 257), (241, 263))
# The most inputs that a recording serves, such that two pairs are available.
MOST = _BATCHES[-2][1]
# A number may be less than a multiple of the batch by this many rows, for example without the first or the last row.
_MOST_LESS = 2
# The memory of a step is searched for in objects of these packages.
_OWN_PACKAGES = ("fastgen.", "transformers.generation.")


class NotSymbolic(Exception):
    """The two recordings do not determine one for other numbers of inputs."""


class DoesNotFollow(NotSymbolic):
    """The recording depends on the length of buffers that may grow."""


def batches(inputs: int, lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs of numbers of inputs to record for, the larger at least `inputs`, which divide none of `lengths`."""
    known = [length for length in lengths if length]
    for both in _BATCHES:
        if inputs <= both[1] and all(length % batch for length in known for batch in both):
            yield both


def tensors_of(*roots: Any) -> dict[str, Tensor]:
    """Returns the tensors that FastGen's objects hold, by path: objects made alike have the same paths."""
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


class Recorded(NamedTuple):
    """A recording for one number of inputs.

    Attributes:
        prepared: the recording after the graph passes.
        batch: the number of inputs.
        buffers: tensors of the recorded step (`tensors_of`), to be replaced by those of another step.
        growing: those of the buffers that may grow; None if all have fixed sizes.
    """

    prepared: Prepared
    batch: int
    buffers: Mapping[str, Tensor]
    growing: Growing | None


class _Line(NamedTuple):
    """A number as a linear function of the batch."""

    constant: int
    factor: int

    def at(self, batch: int) -> int:
        return self.constant + self.factor * batch


@dataclass(frozen=True)
class _SymbolicRef:
    """A `TensorRef` for any number of inputs."""

    storage: int
    dtype: torch.dtype
    size: tuple[_Line, ...]
    stride: tuple[_Line, ...]
    offset: _Line

    def at(self, inputs: int, batch: int) -> TensorRef:
        """Returns the reference for this many inputs, in memory for `batch`."""
        sizes = tuple(size.at(inputs) for size in self.size)
        strides = tuple(stride.at(batch) for stride in self.stride)
        return TensorRef(self.storage, self.dtype, sizes, strides, self.offset.at(batch))


class SymbolicRecording:
    """A recording made from those for two numbers of inputs.

    Attributes:
        most: the most inputs that it serves.
        follows: whether its programs stay valid with buffers that have got other memory.

    Raises:
        NotSymbolic: it holds for these two numbers only.
    """

    def __init__(self, smaller: Recorded, larger: Recorded) -> None:
        for each in (smaller, larger):
            prepared = each.prepared
            if each.growing is not None and not each.growing.serves(prepared.all_operations, prepared.storages):
                raise DoesNotFollow("sizes of buffers that may grow are a part of what was recorded")
        self._batches, self.most, self.follows = (smaller.batch, larger.batch), larger.batch, larger.growing is not None
        one, other = smaller.prepared, larger.prepared
        self._buffer_at = _buffers_at(larger)  # names of the buffers, by number of their storage
        if self._buffer_at != _buffers_at(smaller) or one.made != other.made:
            raise NotSymbolic("other memory for other inputs")
        self._growing = {
            at for at in self._buffer_at if larger.growing is not None and larger.growing.has(other.storages[at])
        }
        self._shapes = {
            name: self._lines(smaller.buffers[name].shape, larger.buffers[name].shape)
            for at, name in self._buffer_at.items()
            if at not in self._growing
        }
        self._of_constants = {
            at: self._line(one.storages[at].nbytes(), other.storages[at].nbytes())
            for each in other.constants
            for at in each.made
        }
        own = self._buffer_at.keys() | other.made | self._of_constants.keys()
        self._shared = self._shared_by(one, other, own)
        nothing = torch.empty(0, dtype=torch.uint8).untyped_storage()  # replaces memory that the recording made
        shared = [storage if at in self._shared else nothing for at, storage in enumerate(other.storages)]
        self._prepared = replace(other, groups=[], constants=(), storages=shared, follows=self.follows)
        try:
            self._constants = [self._operation(*both) for both in zip(one.constants, other.constants, strict=True)]
            self._groups = [
                [self._operation(*both) for both in zip(*groups, strict=True)]
                for groups in zip(one.groups, other.groups, strict=True)
            ]
        except ValueError:
            raise NotSymbolic("other operations for other inputs") from None

    @property
    def chunks(self) -> set[program_memory.Chunk]:
        """The chunks of its results, for the most inputs that it serves."""
        return self._prepared.chunks

    # ---- comparing the two recordings

    def _line(self, small: int, large: int) -> _Line:
        (first, last), more = self._batches, large - small
        if more % (last - first):
            raise NotSymbolic(f"{small} of {first} inputs, and {large} of {last}")
        factor = more // (last - first)
        constant = small - factor * first
        if constant * factor < -_MOST_LESS * factor**2:  # likely not linear but, for example, quadratic
            raise NotSymbolic(f"{small} of {first} inputs, and {large} of {last}")
        return _Line(constant, factor)

    def _lines(self, small: Sequence[int], large: Sequence[int]) -> tuple[_Line, ...]:
        if len(small) != len(large):
            raise NotSymbolic("other dimensions for other inputs")
        return tuple(map(self._line, small, large))

    def _shared_by(self, one: Prepared, other: Prepared, own: Set[int]) -> set[int]:
        """Returns the storages that belong to neither step, and are the same in both: weights, and frozen values."""
        found = set()
        for at in frozenset[int]().union(*(each.used | each.made | each.in_place for each in other.operations)) - own:
            same = one.storages[at]._cdata == other.storages[at]._cdata
            is_frozen = at in one.host_values & other.host_values
            if not same and not (is_frozen and one.storages[at].tolist() == other.storages[at].tolist()):
                raise NotSymbolic("memory that is not the step's own, and not the model's")
            found.add(at)
        if other.written & found:
            raise NotSymbolic("it writes to memory that is not the step's own")
        return found

    def _operation(self, one: Operation, other: Operation) -> Operation:
        """Returns the operation with symbolic references and numbers for those that depend on the batch."""
        if one.function is not other.function or one.structure != other.structure or one.in_place != other.in_place:
            raise NotSymbolic("other operations for other inputs")
        args: list[Any] = [self._argument(*both) for both in zip(one.args, other.args, strict=True)]
        outputs: list[Any] = [self._argument(*both) for both in zip(one.outputs, other.outputs, strict=True)]
        return Operation(other.function, args, other.structure, outputs, other.in_place)

    def _argument(self, one: Any, other: Any) -> Any:
        if isinstance(one, TensorRef) and isinstance(other, TensorRef):
            return self._ref(one, other)
        if isinstance(one, Constant) and isinstance(other, Constant):
            if isinstance(other.value, Tensor):
                raise NotSymbolic("a tensor without an address of its own")
            numbers = one.value, other.value
            if numbers[0] != numbers[1] and all(type(number) is int for number in numbers):
                return self._line(*numbers)
            if _is_same(*numbers):
                return other
        elif one is None and other is None:
            return None
        raise NotSymbolic(f"{one} in place of {other}")

    def _ref(self, one: TensorRef, other: TensorRef) -> Any:
        if one.storage != other.storage or one.dtype is not other.dtype:
            raise NotSymbolic("other tensors for other inputs")
        size, stride = self._lines(one.size, other.size), self._lines(one.stride, other.stride)
        offset, storage = self._line(one.offset, other.offset), other.storage
        if storage in self._growing:  # whole, or with its first two dimensions folded
            return _SymbolicRef(storage, other.dtype, size, (), offset)
        lines = (*size, *stride, offset)
        if not any(line.factor for line in lines):
            return other
        if storage in self._shared:
            grows = zip(size, other.stride, strict=True)
            if any(line.factor for line in (*stride, offset)) or any(line.factor and apart for line, apart in grows):
                raise NotSymbolic(f"a tensor of {other.size} that is not the step's own")
        return _SymbolicRef(storage, other.dtype, size, stride, offset)

    # ---- specializing for a number of inputs

    def specialize(self, buffers: Mapping[str, Tensor], batch: int, inputs: int, growing: Growing | None) -> Program:
        """Returns the program for the first `inputs` of a step, which has these buffers for `batch` inputs.

        Args:
            buffers: those of the step, by the same names.
            growing: those of them that may grow, if the recording `follows`.

        Raises:
            NotSymbolic: there are too many inputs, or the step has other buffers.
        """
        if inputs > self.most:
            raise NotSymbolic(f"there is room for {self.most} inputs")
        for name, shape in self._shapes.items():
            if name not in buffers or tuple(buffers[name].shape) != tuple(line.at(batch) for line in shape):
                raise NotSymbolic(f"a step of other parts: {name[1:]}")
        storages: list[Any] = list(self._prepared.storages)
        for at, name in self._buffer_at.items():
            storages[at] = buffers[name].untyped_storage()
        for at, size in self._of_constants.items():
            storages[at] = torch.empty(size.at(inputs), dtype=torch.uint8).untyped_storage()

        def of(arg: Any) -> Any:
            if isinstance(arg, _SymbolicRef):
                return self._specialized(arg, inputs, batch, buffers)
            return Constant(arg.at(inputs)) if isinstance(arg, _Line) else arg

        def specialized(each: Operation) -> Operation:
            outputs = list(map(of, each.outputs))
            return Operation(each.function, list(map(of, each.args)), each.structure, outputs, each.in_place)

        with torch._C._InferenceMode(True):
            for each in self._constants:
                _execute(specialized(each), storages)
        groups = [[specialized(each) for each in group] for group in self._groups]
        return Program(growing=growing, prepared=replace(self._prepared, groups=groups, storages=storages))

    def _specialized(self, ref: _SymbolicRef, inputs: int, batch: int, buffers: Mapping[str, Tensor]) -> TensorRef:
        if ref.storage in self._growing:
            buffer = buffers[self._buffer_at[ref.storage]]
            whole = buffer if len(ref.size) == buffer.dim() else buffer.flatten(0, 1)
            return TensorRef.of(ref.storage, whole[: ref.size[0].at(inputs)] if whole.dim() else whole)
        return ref.at(inputs, batch if ref.storage in self._buffer_at else inputs)


def _buffers_at(recorded: Recorded) -> dict[int, str]:
    """Returns the names of the buffers, by number of their storage."""
    number = {storage._cdata: at for at, storage in enumerate(recorded.prepared.storages)}
    found: dict[int, str] = {}
    for name, buffer in recorded.buffers.items():
        if (at := number.get(buffer.untyped_storage()._cdata)) is not None:
            found.setdefault(at, name)
    return found


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))  # also if both are NaN


def _execute(operation: Operation, storages: Sequence[Any]) -> None:
    """Computes a constant."""
    of = partial(_tensor, storages)
    args, kwargs = tree_unflatten([of(arg) for arg in operation.args], operation.structure)
    results = tensors_in(operation.function(*args, **kwargs))
    for ref, result in zip(operation.outputs, results, strict=True):
        of(ref).copy_(result)


def _tensor(storages: Sequence[Any], arg: Any) -> Any:
    if isinstance(arg, TensorRef):
        if not storages[arg.storage].nbytes():  # only its shape and dtype count
            return torch.empty_strided(arg.size, arg.stride, dtype=arg.dtype)
        return arg.of_storage(storages[arg.storage])
    return arg.value
