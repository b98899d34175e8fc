"""Weights in float32 for which 16 bits stand exactly: products read these instead.

Most checkpoints are stored in 16 bits. With few rows a product is bound by reading the weight. A copy in panels serves
more rows, too (`NarrowPanels`, `fastgen.ops.narrow_linear`). The copy is made when a call needs it for the second time:
a call of one step would not gain what looking at the weight costs. A weight is read once for the copy, and once in each
call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import memory
from fastgen.decoding import weight_copies
from fastgen.interrupts import undoing
from fastgen.ops import _plan, fingerprint, narrow, narrow_linear

# Smaller ones stay in the processor's caches.
_LEAST_NUMBERS = 2**16
# All of these copies together take so much of the memory that would be free without them.
MOST_OF_MEMORY = 0.25
COUNTED_AS = "weights read in fewer bits"


class NarrowWeight(weight_copies.CopiedWeight):
    """A weight in float32, [outputs, inputs], and the same numbers in 16 bits; one of the two classes below."""

    looks_at = 2
    counted_as = COUNTED_AS
    _asked_in: object = None
    _most = 0.0

    def _copied(self, weight: Tensor) -> Tensor | None:
        held = sum(each.nbytes for kind in (NarrowLines, NarrowPanels) for each in kind._known.values())
        return self._narrowed(weight) if held + weight.numel() * 2 <= self._most_bytes(held) else None

    def _narrowed(self, weight: Tensor) -> Tensor | None:
        """The copy; None where its numbers would not be those of the weight."""
        raise NotImplementedError

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
    """The copy, in 16 bits, is laid out as the weight. Products have the bits of dot products with the weight."""

    multiply = torch.ops.fastgen.dot_linears_out.default

    def _narrowed(self, weight: Tensor) -> Tensor | None:
        return narrow.narrowed(weight)


class NarrowPanels(NarrowWeight):
    """The copy is packed. Products have the bits of packed and streamed products, whatever the number of rows."""

    multiply = torch.ops.fastgen.narrow_linears_out.default

    def _narrowed(self, weight: Tensor) -> Tensor | None:
        lines = narrow.narrowed(weight)
        return None if lines is None else narrow_linear.pack(lines)


_is_suspended: ContextVar[bool] = ContextVar("fastgen_low_bit_copies_suspended", default=False)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """What is recorded inside this has no such copies: where a call reads a weight once, they would never be made."""
    with undoing(partial(_is_suspended.set, _is_suspended.get())):
        _is_suspended.set(True)
        yield


def type_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The type of 16 bits of a weight's numbers, where products can read it; by a few of its numbers.

    x is [rows, inputs], the weight [outputs, inputs], the bias [outputs] or None.
    """
    if _is_suspended.get() or not narrow_linear.serves(x, weight, bias) or weight.numel() < _LEAST_NUMBERS:
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


class NarrowProducts(NamedTuple):
    """Products with one input and one kind of copy, of which none reads what another one writes."""

    products: Sequence[NarrowProduct]
    wide: Sequence[Callable[[], object]]  # what does the same without copies, all together
    each: Sequence[Callable[[], object]]  # and one by one

    def calls(self, copies: Sequence[Tensor | None]) -> Sequence[Callable[[], object]]:
        """Those that write the results, with a copy of each weight or None."""
        found = [(product.result, copy, product.bias) for product, copy in zip(self.products, copies, strict=True)]
        narrow = [each for each in found if each[1] is not None]
        if not narrow:
            return self.wide
        results, weights, biases = map(list, zip(*narrow, strict=True))
        first = self.products[0]
        several = partial(first.weight.multiply, results, first.x, weights, biases)
        return [several, *(call for call, copy in zip(self.each, copies, strict=True) if copy is None)]


class _Chosen(NamedTuple):
    """The calls of a program with some copies: one by one, and with plans in the place of several."""

    copies: Sequence[Tensor | None]  # of all weights, in order
    calls: Sequence[Callable[[], object]]
    planned: Sequence[Callable[[], object]]


class Calls:
    """The calls of a program, with those products that read copies of their weights while there are such.

    Args:
        calls: in their order.
    """

    def __init__(self, calls: Sequence[Callable[[], object] | NarrowProducts] = ()) -> None:
        self._calls = calls
        narrow = (each for each in calls if isinstance(each, NarrowProducts))
        self._weights = [product.weight for each in narrow for product in each.products]
        self._wide = self._now = self._with([None] * len(self._weights))
        self._narrow: _Chosen | None = None  # with the copies that there are
        self._settled_in: object = None  # the call in which they do not change any more

    def now(self, planned: bool) -> Sequence[Callable[[], object]]:
        """Those of this step: one by one, or with plans in the place of several (`fastgen.ops._plan`)."""
        if self._weights:
            call = weight_copies.now()
            if call.others_ran or self._settled_in is not call:
                copies = {weight: weight.copy() for weight in dict.fromkeys(self._weights)}  # each asked once in a step
                self._now = self._choose([copies[weight] for weight in self._weights])
                self._settled_in = call if all(weight.is_settled for weight in self._weights) else None
        return self._now.planned if planned else self._now.calls

    def _choose(self, copies: Sequence[Tensor | None]) -> _Chosen:
        # The first step of a call reads none or a part of them. What the others read is kept, and planned once.
        held = [weight.held for weight in self._weights]
        if self._narrow is not None and not _are_same(self._narrow.copies, held):
            self._narrow = None
        if all(copy is None for copy in copies):
            return self._wide
        if not _are_same(copies, held):
            return self._with(copies)
        if self._narrow is None or not _are_same(self._narrow.copies, copies):
            self._narrow = self._with(copies)
        return self._narrow

    def _with(self, copies: Sequence[Tensor | None]) -> _Chosen:
        calls: list[Callable[[], object]] = []
        left = iter(copies)
        for each in self._calls:
            is_narrow = isinstance(each, NarrowProducts)
            calls += each.calls(list(itertools.islice(left, len(each.products)))) if is_narrow else [each]
        return _Chosen(copies, calls, _plan.planned(calls))


def _are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(map(operator.is_, some, others))
