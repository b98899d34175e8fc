"""Weights in float32 for which 16 bits stand exactly: captured steps read these instead, packed in panels.

Most checkpoints are stored in 16 bits. With few rows a product is bound by reading the weight. The copy
(`fastgen.ops.linear.panels`) is made when a call needs it for the second time: a call of one step would not gain what
looking at the weight costs. A weight is read once for the copy, and once in each call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fastgen import memory
from fastgen.decoding import weight_copies
from fastgen.interrupts import undoing
from fastgen.ops import _plan, fingerprint, narrow
from fastgen.ops.linear import choose, panels

# Smaller ones stay in the processor's caches.
_LEAST_NUMBERS = 2**16
# All of these copies together take so much of the memory that would be free without them.
MOST_OF_MEMORY = 0.25
COUNTED_AS = "weights read in fewer bits"


class PanelCopy(weight_copies.CopiedWeight):
    """A weight in float32, [N, K], and the same numbers in 16 bits, packed in panels.

    Products with the copy have the bits of GEMM with the weight, whatever the number of rows.
    """

    looks_at = 2
    counted_as = COUNTED_AS
    multiply = torch.ops.fastgen.panels_gemm_batch_out.default
    _asked_in: ClassVar[object] = None
    _most: ClassVar[float] = 0.0

    def _copied(self, weight: Tensor) -> Tensor | None:
        held = sum(each.nbytes for each in PanelCopy._known.values())
        if held + weight.numel() * 2 > self._most_bytes(held):
            return None
        halves = narrow.narrowed(weight)
        return None if halves is None else panels.pack(halves)

    @staticmethod
    def _most_bytes(held: int) -> float:
        """Of all copies, of which there are so many bytes; asked for once in each call, because that takes long."""
        if PanelCopy._asked_in is not weight_copies.now():
            PanelCopy._asked_in = weight_copies.now()
            PanelCopy._most = MOST_OF_MEMORY * (memory.free_host_memory() + held)
        return PanelCopy._most

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return 0 if self._copy is None else self._copy.nbytes


_is_suspended: ContextVar[bool] = ContextVar("fastgen_low_bit_copies_suspended", default=False)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """What is recorded inside this has no such copies: where a call reads a weight once, they would never be made."""
    with undoing(partial(_is_suspended.set, _is_suspended.get())):
        _is_suspended.set(True)
        yield


def has_panels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether such an op reads a weight whose numbers are all numbers of 16 bits from panels; by a few of them.

    x is [M, K], the weight [N, K], the bias [N] or None.
    """
    if _is_suspended.get() or weight.numel() < _LEAST_NUMBERS or not panels.serves(x, weight, bias):
        return False
    if not (choose.reads_panels(x.shape[0]) and narrow.is_available() and fingerprint.is_available()):
        return False
    return bool(narrow.types_of_some(weight))


class PanelOp(NamedTuple):
    """A linear op of which the weight may have a copy; without one, it is `unpacked`, which has the same bits."""

    unpacked: Any
    result: Tensor
    x: Tensor
    weight: PanelCopy
    bias: Tensor | None


class PanelOps(NamedTuple):
    """Those of one input, of which none reads what another one writes."""

    ops: Sequence[PanelOp]
    unpacked: Sequence[Callable[[], object]]  # what does the same without copies, all together
    each: Sequence[Callable[[], object]]  # and one by one

    def calls(self, copies: Sequence[Tensor | None]) -> Sequence[Callable[[], object]]:
        """Those that write the results, with a copy of each weight or None."""
        found = [(op.result, copy, op.bias) for op, copy in zip(self.ops, copies, strict=True)]
        packed = [each for each in found if each[1] is not None]
        if not packed:
            return self.unpacked
        results, weights, biases = map(list, zip(*packed, strict=True))
        first = self.ops[0]
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

    def __init__(self, calls: Sequence[Callable[[], object] | PanelOps] = ()) -> None:
        self._calls = calls
        of_panels = (each for each in calls if isinstance(each, PanelOps))
        self._weights = [op.weight for each in of_panels for op in each.ops]
        self._unpacked = self._now = self._with([None] * len(self._weights))
        self._packed: _Chosen | None = None  # with the copies that there are
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
        if self._packed is not None and not _are_same(self._packed.copies, held):
            self._packed = None
        if all(copy is None for copy in copies):
            return self._unpacked
        if not _are_same(copies, held):
            return self._with(copies)
        if self._packed is None or not _are_same(self._packed.copies, copies):
            self._packed = self._with(copies)
        return self._packed

    def _with(self, copies: Sequence[Tensor | None]) -> _Chosen:
        calls: list[Callable[[], object]] = []
        left = iter(copies)
        for each in self._calls:
            if isinstance(each, PanelOps):
                calls += each.calls(list(itertools.islice(left, len(each.ops))))
            else:
                calls.append(each)
        return _Chosen(copies, calls, _plan.planned(calls))


def _are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(map(operator.is_, some, others))
