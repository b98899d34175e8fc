"""Memory of recorded programs: the arena of their results, and buffers that grow.

**The arena.** Once a program has been recorded, it is known when each result is made and when it is read for the last
time. So memory is planned ahead, in chunks that programs share: a run allocates no memory for results, and results that
are not in use at the same time share memory. The plan is that of TurboTransformers (Fang et al., "TurboTransformers: An
Efficient GPU Serving System For Transformer Models", PPoPP 2021, Algorithm 1) with one change. There, each result that
fits nowhere gets a chunk of 1.2 times its size. Here, all such results share one new chunk of exactly the size that
they need.

**Buffers that grow.** The KV cache of a captured step is as large as the calls so far have needed. A longer call gets
larger buffers, and the program stays valid: it only hands them to operators that read their sizes when they run. The
lengths of prompts and outputs are therefore not part of a recording.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.recorded_graph import Constant, Operation, TensorRef
from fastgen.interrupts import forkable_lock
from fastgen.ops import attention, kv_write, search_step  # noqa: F401 (define operators)

ALIGNMENT = 64  # buffers begin at multiples of a cache line, in bytes
LEAST_CHUNK = 2**21  # bytes; the rest of a small program's chunk serves later programs


class Buffer(NamedTuple):
    """Memory that is needed from one moment to another, both inclusive.

    Attributes:
        size: in bytes.
    """

    size: int
    first: int
    last: int


class Spot(NamedTuple):
    """The place of a buffer: the number of its chunk, and its offset there in bytes."""

    chunk: int
    begin: int


class _Extent(NamedTuple):
    """A range within a chunk, in bytes."""

    begin: int
    end: int


def lifetimes(moments: Iterable[Iterable[tuple[int, int]]]) -> dict[int, Buffer]:
    """Returns buffers by number. Each moment uses some, given as pairs of a number and the bytes that it needs."""
    found: dict[int, Buffer] = {}
    for moment, used in enumerate(moments):
        for number, size in used:
            before = found.get(number, Buffer(0, moment, moment))
            found[number] = Buffer(max(before.size, size), before.first, moment)
    return found


def plan(buffers: Mapping[int, Buffer], chunks: Sequence[int] = ()) -> tuple[dict[int, Spot], int]:
    """Places buffers in chunks. Buffers that are needed at the same time do not overlap.

    The largest buffers are placed first, each in the first chunk that has room for it during its lifetime, and there in
    the smallest gap that it fits into.

    Args:
        buffers: by number.
        chunks: sizes of the existing chunks, in bytes.

    Returns:
        The place of each buffer, and the bytes needed of a chunk after the given ones; 0 if these suffice.
    """
    # What each chunk holds, by moment: of hundreds of buffers, few are needed at the same time.
    held: list[defaultdict[int, list[_Extent]]] = [defaultdict(list) for _ in range(len(chunks) + 1)]
    spots: dict[int, Spot] = {}
    needed = 0
    for number, buffer in sorted(buffers.items(), key=lambda item: -item[1].size):
        size, moments = _rounded(buffer.size), range(buffer.first, buffer.last + 1)
        ends = enumerate((*chunks, math.inf))
        begins = ((chunk, _gap(size, _held(held[chunk], moments), end)) for chunk, end in ends)
        spot = next(Spot(chunk, begin) for chunk, begin in begins if begin is not None)
        for moment in moments:
            held[spot.chunk][moment].append(_Extent(spot.begin, spot.begin + size))
        spots[number] = spot
        if spot.chunk == len(chunks):
            needed = max(needed, spot.begin + size)
    return spots, needed


def _held(by_moment: Mapping[int, list[_Extent]], moments: Iterable[int]) -> list[_Extent]:
    """Returns the ranges held at any of these moments, in the order of `begin`."""
    return sorted({extent for moment in moments if moment in by_moment for extent in by_moment[moment]})


def _gap(size: int, held: Iterable[_Extent], end: float) -> int | None:
    """Returns where the smallest sufficient gap between these begins, else the space after them; None if too small."""
    free, best, smallest = 0, None, math.inf
    for begin, last in held:
        if size <= begin - free < smallest:
            best, smallest = free, begin - free
        free = max(free, last)
    return free if best is None and free + size <= end else best


def _rounded(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


class Chunk:
    """A piece of host memory of this many bytes. It lives as long as a program uses it."""

    def __init__(self, size: int) -> None:
        self.storage = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class Arena:
    """Chunks that several programs use, one program after the other.

    Programs leave nothing in them for the next program, so only one may run at a time. A chunk is freed with the last
    program that uses it.

    Attributes:
        allocations: number of chunks made so far.
        nbytes: total size of the present chunks.
    """

    def __init__(self) -> None:
        self._chunks: weakref.WeakValueDictionary[int, Chunk] = weakref.WeakValueDictionary()
        self._lock = forkable_lock()
        self.allocations = 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in list(self._chunks.values()))

    def place(self, buffers: Mapping[int, Buffer]) -> dict[int, tuple[Chunk, int]]:
        """Returns the memory of each buffer of a program: its chunk, and the offset there in bytes.

        The program must keep the chunks as long as it runs.

        Raises:
            RuntimeError: there is too little memory for a new chunk.
        """
        with self._lock:
            chunks = list(self._chunks.values())
            spots, needed = plan(buffers, [chunk.nbytes for chunk in chunks])
            if needed:
                chunks.append(Chunk(max(needed, LEAST_CHUNK)))
                self._chunks[self.allocations] = chunks[-1]
                self.allocations += 1
        return {number: (chunks[spot.chunk], spot.begin) for number, spot in spots.items()}


# ---- buffers that grow

# Operators that read the sizes of growing buffers when they run.
_FOLLOWING = frozenset(
    getattr(torch.ops.fastgen, name).default
    for name in ("advance_", "decode_attention_out", "kv_write", "take_beams_", "take_rows_")
)
# Smaller sizes do not identify a buffer, because many other tensors have them.
LEAST_LENGTH = 32


class Growing:
    """The buffers of a step that may grow, and the tensors through which programs use them.

    Attributes:
        lengths: the buffers' sizes in positions, and sums of them. A program must not contain these numbers elsewhere.
    """

    def __init__(self) -> None:
        self.lengths: frozenset[int] = frozenset()
        self._buffers: dict[int, Tensor] = {}  # by the address of their storage
        # Views that programs have of a buffer, whether the first two dimensions are folded, and the number of rows.
        self._views: dict[int, list[tuple[weakref.ref[Tensor], int, int]]] = {}

    def add(self, *buffers: Tensor) -> None:
        """Adds buffers to which `exchange` may give other memory."""
        for buffer in buffers:
            self._buffers[_address(buffer)] = buffer

    def exchange(self, buffer: Tensor, new: Tensor) -> None:
        """Gives `buffer`, and the views that programs have of it, the memory and the shape of `new`."""
        before = _address(buffer)
        del self._buffers[before]
        with torch._C._InferenceMode(True):  # programs make their views in this mode
            _point(buffer, new)
            views = [each for each in self._views.pop(before, ()) if each[0]() is not None]
            for view, folded, rows in views:
                _point(view(), (new.flatten(0, 1) if folded else new)[:rows])
        self._buffers[_address(buffer)] = buffer
        self._views[_address(buffer)] = views

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is the memory of one of the buffers."""
        return storage._cdata in self._buffers

    def serves(self, operations: Iterable[Operation], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether a program of these operations stays valid with larger buffers."""
        return all(self._is_free(each, storages) for each in operations)

    def touches(self, operation: Operation, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether an operation uses one of the buffers, so that no replacement of it may keep the buffer's address."""
        return any(self.has(storages[number]) for number in operation.used | operation.made)

    def note(self, view: Tensor, storage: torch.UntypedStorage) -> None:
        """Notes a program's view of this storage, which follows the buffer's memory if it belongs to one.

        The program must be one that `serves` accepts.
        """
        folded = self._folded(storage, TensorRef.of(0, view), is_whole=False)
        if folded is not None:
            self._views.setdefault(storage._cdata, []).append((weakref.ref(view), folded, view.shape[0]))

    def _is_free(self, operation: Operation, storages: Sequence[torch.UntypedStorage]) -> bool:
        for arg in (*operation.args, *operation.outputs):
            if isinstance(arg, Constant):
                if type(arg.value) is int and arg.value in self.lengths:
                    return False
            elif arg is not None and self.has(storages[arg.storage]):
                if operation.function not in _FOLLOWING or self._folded(storages[arg.storage], arg) is None:
                    return False
            elif arg is not None and self._has_length(arg):
                return False
        return True

    def _has_length(self, ref: TensorRef) -> bool:
        """Whether a size of the tensor is a length in positions, or a multiple of one."""
        return any(
            size >= length >= LEAST_LENGTH and size % length == 0 for size in ref.size for length in self.lengths
        )

    def _folded(self, storage: torch.UntypedStorage, ref: TensorRef, is_whole: bool = True) -> int | None:
        """Returns 0 if a tensor is a whole buffer, 1 if it is one with the first two dimensions folded, else None.

        Unless `is_whole`, the tensor may also consist of the first rows of these.
        """
        buffer = self._buffers.get(storage._cdata)
        if buffer is None:
            return None
        for folded, view in enumerate((buffer, buffer.flatten(0, 1))):
            size = tuple(view.shape) if is_whole else (*ref.size[:1], *view.shape[1:])
            if (ref.size, ref.stride, ref.offset) == (size, view.stride(), view.storage_offset()):
                return folded
        return None


def _address(buffer: Tensor) -> int:
    return buffer.untyped_storage()._cdata


def _point(tensor: Tensor | None, new: Tensor) -> None:
    if tensor is not None:
        tensor.set_(new.untyped_storage(), new.storage_offset(), new.shape, new.stride())
