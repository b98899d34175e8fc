"""Finds the greedy LM heads of a recorded graph: products of which only the argmax of each row is read.

Such a product becomes one of approximate logits, and its argmax becomes that of `fastgen.ops.approximate_logits`.
Between the two, logits processors may ban tokens: a banned logit is -inf, and so is its approximation. When drafted
tokens are verified, the top two replace the argmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fastgen.decoding.operations import PRODUCTS, Constant, Operation, TensorRef, structure_of
from fastgen.ops import no_repeat_ngram  # noqa: F401  (the operator)
from fastgen.ops.approximate_logits import APPROXIMATE_LOGITS, ARGMAX, TOP_TWO

_aten = torch.ops.aten
_BAN_NGRAMS = torch.ops.fastgen.no_repeat_ngram_.default
_TOP_TWO_OF_TENSOR = torch.ops.fastgen.top_two_out.default


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
