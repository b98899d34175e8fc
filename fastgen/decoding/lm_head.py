"""The LM head of a greedy step: the argmax from approximate logits, computed with a low-bit copy of the weight.

Only logits that could be the largest are computed from the weight itself (`fastgen.ops.approximate_logits`). In a
captured step the copy has 8 bits and the argmax is exact. The head of a draft has 4 bits, and its argmax is likely.

A graph pass finds the heads of a recorded graph: products of which only the argmax of each row is read. Such a product
becomes one of approximate logits, and its argmax becomes that of `fastgen.ops.approximate_logits`. Between the two,
logits processors may ban tokens: a banned logit is -inf, and so is its approximation. When drafted tokens are verified,
the top two replace the argmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import settings
from fastgen.decoding import derived_weights, linear_ops
from fastgen.decoding.recorded_graph import PRODUCTS, Constant, Operation, TensorRef, structure_of
from fastgen.ops import approximate_logits, no_repeat_ngram  # noqa: F401  (the latter defines an operator)
from fastgen.ops.approximate_logits import APPROXIMATE_LOGITS, ARGMAX, TOP_TWO
from fastgen.ops.linear import as_rows, choose
from fastgen.ops.linear.choose import Kernel

_aten = torch.ops.aten
_BAN_NGRAMS = torch.ops.fastgen.no_repeat_ngram_.default
_TOP_TWO_OF_TENSOR = torch.ops.fastgen.top_two_out.default
# With more rows, an exact product is no longer bound by reading the weight.
_MOST_ROWS = 16
# Smaller weights are not worth a copy.
_LEAST_BYTES = 2**22
# If more than this part of all logits is computed exactly over this many steps, they are too flat to approximate.
_MOST_COMPUTED, _STEPS = 1 / 16, 16


class GreedyHead:
    """A product of which only the argmax of each row is read, with or without a copy of the weight.

    Args:
        logits: [M, N], float32: memory for the logits, exact or approximate.
        x, weight, bias: [M, K], [N, K] and [N] or None, float32.
    """

    def __init__(self, logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._logits, self._x, self._bias = logits, x, bias
        # With a copy, logits have the bits of GEMV, and a result must not depend on whether there is a copy.
        may_have_copy = _may_have_copy(x, weight, bias)
        self._multiply = _product(logits, x, weight, bias, choose.GEMV if may_have_copy else None)
        self._weight = derived_weights.of(weight, derived_weights.LM_HEAD) if may_have_copy else None
        self._copy: approximate_logits.ApproximateHead | None = None  # the copy whose logits wait for `find`
        self._computed, self._steps = 0.0, 0

    def multiply(self) -> None:
        """Writes the logits, or approximate ones."""
        self._copy = None if self._weight is None else self._weight.in_step()
        if self._copy is None:
            self._multiply()
        else:
            approximate_logits.logits_out(self._logits, self._x, self._bias, self._copy)

    def find(self, out: Tensor) -> None:
        """Writes the argmax of each row, [M], int64. A logit that is -inf by now is banned."""
        if not self._found(out):
            _aten.argmax.out(self._logits, -1, False, out=out)

    def find_two(self, out: Tensor, is_near: Tensor, masked: float, share: float) -> None:
        """Does the same, and writes whether another logit is about as large, [M], bool (`fastgen.ops.search_step`)."""
        if not self._found(out, is_near, masked, share):
            torch.ops.fastgen.top_two_out(out, is_near, self._logits, masked, share)

    def _found(self, out: Tensor, *near: Any) -> bool:
        """Finds the argmax if the logits are approximate; `near` are further arguments of `argmax_out`."""
        copy, self._copy = self._copy, None
        if copy is None or self._weight is None:
            return False
        weight, rows = self._weight.weight, self._x.shape[0]
        computed = approximate_logits.argmax_out(out, self._logits, self._x, weight, self._bias, copy, *near)
        self._computed, self._steps = self._computed + computed / rows, self._steps + 1
        if self._steps == _STEPS:
            if self._computed > _MOST_COMPUTED * _STEPS * weight.shape[0]:
                self._weight.back_off()
            self._computed, self._steps = 0.0, 0
        return True


def _product(
    logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel | None
) -> Callable[[], Any]:
    """Returns the call that computes all logits, with this kernel or the one that is chosen for them."""
    op = linear_ops.linear_op(logits, x, weight, bias)
    if op is not None:
        return linear_ops.call_of([op if kernel is None else op._replace(kernel=kernel)])
    if bias is None:
        return partial(_aten.mm.out, x, weight.t(), out=logits)
    return partial(_aten.addmm.out, bias, x, weight.t(), out=logits)


def _may_have_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a copy makes this faster: few rows, and a weight that does not stay in a cache."""
    # With "never", products are torch's own, and nothing is copied.
    return (
        settings.current().packed_weights != "never"
        and approximate_logits.serves(x, weight, bias)
        and x.shape[0] <= _MOST_ROWS
        and weight.nbytes >= _LEAST_BYTES
        and choose.kernel_for(x, weight, bias) is not None
    )


