"""Memory of recorded programs: planned ahead from the lifetimes of results, in chunks that programs share.

Once a program has been recorded, it is known when each result is made and when it is read for the last time. So a run
allocates no memory for results, and results that are not in use at the same time share memory.

The plan is that of TurboTransformers (Fang et al., "TurboTransformers: An Efficient GPU Serving System For Transformer
Models", PPoPP 2021, Algorithm 1) with one change. There, each result that fits nowhere gets a chunk of 1.2 times its
size. Here, all such results share one new chunk of exactly the size that they need.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fastgen.interrupts import forkable_lock

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
