"""Linear ops of captured steps that read a float32 weight from a 16-bit copy, packed in panels.

Most checkpoints are stored in 16 bits, and with few rows a product is bound by reading the weight. The results equal
GEMM with the weight bit for bit, for any number of rows. `fastgen.decoding.weights` decides when there is a copy.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fastgen.decoding.weights import cache, formats
from fastgen.interrupts import undoing
from fastgen.ops import runtime

_is_suspended: ContextVar[bool] = ContextVar("fastgen_panels_suspended", default=False)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Prevents such ops in recordings made inside: if a call reads a weight once, a copy would never be made."""
    with undoing(partial(_is_suspended.set, _is_suspended.get())):
        _is_suspended.set(True)
        yield


def has_panels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether such an op reads its weight from panels: x is [M, K], the weight [N, K], the bias [N] or None."""
    return not _is_suspended.get() and formats.has_panels(x, weight, bias)


class PanelOp(NamedTuple):
    """A linear op whose weight may have a copy. Without one, `unpacked` replaces it, with the same bits."""

    unpacked: Any
    result: Tensor
    x: Tensor
    weight: cache.DerivedWeight
    bias: Tensor | None


class PanelOps(NamedTuple):
    """Panel ops of one input, none of which reads what another one writes."""

    ops: Sequence[PanelOp]
    unpacked: Sequence[Callable[[], object]]  # the calls without copies, batched
    each: Sequence[Callable[[], object]]  # the calls without copies, one by one

    def calls(self, copies: Sequence[Tensor | None]) -> Sequence[Callable[[], object]]:
        """Returns the calls that write the results, given a copy of each weight or None."""
        found = [(op.result, copy, op.bias) for op, copy in zip(self.ops, copies, strict=True)]
        packed = [each for each in found if each[1] is not None]
        if not packed:
            return self.unpacked
        results, weights, biases = map(list, zip(*packed, strict=True))
        several = partial(formats.multiply_panels, results, self.ops[0].x, weights, biases)
        return [several, *(call for call, copy in zip(self.each, copies, strict=True) if copy is None)]


class _Chosen(NamedTuple):
    """The calls of a program with some copies: one by one, and in command lists."""

    copies: Sequence[Tensor | None]  # of all weights, in order
    calls: Sequence[Callable[[], object]]
    in_lists: Sequence[Callable[[], object]]


class Calls:
    """The calls of a program, whose products read copies of their weights while these exist.

    Args:
        calls: in order.
    """

    def __init__(self, calls: Sequence[Callable[[], object] | PanelOps] = ()) -> None:
        self._calls = calls
        of_panels = (each for each in calls if isinstance(each, PanelOps))
        self._weights = [op.weight for each in of_panels for op in each.ops]
        self._unpacked = self._now = self._with([None] * len(self._weights))
        self._packed: _Chosen | None = None  # with all copies that exist
        self._validated_in: object = None  # the call in which the copies do not change any more
        for weight in self._weights:
            weight.tell(self)

    def forget(self) -> None:
        """Drops all references to copies, because one is gone."""
        self._now, self._packed, self._validated_in = self._unpacked, None, None

    def now(self, in_lists: bool) -> Sequence[Callable[[], object]]:
        """Returns the calls of this step: one by one, or in command lists (`fastgen.ops.runtime`)."""
        chosen = self._now  # read once: `forget` may come from another thread
        if self._weights:
            call = cache.current_call()
            if call.third_party_ran or self._validated_in is not call:
                copies = {weight: weight.in_step() for weight in dict.fromkeys(self._weights)}  # each once in a step
                chosen = self._now = self._choose([copies[weight] for weight in self._weights])
                self._validated_in = call if all(weight.is_validated for weight in self._weights) else None
        return chosen.in_lists if in_lists else chosen.calls

    def _choose(self, copies: Sequence[Tensor | None]) -> _Chosen:
        if all(copy is None for copy in copies):
            return self._unpacked
        # The first step of a call reads no copies, or only some. The calls of later steps are kept.
        if not _are_same(copies, [weight.copy for weight in self._weights]):
            return self._with(copies)
        packed = self._packed
        if packed is None or not _are_same(packed.copies, copies):
            packed = self._packed = self._with(copies)
        return packed

    def _with(self, copies: Sequence[Tensor | None]) -> _Chosen:
        calls: list[Callable[[], object]] = []
        left = iter(copies)
        for each in self._calls:
            if isinstance(each, PanelOps):
                calls += each.calls(list(itertools.islice(left, len(each.ops))))
            else:
                calls.append(each)
        return _Chosen(copies, calls, runtime.with_command_lists(calls))


def _are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(map(operator.is_, some, others))