class DraftHead:
    """The LM head of a model that drafts for itself, which replaces the layer's forward pass.

    Attributes:
        weight: the layer's weight, [N, K], in `formats.DRAFT_HEAD`.
    """

    def __init__(
        self, module: nn.Module, weight: derived_weights.DerivedWeight, copy: approximate_logits.ApproximateHead
    ) -> None:
        self.weight = weight
        self._module, self._copy = module, copy
        self._x: Tensor | None = None
        self._logits: Tensor | None = None

    @staticmethod
    def of(module: nn.Module, weight: Tensor) -> DraftHead | None:
        """Returns the head of a layer with this weight, [N, K]; None if no kernel serves it, or it has no copy."""
        if not approximate_logits.serves(weight[:1], weight, module._parameters.get("bias")):
            return None
        derived = derived_weights.of(weight, derived_weights.DRAFT_HEAD, module._parameters["weight"])
        copy = derived.optional()
        return None if copy is None else DraftHead(module, derived, copy)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the approximate logits for x, [..., K]: [..., N]."""
        self._x = as_rows(x)
        self._logits = choose.linear(x, self._copy.weight, self._module._parameters.get("bias"))
        return self._logits

    def argmax(self, logits: Tensor) -> Tensor | None:
        """Returns the most likely argmax of each row, [M]; None if `logits` are not those that `logits` returned."""
        x, ours, self._x, self._logits = self._x, self._logits, None, None
        if x is None or ours is None or not _is_one_memory(logits, ours):
            return None
        found = torch.empty(len(x), dtype=torch.int64, device=x.device)
        bias = self._module._parameters.get("bias")
        approximate_logits.argmax_out(found, logits, x, self.weight.weight, bias, self._copy)
        return found


def _is_one_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same elements in the same memory."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype is other.dtype
    return same and one.numel() == other.numel() and one.is_contiguous() and other.is_contiguous()


# ---- the graph pass


def with_greedy_heads(operations: list[Operation]) -> list[Operation]:
    """Returns the operations, with `APPROXIMATE_LOGITS`, and `ARGMAX` or `TOP_TWO`, in place of greedy LM heads."""
    index = {id(each): number for number, each in enumerate(operations)}
    made_by = {each.outputs[0].storage: each for each in operations if each.function in PRODUCTS and each.outputs[0]}
    # A weight that the step itself makes or writes to differs from step to step.
    written = frozenset[int]().union(*(each.written for each in operations))
    found = list(operations)
    for argmax in operations:
        scores = _chosen_from(argmax)
        if not isinstance(scores, TensorRef):
            continue
        product = made_by.get(scores.storage)
        if product is None or not _is_of_rows(scores, product):
            continue
        first, last = index[id(product)], index[id(argmax)]
        *bias, x, weight = product.args
        assert isinstance(weight, TensorRef)
        changed = frozenset[int]().union(*(each.written for each in operations[first + 1 : last]))
        if weight.storage in written or changed & product.used:
            continue
        users = [number for number, each in enumerate(operations) if scores.storage in each.used | each.made]
        if (users[0], users[-1]) != (first, last) or not _only_ban(operations[first : last + 1], scores):
            continue
        rows = dataclasses.replace(weight, size=weight.size[::-1], stride=weight.stride[::-1])  # [N, K]
        args = [x, rows, bias[0] if bias else Constant(None)]
        found[first] = Operation(APPROXIMATE_LOGITS, args, structure_of(3), product.outputs)
        if argmax.function is _TOP_TWO_OF_TENSOR:
            found[last] = Operation(TOP_TWO, [*argmax.args, *args], structure_of(8), [], argmax.in_place)
        else:
            found[last] = Operation(ARGMAX, [scores, *args], structure_of(4), argmax.outputs)
    return found


def _chosen_from(operation: Operation) -> TensorRef | Constant | None:
    """Returns the tensor of which an operator finds each row's argmax or top two; None for any other operator."""
    if operation.function is _TOP_TWO_OF_TENSOR:
        return operation.args[2]
    is_argmax = operation.function is _aten.argmax.default and operation.args[1:] in ([Constant(-1)], [Constant(1)])
    return operation.args[0] if is_argmax else None


