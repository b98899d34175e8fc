"""Weights in float32 that are numbers of 16 bits, as most checkpoints are stored: products read these 16 bits instead.

With few rows a product is bound by reading the weight, and the result is the same to the last bit
(`fastgen.ops.narrow`, `fastgen.ops.dot_linear`). The copy is made when a call needs it for the second time: a call of
one step would not gain what looking at the weight costs. A weight is read once for the copy, and once in each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import memory
from fastgen.decoding import weight_copies
from fastgen.ops import dot_linear, fingerprint, narrow

# Smaller ones stay in the processor's caches.
_LEAST_NUMBERS = 2**16
# All of these copies together take so much of the memory that would be free without them.
MOST_OF_MEMORY = 0.25
COUNTED_AS = "weights read in 16 bits"


class NarrowWeight(weight_copies.CopiedWeight):
    """A weight in float32, [outputs, inputs], and the same numbers in 16 bits."""

    looks_at = 2
    counted_as = COUNTED_AS
    _asked_in: object = None
    _most = 0.0

    def _copied(self, weight: Tensor) -> Tensor | None:
        held = sum(each.nbytes for each in self._known.values())
        return narrow.narrowed(weight) if held + weight.numel() * 2 <= self._most_bytes(held) else None

    @classmethod
    def _most_bytes(cls, held: int) -> float:
        """Of all copies, of which there are so many bytes; asked for once in each call, because that takes long."""
        if cls._asked_in is not weight_copies.now():
            cls._asked_in, cls._most = weight_copies.now(), MOST_OF_MEMORY * (memory.free_host_memory() + held)
        return cls._most

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return 0 if self._copy is None else self._copy.nbytes


_are_left_out: ContextVar[bool] = ContextVar("are_left_out", default=False)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """What is recorded inside this has no such copies: where a call reads a weight once, they would never be made."""
    token = _are_left_out.set(True)
    try:
        yield
    finally:
        _are_left_out.reset(token)


def type_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The type of 16 bits that the numbers of a weight seem to be of, where products can read them; None otherwise.

    x is [rows, inputs], the weight [outputs, inputs], the bias [outputs] or None.
    """
    if _are_left_out.get() or x.dtype is not torch.float32 or not dot_linear.serves(x, weight, bias):
        return None
    if not (x.stride(1) == 1 and weight.is_contiguous() and weight.numel() >= _LEAST_NUMBERS):
        return None
    if not (narrow.is_available() and fingerprint.is_available()):
        return None
    return next(iter(narrow.types_of_some(weight)), None)


class NarrowProduct(NamedTuple):
    """A product of which the weight may have a copy; what it does without one, `wide`, is none of these."""

    wide: Any
    result: Tensor
    x: Tensor
    weight: NarrowWeight
    of: Tensor  # the weight itself
    bias: Tensor | None


class NarrowProducts:
    """Products with one input, of which none reads what another one writes, as one call.

    Args:
        wide: what does the same without copies.
    """

    def __init__(self, products: Sequence[NarrowProduct], wide: Sequence[Callable[[], object]]) -> None:
        _, self._results, xs, self._weights, self._of, self._biases = map(list, zip(*products, strict=True))
        self._x, self._wide = xs[0], wide

    def linears(self) -> None:
        """Writes the results."""
        copies = [weight.copy() for weight in self._weights]
        if all(copy is None for copy in copies):
            for call in self._wide:
                call()
            return
        weights = [of if copy is None else copy for of, copy in zip(self._of, copies, strict=True)]
        torch.ops.fastgen.dot_linears_out.default(self._results, self._x, weights, self._biases)
