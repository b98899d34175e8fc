"""No-repeat n-gram: bans every token that would complete an n-gram which its row already has.

The rule is the trigram blocking of Paulus et al., "A Deep Reinforced Model for Abstractive Summarization" (ICLR 2018,
section 2.5), for any n. Yan et al., "FastSeq: Make Sequence Generation Faster" (ACL 2021, section 4) showed that it is
worth an operator: one block of threads per row, in place, and without going through host memory.

Kernels: csrc/cpu/no_repeat_ngram.cpp and csrc/cuda/no_repeat_ngram.cu.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import _library

# Largest size of a dimension. Expanded tensors may be larger, and would take years to process.
_LARGEST = 2**31 - 1
_SCORE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def no_repeat_ngram_(
    scores: Tensor,
    tokens: Tensor,
    n: int,
    lengths: Tensor | None = None,
    *,
    context: Tensor | None = None,
    context_lengths: Tensor | None = None,
) -> Tensor:
    """Sets to -inf, in place, the score of every token that would complete an n-gram already in its row.

    The last n - 1 tokens of a row and a next token form an n-gram. If the row has that n-gram already, the next token
    is banned. With n = 1 every token of the row is banned; a row shorter than n bans nothing.

    With `context`, the n-grams that must not be repeated are those of the context (for example, the encoder's input),
    while the n - 1 tokens still come from `tokens`. Several rows may share a context row, as beams share an input.

    Does not synchronize, and no control flow depends on data: on CUDA, the call can be captured in a graph, whose
    replays read the present `tokens` and `lengths`.

    Args:
        scores: [rows, vocabulary], float32, float16, bfloat16 or float64, with any strides that do not make elements
            share memory. Changed in place, and not differentiable.
        tokens: [rows, length], int32 or int64, any strides (even an expanded tensor). Ids outside [0, vocabulary) take
            part in n-grams like any other, and are skipped where they would be banned.
        n: length of the n-grams, at least 1.
        lengths: [rows], int32 or int64: how many tokens of each row count, from the first on; all by default. Values
            outside [0, length] are clamped.
        context: [context rows, context length], of the type of `tokens`; rows must be a multiple of context rows, and
            row r uses context row r // (rows // context rows).
        context_lengths: [context rows], for `context` what `lengths` is for `tokens`.

    Returns:
        `scores` itself.

    Raises:
        RuntimeError: n, a shape, a type or a device is not as above, a size exceeds 32 bits, elements of `scores`
            share memory with each other or with another argument, or a gradient would have to flow through `scores`.
            Nothing has been written then.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("no_repeat_ngram_: is not differentiable; call it under torch.no_grad()")
    return torch.ops.fastgen.no_repeat_ngram_.default(
        scores, tokens, lengths, n, context=context, context_lengths=context_lengths
    )


def reference(
    scores: Tensor,
    tokens: Tensor,
    lengths: Tensor | None,
    n: int,
    *,
    context: Tensor | None = None,
    context_lengths: Tensor | None = None,
) -> Tensor:
    """The operator in plain torch, for any device. Arguments as in the schema."""
    _check(scores, tokens, lengths, n, context, context_lengths)
    others = [x for x in (tokens, lengths, context, context_lengths) if x is not None]
    if any(_library.share_memory(scores, other) for other in others):
        raise RuntimeError("no_repeat_ngram_: what is written shares memory with another argument; pass a copy")
    rows, vocabulary = scores.shape
    source = tokens if context is None else context
    windows = source.shape[1] - n + 1
    if scores.numel() == 0 or windows <= 0 or tokens.shape[1] < n - 1:
        return scores

    lengths = source_lengths = _clamped(lengths, tokens)
    if context is not None:
        source_lengths = _clamped(context_lengths, context)
        per_input = rows // source.shape[0]
        source = source.repeat_interleave(per_input, dim=0)
        source_lengths = source_lengths.repeat_interleave(per_input, dim=0)

    first = (lengths - (n - 1)).unsqueeze(1)  # start of each row's prefix
    banned = torch.arange(windows, device=scores.device) <= (source_lengths - n).unsqueeze(1)
    banned &= first >= 0
    for k in range(n - 1):
        banned &= source[:, k : k + windows] == tokens.gather(1, (first + k).clamp(min=0))

    # Every window writes, so that shapes do not depend on how many match. A window that bans nothing repeats what its
    # row writes anyway: -inf to one of its banned tokens, or, if nothing is banned, the score of token 0 to token 0.
    last = source[:, n - 1 :].long()
    last = torch.where(banned & (last >= 0) & (last < vocabulary), last, -1)
    spare = last.amax(dim=1, keepdim=True)
    value = torch.where(spare >= 0, -math.inf, scores[:, :1])
    return scores.scatter_(1, torch.where(last >= 0, last, spare.clamp(min=0)), value.expand_as(last))


def _clamped(lengths: Tensor | None, tokens: Tensor) -> Tensor:
    """Returns the lengths of the rows of `tokens`, [rows]."""
    rows, longest = tokens.shape
    return torch.full((rows,), longest, device=tokens.device) if lengths is None else lengths.long().clamp(0, longest)


def _fake(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    _check(scores, *args, **kwargs)
    return scores


def _check(
    scores: Tensor,
    tokens: Tensor,
    lengths: Tensor | None,
    n: int,
    context: Tensor | None = None,
    context_lengths: Tensor | None = None,
) -> None:
    """Raises on arguments that the operator does not accept. Keep in sync with `check` in csrc/no_repeat_ngram.h."""
    require = _library.checks("no_repeat_ngram_", RuntimeError)
    require(n >= 1, f"n must be at least 1, but is {n}")
    require(scores.dim() == 2, f"scores must be [rows, vocabulary], but has {scores.dim()} dimensions")
    require(scores.dtype in _SCORE_TYPES, "scores must be float32, float16, bfloat16 or float64")
    require(not _overlaps_itself(scores), "elements of scores share memory (an expanded tensor?); pass a copy")
    rows = few = scores.shape[0]
    for_each_row = tokens.dim() == 2 and tokens.shape[0] == rows
    require(for_each_row, f"tokens must be [rows, length] with the {rows} rows of scores")
    require(context is not None or context_lengths is None, "context_lengths needs a context")
    if context is not None:
        require(context.dim() == 2, "context must be [context rows, length]")
        require(context.dtype == tokens.dtype, "context must have the type of tokens")
        few = context.shape[0]
        multiple = rows % few == 0 if few > 0 else rows == 0
        require(multiple, f"the {rows} rows of scores must be a multiple of the {few} rows of context")
    for name, of_rows, count in (("lengths", lengths, rows), ("context_lengths", context_lengths, few)):
        fits = of_rows is None or of_rows.shape == (count,)
        require(fits, f"{name} must have one element for each of the {count} rows")
    for name, x in (("tokens", tokens), ("lengths", lengths), ("context_lengths", context_lengths)):
        require(x is None or x.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64")
    sizes = [size for x in (scores, tokens, context) if x is not None for size in x.shape]
    require(all(size <= _LARGEST for size in sizes), f"a size beyond 32 bits: {max(sizes)}")
    together = all(x is None or x.device == scores.device for x in (tokens, lengths, context, context_lengths))
    require(together, "all tensors must be on the device of scores")


def _overlaps_itself(matrix: Tensor) -> bool:
    # Two different elements share memory exactly if some move by (rows, columns) within the matrix is a move by nothing
    # in memory; the shortest such move is (column stride / g, row stride / g), where g is their greatest common
    # divisor.
    if matrix.numel() < 2:
        return False
    row_stride, column_stride = matrix.stride()
    divisor = math.gcd(row_stride, column_stride)
    return divisor == 0 or (column_stride // divisor < matrix.shape[0] and row_stride // divisor < matrix.shape[1])


# The tag tells torch.compile that the result is the argument that was changed; older releases do not have it.
_library.define(
    "no_repeat_ngram_(Tensor(a!) scores, Tensor tokens, Tensor? lengths, int n, *, "
    "Tensor? context=None, Tensor? context_lengths=None) -> Tensor(a!)",
    reference,
    _fake,
    tags=tuple(getattr(torch.Tag, tag) for tag in ("inplace", "pt2_compliant_tag") if hasattr(torch.Tag, tag)),
)