def _is_of_rows(scores: TensorRef, product: Operation) -> bool:
    """Whether the scores are a float32 product with a weight, [M, N]."""
    (result,), (*bias, x, weight) = product.outputs, product.args
    assert result is not None
    is_known = all(isinstance(arg, TensorRef) and arg.dtype is torch.float32 for arg in (x, weight, *bias))
    has_bias = not bias or (len(bias) == 1 and isinstance(bias[0], TensorRef) and bias[0].size == result.size[-1:])
    return len(scores.size) == 2 and is_known and has_bias and _is_whole(scores, result)


def _is_whole(ref: TensorRef | Constant, result: TensorRef) -> bool:
    """Whether a tensor is all of a result, which is not empty, in the same layout."""
    return (
        isinstance(ref, TensorRef)
        and ref.storage == result.storage
        and ref.dtype is result.dtype
        and ref.offset == result.offset
        and ref.is_contiguous
        and result.is_contiguous
        and ref.size[-1:] == result.size[-1:]
        and math.prod(ref.size) == math.prod(result.size) > 0
    )


def _only_ban(operations: Sequence[Operation], scores: TensorRef) -> bool:
    """Whether nothing happens to the scores between product and argmax except that some become -inf.

    Or all but one of a row become -inf, and that one may take any value, because it is the largest.

    Args:
        operations: from the product to the argmax.
    """
    rewritten = frozenset[int]().union(*(each.in_place for each in operations))
    steps = iter([each for each in operations[1:-1] if scores.storage in each.used])
    banned_if: TensorRef | Constant | None = None  # the condition under which the previous operator has banned all
    for each in steps:
        banned, banned_if = banned_if, None
        if any(isinstance(arg, TensorRef) and arg.storage == scores.storage for arg in each.args[1:]):
            return False
        if not _is_whole(each.args[0], scores):
            return False
        if each.function is _aten.masked_fill_.Scalar and each.args[2] == Constant(-math.inf):
            condition = each.args[1]
            banned_if = condition if isinstance(condition, TensorRef) and condition.storage not in rewritten else None
        elif each.function is _aten.index_select.default:
            if not _changes_columns(operations, each, next(steps, None), banned, rewritten):
                return False
        elif each.function is not _BAN_NGRAMS and not _bans_columns(each):
            return False
    return True


def _bans_columns(operation: Operation) -> bool:
    is_last = operation.args[1:2] in ([Constant(1)], [Constant(-1)])
    return operation.function is _aten.index_fill_.int_Scalar and is_last and operation.args[3] == Constant(-math.inf)


def _changes_columns(
    operations: Sequence[Operation],
    selection: Operation,
    copy: Operation | None,
    banned: TensorRef | Constant | None,
    rewritten: frozenset[int],
) -> bool:
    """Whether some columns are selected, become -inf where a condition holds, and are copied back.

    A single column may become another number where all others have been `banned`.
    """
    (columns,), (_, dim, index, *_) = selection.outputs, selection.args
    if columns is None or copy is None or copy.function is not _aten.index_copy_.default:
        return False
    is_same = copy.args[1:3] == [dim, index] and isinstance(index, TensorRef) and index.storage not in rewritten
    users = [each for each in operations if columns.storage in each.used]
    if dim not in (Constant(1), Constant(-1)) or not is_same or len(users) != 2 or users[1] is not copy:
        return False
    fill = users[0]
    is_filled = fill.function is _aten.masked_fill_.Scalar and _is_whole(fill.args[0], columns)
    if not is_filled or not _is_whole(copy.args[3], columns):
        return False
    is_one = isinstance(index, TensorRef) and math.prod(index.size) == 1
    return fill.args[2] == Constant(-math.inf) or (is_one and banned is not None and fill.args[1] == banned)
