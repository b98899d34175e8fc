"""Tensors between pages that nobody may touch: whoever reads or writes beside one ends the process.

A tensor lies at the end of some pages, with a forbidden page behind it, or at their beginning, with one in front of it.
The rest of its pages holds a pattern, so that what is written on its other side is seen, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_PATTERN = 0xA5
# Kept from draw to draw: so many regions, of so many bytes. Larger ones are made when they are needed.
_REGIONS, _REGION_BYTES = 64, 4 * _PAGE
_FORBIDDEN, _OPEN = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Region:
    def __init__(self, size: int) -> None:
        self.size = -(-max(size, 1) // _PAGE) * _PAGE
        whole = self.size + 2 * _PAGE
        start = _libc.mmap(None, whole, _FORBIDDEN, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"{whole} bytes between guard pages")
        self._start, self._whole, self.begin = start, whole, start + _PAGE
        if _libc.mprotect(self.begin, self.size, _OPEN):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.clean = bytes([_PATTERN]) * self.size
        self.first = self.last = 0  # the part in use
        ctypes.memset(self.begin, _PATTERN, self.size)

    def take(self, size: int, at_end: bool, offset: int) -> int:
        self.first = max(self.size - size - offset, 0) if at_end else offset
        self.last = self.first + size
        return self.begin + self.first

    def is_intact(self) -> bool:
        before = ctypes.string_at(self.begin, self.first)
        behind = ctypes.string_at(self.begin + self.last, self.size - self.last)
        return before == self.clean[: self.first] and behind == self.clean[self.last :]

    def clear(self) -> None:
        ctypes.memset(self.begin, _PATTERN, self.size)

    def free(self) -> None:
        _libc.munmap(self._start, self._whole)


class Memory:
    """Guarded memory for the tensors of one draw after another."""

    def __init__(self) -> None:
        self._kept = [_Region(_REGION_BYTES) for _ in range(_REGIONS)]
        self._used: list[_Region] = []
        self._large: list[_Region] = []
        self._snapshot: list[tuple[_Region, bytes]] = []
        self.random = random.Random(0)

    def bytes(self, size: int, offset: int = 0) -> Tensor:
        """`size` bytes, uint8, at an end that is drawn; `offset` bytes away from the forbidden page."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if size + offset <= _REGION_BYTES and len(self._used) < _REGIONS:
            region = self._kept[len(self._used)]
            self._used.append(region)
        else:
            region = _Region(size + offset)
            self._large.append(region)
        place = region.take(size, self.random.random() < 0.7, offset)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(place), dtype=torch.uint8)

    def tensor(self, source: Tensor, offset: int = 0) -> Tensor:
        """The same numbers with the same strides, and a storage that has no more than them."""
        if source.numel() == 0:
            return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        count = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        numbers = torch.as_strided(source, (count,), (1,), source.storage_offset())
        return self.flat(numbers, offset).as_strided(source.shape, source.stride())

    def flat(self, numbers: Tensor, offset: int = 0) -> Tensor:
        """As `tensor`, for numbers next to each other in one dimension."""
        size = numbers.numel() * numbers.element_size()
        if offset == 0:
            return self.bytes(size).copy_(numbers.view(torch.uint8)).view(numbers.dtype)
        # Numbers that are not aligned: torch makes no view of such bytes.
        place = self.bytes(size, offset).copy_(numbers.view(torch.uint8)).data_ptr()
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(place), dtype=numbers.dtype)

    def remember(self) -> None:
        """What is everywhere now, for `has_changed`."""
        self._snapshot = [(region, ctypes.string_at(region.begin, region.size)) for region in self._used + self._large]

    def has_changed(self) -> bool:
        return any(old != ctypes.string_at(region.begin, region.size) for region, old in self._snapshot)

    def is_intact(self) -> bool:
        return all(region.is_intact() for region in self._used + self._large)

    def clear(self) -> None:
        for region in self._used:
            region.clear()
        for region in self._large:
            region.free()
        self._used, self._large, self._snapshot = [], [], []


class Results:
    """Guarded memory for the tensors that operators make, while `guarding`: they ask torch's `new_empty` for it."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._is_on = memory, False
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("new_empty", self._new_empty, "CPU")
        self._library.impl("new_zeros", self._new_zeros, "CPU")

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _new_empty(self, like: Tensor, size: Sequence[int], **options: Any) -> Tensor:
        options = {"dtype": options.get("dtype") or like.dtype, "device": options.get("device") or like.device}
        if not self._is_on or options["device"].type != "cpu":
            return torch.empty(size, **options)
        numel = 1
        for each in size:
            numel *= each
        if numel < 2**24 and min(size, default=1) >= 0:
            wanted = torch.empty(size, **options)  # which refuses what is no size
            return self._memory.tensor(wanted.view(torch.uint8).fill_(_PATTERN).view(wanted.dtype)) if numel else wanted
        return torch.empty(size, **options)

    def _new_zeros(self, like: Tensor, size: Sequence[int], **options: Any) -> Tensor:
        return self._new_empty(like, size, **options).zero_()
