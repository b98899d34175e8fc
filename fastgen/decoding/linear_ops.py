"""Linear ops of a captured step: what a recorded product becomes, and batching of products with one input.

`fastgen.ops.linear.choose` chooses the kernel. A panel op reads a float32 weight from a 16-bit copy, packed in panels,
while there is one (`fastgen.decoding.derived_weights` decides): most checkpoints are stored in 16 bits, and with few
rows a product is bound by reading the weight. Its results equal GEMM with the weight bit for bit, for any number of
rows.
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

from fastgen import settings
from fastgen.decoding import derived_weights
from fastgen.decoding.recorded_graph import PRODUCTS, Operation, TensorRef
from fastgen.interrupts import undoing
from fastgen.ops import runtime
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import GEMM, GROUPED, PANEL_GEMM, Kernel
from fastgen.ops.linear.weights import PackedWeight

_is_suspended: ContextVar[bool] = ContextVar("fastgen_panels_suspended", default=False)


class LinearOp(NamedTuple):
    """A linear op with one of FastGen's kernels, which writes to a preallocated result.

    Attributes:
        parts: the tensors of the weight.
        shared, sizes: further arguments, as in `Kernel`.
    """

    kernel: Kernel
    result: Tensor
    x: Tensor
    parts: tuple[Tensor | None, ...]
    bias: Tensor | None
    shared: tuple[Any, ...] = ()
    sizes: tuple[Any, ...] = ()


class PanelOp(NamedTuple):
    """A linear op whose weight may have a copy. Without one, `unpacked` replaces it, with the same bits."""

    unpacked: LinearOp
    weight: derived_weights.DerivedWeight

    def reading(self, copy: Tensor) -> LinearOp:
        """Returns the op that reads this copy."""
        return self.unpacked._replace(kernel=PANEL_GEMM, parts=(copy,))


class PanelOps(NamedTuple):
    """Panel ops of one input, none of which reads what another one writes."""

    ops: Sequence[PanelOp]
    unpacked: Sequence[Callable[[], object]]  # the calls without copies

    def calls(self, copies: Sequence[PackedWeight | None]) -> Sequence[Callable[[], object]]:
        """Returns the calls that write the results, given a copy of each weight or None. All are read, or none."""
        packed = [copy.qweight for copy in copies if copy is not None]
        if len(packed) < len(copies):
            return self.unpacked
        return [call_of([op.reading(copy) for op, copy in zip(self.ops, packed, strict=True)])]


AnyLinearOp = LinearOp | PanelOp


def input_of(operation: Operation) -> Any:
    """Returns where the input of a linear op lies; None for any other operator."""
    if operation.function in PRODUCTS:
        return operation.args[-2]
    return operation.args[0] if operation.function is GROUPED.product else None


def of(operation: Operation, args: Sequence[Any], result: Tensor, written: frozenset[int]) -> AnyLinearOp | None:
    """Returns the linear op of a recorded product, which writes to `result`; None for any other operator, or a product
    that stays torch's.

    Args:
        args: the operator's arguments.
        written: storages that the recording writes to: a weight in one of these changes from step to step.
    """
    if operation.function is GROUPED.product:
        x, *parts, order, bias, _, bits, group_size, rotated, floats = args
        return LinearOp(GROUPED, result, x, tuple(parts), bias, (order,), (bits, group_size, rotated, floats))
    if operation.function not in PRODUCTS:
        return None
    x, weight, bias = args[-2], args[-1].t(), args[0] if len(args) == 3 else None
    op, ref = linear_op(result, x, weight, bias), operation.args[-1]
    if op is None or not isinstance(ref, TensorRef) or ref.storage in written or not has_panels(x, weight, bias):
        return op
    # GEMM has the same bits as panels, so it replaces them while there is no copy.
    return PanelOp(op._replace(kernel=GEMM), derived_weights.of(weight, derived_weights.PANELS))


def linear_op(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearOp | None:
    """Returns the op of a kernel of FastGen's, if one serves: x is [M, K], the weight [N, K], the result [M, N]."""
    if settings.current().packed_weights == "never":  # the user asks for torch's own products
        return None
    if x.stride(1) != 1:
        return None
    kernel = choose.kernel_for(x, weight, bias)
    return None if kernel is None else LinearOp(kernel, result, x, (weight,), bias)


