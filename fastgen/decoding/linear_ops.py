"""Linear ops of a captured step: what a recorded product becomes, and batching of products with one input.

`fastgen.ops.linear.choose` chooses the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import settings
from fastgen.decoding import derived_weights
from fastgen.decoding.operations import PRODUCTS, Operation, TensorRef
from fastgen.decoding.panel_ops import PanelOp, PanelOps, has_panels
from fastgen.ops.linear import choose, grouped
from fastgen.ops.linear.choose import GEMM, Kernel

_GROUPED = grouped.OPERATOR


class LinearOp(NamedTuple):
    """A linear op with one of FastGen's kernels, which writes to a preallocated result."""

    kernel: Kernel
    result: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


class GroupedLinearOp(NamedTuple):
    """A linear op on a group-quantised weight."""

    result: Tensor
    x: Tensor
    parts: tuple[Tensor | None, ...]  # quantised values, scales, zero points, mins
    order: Tensor | None
    bias: Tensor | None
    sizes: tuple[int, int, bool, bool]  # bits, group size, whether groups are rotated, whether activations stay floats


AnyLinearOp = LinearOp | GroupedLinearOp | PanelOp


def input_of(operation: Operation) -> Any:
    """Returns where the input of a linear op lies; None for any other operator."""
    if operation.function in PRODUCTS:
        return operation.args[-2]
    return operation.args[0] if operation.function is _GROUPED else None


def of(operation: Operation, args: Sequence[Any], result: Tensor, written: frozenset[int]) -> AnyLinearOp | None:
    """Returns the linear op of a recorded product, which writes to `result`; None for any other operator, or a product
    that stays torch's.

    Args:
        args: the operator's arguments.
        written: storages that the recording writes to: a weight in one of these changes from step to step.
    """
    if operation.function is _GROUPED:
        x, *parts, order, bias, _, bits, group_size, rotated, floats = args
        return GroupedLinearOp(result, x, tuple(parts), order, bias, (bits, group_size, rotated, floats))
    if operation.function not in PRODUCTS:
        return None
    x, weight, bias = args[-2], args[-1].t(), args[0] if len(args) == 3 else None
    op, ref = linear_op(result, x, weight, bias), operation.args[-1]
    if op is None or not isinstance(ref, TensorRef) or ref.storage in written or not has_panels(x, weight, bias):
        return op
    # GEMM has the same bits as panels, so it replaces them while there is no copy.
    return PanelOp(op._replace(kernel=GEMM), result, x, derived_weights.of(weight, derived_weights.PANELS), bias)


def linear_op(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearOp | None:
    """Returns the op of a kernel of FastGen's, if one serves: x is [M, K], the weight [N, K], the result [M, N]."""
    if settings.current().packed_weights == "never":  # the user asks for torch's own products
        return None
    if x.stride(1) != 1:
        return None
    kernel = choose.kernel_for(x, weight, bias)
    return None if kernel is None else LinearOp(kernel, result, x, weight, bias)


def batched(ops: Sequence[Any]) -> list[Callable[[], object] | PanelOps]:
    """Returns calls of linear ops with one input, none of which reads what another one writes; others unchanged."""
    panels = [op for op in ops if isinstance(op, PanelOp)]
    if panels:
        rest = [op for op in ops if not isinstance(op, PanelOp)]
        unpacked = [op.unpacked for op in panels]
        of_weights: list[Any] = batched(unpacked)  # none of these has panels
        return [PanelOps(panels, of_weights, [single(op) for op in unpacked]), *batched(rest)]
    for key in filter(None, map(_batch_key, ops)):
        same = [op for op in ops if _batch_key(op) == key]
        if len(same) > 1:
            rest = [op for op in ops if not any(op is each for each in same)]
            return [_batch(same), *batched(rest)]
    return [single(op) for op in ops]


def _batch_key(op: Any) -> Any:
    """Returns a key that is equal for ops that can share a call; None for an op that cannot share one."""
    if isinstance(op, GroupedLinearOp):
        return (_GROUPED, *op.sizes) if op.order is None else None
    is_known = isinstance(op, LinearOp) and op.kernel.several is not None
    return (op.kernel.name, op.weight.stride(1)) if is_known else None


def _batch(ops: Sequence[Any]) -> Callable[[], object]:
    """Returns the call of several ops with equal keys."""
    first, columns = ops[0], list(map(list, zip(*ops, strict=True)))
    if isinstance(first, GroupedLinearOp):
        results, _, parts, _, biases, _ = columns
        lists = [list(part) for part in zip(*parts, strict=True)]
        operator = torch.ops.fastgen.grouped_linear_batch_out.default
        return partial(operator, results, first.x, *lists, None, biases, *first.sizes)
    _, results, _, weights, biases = columns
    return partial(first.kernel.several, results, first.x, weights, biases)


def single(op: Any) -> Any:
    """Returns the call of one op; anything else unchanged."""
    if isinstance(op, GroupedLinearOp):
        operator = torch.ops.fastgen.grouped_linear_out.default
        return partial(operator, op.result, op.x, *op.parts, op.order, op.bias, *op.sizes)
    return partial(op.kernel.out, *op[1:]) if isinstance(op, LinearOp) else op
