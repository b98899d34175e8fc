"""Weights in float32 that are numbers of 16 bits, as most checkpoints are stored: products read these 16 bits instead.

With few rows a product is bound by reading the weight. A copy in panels serves more rows, too (`NarrowPanels`,
`fastgen.ops.narrow_linear`). The copy is made when a call needs it for the second time: a call of one step would not
gain what looking at the weight costs. A weight is read once for the copy, and once in each call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import memory
from fastgen.decoding import weight_copies
from fastgen.ops import fingerprint, narrow, narrow_linear

# Smaller ones stay in the processor's caches.
_LEAST_NUMBERS = 2**16
# All of these copies together take so much of the memory that would be free without them.
MOST_OF_MEMORY = 0.25
COUNTED_AS = "weights read in 16 bits"


class NarrowWeight(weight_copies.CopiedWeight):
    """A weight in float32, [outputs, inputs], and the same numbers in 16 bits; one of the two classes below."""

    looks_at = 2
    counted_as = COUNTED_AS
    _asked_in: object = None
    _most = 0.0

    def _copied(self, weight: Tensor) -> Tensor | None:
        held = sum(each.nbytes for kind in (NarrowLines, NarrowPanels) for each in kind._known.values())
        return narrow.narrowed(weight) if held + weight.numel() * 2 <= self._most_bytes(held) else None

    @staticmethod
    def _most_bytes(held: int) -> float:
        """Of all copies, of which there are so many bytes; asked for once in each call, because that takes long."""
        of = NarrowWeight
        if of._asked_in is not weight_copies.now():
            of._asked_in, of._most = weight_copies.now(), MOST_OF_MEMORY * (memory.free_host_memory() + held)
        return of._most

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return 0 if self._copy is None else self._copy.nbytes


class NarrowLines(NarrowWeight):
    """The copy is laid out as the weight is. Products have the bits of dot products with the weight itself."""

    multiply = torch.ops.fastgen.dot_linears_out.default


class NarrowPanels(NarrowWeight):
    """The copy is packed. Products have the bits of packed and streamed products, whatever the number of rows."""

    multiply = torch.ops.fastgen.narrow_linears_out.default

    def _copied(self, weight: Tensor) -> Tensor | None:
        lines = super()._copied(weight)
        return None if lines is None else narrow_linear.pack(lines)


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
    if _are_left_out.get() or not narrow_linear.serves(x, weight, bias) or weight.numel() < _LEAST_NUMBERS:
        return None
    if not (narrow.is_available() and fingerprint.is_available()):
        return None
    return next(iter(narrow.types_of_some(weight)), None)


class NarrowProduct(NamedTuple):
    """A product of which the weight may have a copy; what it does without one, `wide`, is none of these."""

    wide: Any
    result: Tensor
    x: Tensor
    weight: NarrowLines | NarrowPanels
    bias: Tensor | None


class NarrowProducts:
    """Products with one input and one kind of copy, of which none reads what another one writes, as one call.

    Args:
        wide: what does the same without copies, all together.
        each: and one by one.
    """

    def __init__(
        self,
        products: Sequence[NarrowProduct],
        wide: Sequence[Callable[[], object]],
        each: Sequence[Callable[[], object]],
    ) -> None:
        self._products, self._wide, self._each = products, wide, each
        self._copies: list[Tensor | None] = [None] * len(products)
        self._calls = wide  # with these copies

    def linears(self) -> None:
        """Writes the results."""
        copies = [product.weight.copy() for product in self._products]
        if not all(map(operator.is_, copies, self._copies)):
            self._copies, self._calls = copies, self._calls_with(copies)
        for call in self._calls:
            call()

    def _calls_with(self, copies: list[Tensor | None]) -> Sequence[Callable[[], object]]:
        found = [(product.result, copy, product.bias) for product, copy in zip(self._products, copies, strict=True)]
        narrow = [each for each in found if each[1] is not None]
        if not narrow:
            return self._wide
        results, weights, biases = map(list, zip(*narrow, strict=True))
        first = self._products[0]
        several = partial(first.weight.multiply, results, first.x, weights, biases)
        return [several, *(call for call, copy in zip(self._each, copies, strict=True) if copy is None)]