def batched(ops: Sequence[Any]) -> list[Callable[[], object] | PanelOps]:
    """Returns calls of linear ops with one input, none of which reads what another one writes; others unchanged."""
    groups: dict[Any, list[Any]] = {}
    for number, op in enumerate(ops):
        groups.setdefault(_batch_key(op) or number, []).append(op)
    return list(map(_batch, groups.values()))


def _batch_key(op: Any) -> Any:
    """Returns a key that is equal for ops that can share a call; None for an op that cannot share one."""
    if isinstance(op, PanelOp):
        return PanelOp
    if not isinstance(op, LinearOp) or op.kernel.several is None or any(each is not None for each in op.shared):
        return None
    weight = op.parts[0]
    assert weight is not None
    return (op.kernel.name, weight.stride(1), *op.sizes)


def _batch(ops: Sequence[Any]) -> Any:
    """Returns the call of one op, or of several with equal keys; anything else unchanged."""
    if isinstance(ops[0], PanelOp):
        unpacked: list[Any] = batched([op.unpacked for op in ops])  # none of these has panels
        return PanelOps(ops, unpacked)
    return call_of(ops) if isinstance(ops[0], LinearOp) else ops[0]


def call_of(ops: Sequence[LinearOp]) -> Callable[[], object]:
    """Returns the call of one op, or of several with equal keys."""
    first = ops[0]
    kernel, _, x, parts, bias, shared, sizes = first
    if len(ops) == 1 and kernel.out is not None:
        return partial(kernel.out, first.result, x, *parts, *shared, bias, *sizes)
    lists = [list(part) for part in zip(*(op.parts for op in ops), strict=True)]
    return partial(kernel.several, [op.result for op in ops], x, *lists, *shared, [op.bias for op in ops], *sizes)


@contextlib.contextmanager
def panels_suspended() -> Iterator[None]:
    """Prevents panel ops in recordings made inside: if a call reads a weight once, a copy would never be made."""
    with undoing(partial(_is_suspended.set, _is_suspended.get())):
        _is_suspended.set(True)
        yield


def has_panels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a linear op reads its weight from panels: x is [M, K], the weight [N, K], the bias [N] or None."""
    return not _is_suspended.get() and derived_weights.has_panels(x, weight, bias)


class _Chosen(NamedTuple):
    """The calls of a program with some copies: one by one, and in command lists."""

    copies: Sequence[PackedWeight | None]  # of all weights, in order
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
        self._packed: _Chosen | None = None  # with the copies that were read last
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
            call = derived_weights.current_call()
            if call.third_party_ran or self._validated_in is not call:
                copies = {weight: weight.in_step() for weight in dict.fromkeys(self._weights)}  # each once in a step
                chosen = self._now = self._choose([copies[weight] for weight in self._weights])
                self._validated_in = call if all(weight.is_validated for weight in self._weights) else None
        return chosen.in_lists if in_lists else chosen.calls

    def _choose(self, copies: Sequence[PackedWeight | None]) -> _Chosen:
        for known in (self._unpacked, self._packed):
            if known is not None and all(map(operator.is_, known.copies, copies)):
                return known
        self._packed = self._with(copies)
        return self._packed

    def _with(self, copies: Sequence[PackedWeight | None]) -> _Chosen:
        calls: list[Callable[[], object]] = []
        left = iter(copies)
        for each in self._calls:
            if isinstance(each, PanelOps):
                calls += each.calls(list(itertools.islice(left, len(each.ops))))
            else:
                calls.append(each)
        return _Chosen(copies, calls, runtime.with_command_lists(calls))
