"""Reuses freed host memory, instead of returning it to the system, while a model generates on the CPU.

Linux's C library returns a large freed block to the system. The kernel then clears and maps every page of the next
block when it is first touched, which takes longer than a layer takes to fill it. `kept` has the library keep freed
memory through two parameters of its `malloc` (`mallopt(3)`), which apply to the process. Afterwards, the parameters
have the values that the library itself sets once a block of 32 MiB has been freed, as in programs with large tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

from fastgen import settings
from fastgen.interrupts import undoing

# Parameters of mallopt, and their values afterwards: the largest that the library reaches by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_AFTERWARDS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _MMAP_MAX: 2**16}
_NEVER = -1
# Environment variables with which the user may have set them.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
# Calls that leave less behind are not worth looking for memory to return.
_MIN_TRIMMED = 2**26
# Smaller tensors of zeros are made by torch.
_MIN_MAPPED = 2**20


class _Pages(mmap.mmap):
    """Memory of the system, which lives as long as the tensors on it."""


_mapped: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()  # by address

_inside = False
_left_behind = 0  # bytes that calls have left behind since the last trim


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Inside this, freed host memory is reused, if the model's device is a CPU.

    At the end the system gets back free memory, unless `Settings.packed_weights` is "keep".
    """
    global _inside
    # The library serves other threads from arenas of 64 MiB, to which these parameters do not apply.
    in_main_thread = threading.current_thread() is threading.main_thread()
    library = _library()
    if device.type != "cpu" or _inside or not in_main_thread or unavailable() is not None or library is None:
        yield
        return
    with undoing(functools.partial(_let_go, library, _resident())):
        _inside = True
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        yield


def _let_go(library: ctypes.CDLL, held_before: int) -> None:
    """Lets freed memory return to the system as usual, and returns what calls have left behind."""
    global _inside, _left_behind
    _inside = False
    for parameter, value in _AFTERWARDS.items():
        library.mallopt(parameter, value)
    if settings.current().packed_weights != "keep":
        _left_behind += max(_resident() - held_before, 0)
        if _left_behind > _MIN_TRIMMED:
            _left_behind = 0
            library.malloc_trim(ctypes.c_size_t(0))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of zeros. On a CPU, a large one only takes memory for pages that are written to.

    It is not part of the C library's memory, so the system gets it back as soon as it is freed.

    Raises:
        MemoryError: the system has too little memory; for a small tensor, or on another device, torch's own error.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _MIN_MAPPED:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = _Pages(-1, size, **private)
    except OSError as error:
        raise MemoryError(f"cannot allocate memory: {size} bytes ({error.strerror})") from error
    tensor = torch.frombuffer(pages, dtype=dtype).view(*shape)
    _mapped[tensor.data_ptr()] = pages
    return tensor


def give_back(tensor: torch.Tensor, first: int = 0, count: int | None = None) -> bool:
    """Returns the memory of a tensor made by `zeros` to the system, which zeroes the tensor.

    The tensor keeps its address, and takes memory again for pages that are written to.

    Args:
        first, count: the rows, in a contiguous tensor; by default all.

    Returns:
        whether memory was returned. It is not if torch made the tensor, or the system cannot.
    """
    row = tensor.stride(0) * tensor.itemsize
    begin, end = first * row, tensor.nbytes if count is None else (first + count) * row
    # Whole pages are returned; pages shared with other rows are zeroed by writing.
    inner, behind = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if inner >= behind or not _give_back(tensor, inner, behind):
        return False
    numbers = tensor.view(-1)
    numbers[begin // tensor.itemsize : inner // tensor.itemsize].zero_()
    numbers[behind // tensor.itemsize : end // tensor.itemsize].zero_()
    return True


def _give_back(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """Returns these bytes of a tensor, whole pages, to the system. Returns whether it could."""
    pages = _mapped.get(tensor.data_ptr()) if tensor.device.type == "cpu" else None
    # On other systems, the advice may leave the contents unchanged.
    if pages is None or len(pages) != tensor.nbytes or sys.platform != "linux":
        return False
    try:
        pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)
    except OSError:  # the process has locked its memory
        return False
    return True


def backend() -> str:
    """Returns whether memory is kept in this process, for `fastgen.status()`."""
    return unavailable() or "kept by the C library during a call"


@functools.cache
def unavailable() -> str | None:
    """Returns why memory is not kept in this process; None if it is."""
    if _library() is None:
        return "left as it is: only with the C library of GNU, and /proc"
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return "left as it is: malloc is tuned by environment variables"
    return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Returns the C library, if its `malloc` is known, and the memory of the process can be read."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc") or not _resident():
            return None
        library = ctypes.CDLL(None)
        library.mallopt, library.malloc_trim  # noqa: B018 (raises where they are not there)
    except (AttributeError, ValueError, OSError):
        return None
    return library


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
