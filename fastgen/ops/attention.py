"""Attention over a prefix that several sequences share and a suffix that each has for itself.

One input is continued by `copies` sequences (its beams, or its returned samples). They have the same prefix: the
prompt, or the encoder output in cross-attention. Its K/V is stored once per input and read once per input: the queries
of all copies of an input become the rows of one matrix product. The split of the attention into a shared and an own
part is that of FastSeq's attention cache optimisation (Yan et al., "FastSeq: Make Sequence Generation Faster", ACL
2021); the softmax runs over the scores of both parts together, so the result is that of ordinary attention.

Shapes, used throughout:
    rows = batch * copies   sequences, those of one input next to each other
    query heads             a multiple of kv heads; query head h reads kv head h // (query heads / kv heads)
    prefix                  [batch, kv heads, N, dim]
    suffix                  [rows, kv heads, T, dim], or None while there is none

Everything here is plain torch, and runs on every device torch has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def backend() -> str:
    """Which implementation serves this operator."""
    return "torch reference"


def _by_input(x: Tensor, kv_heads: int, copies: int) -> Tensor:
    """[rows, heads, Q, c] -> [batch, kv heads, copies * group * Q, c]: what reads the same K/V becomes one matrix."""
    rows, heads, length, width = x.shape
    group = heads // kv_heads
    x = x.reshape(rows // copies, copies, kv_heads, group, length, width)
    return x.permute(0, 2, 1, 3, 4, 5).reshape(rows // copies, kv_heads, copies * group * length, width)


def _by_row(x: Tensor, heads: int, copies: int) -> Tensor:
    """The inverse of `_by_input`: [batch, kv heads, copies * group * Q, c] -> [rows, heads, Q, c]."""
    batch, kv_heads, length, width = x.shape
    group = heads // kv_heads
    length //= copies * group
    x = x.reshape(batch, kv_heads, copies, group, length, width)
    return x.permute(0, 2, 1, 3, 4, 5).reshape(batch * copies, heads, length, width)


def _own(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, Q, c] -> [rows, kv heads, group * Q, c]: the query heads of a group read one kv head."""
    rows, heads, length, width = x.shape
    return x.reshape(rows, kv_heads, heads // kv_heads * length, width)


def shared_prefix_scores(query: Tensor, prefix_keys: Tensor, suffix_keys: Tensor | None) -> Tensor:
    """Query times transposed keys, without the full keys ever existing.

    Args:
        query: [rows, heads, Q, dim], any floating dtype.
        prefix_keys: [batch, kv heads, N, dim] of the same dtype; rows must be a multiple of batch.
        suffix_keys: [rows, kv heads, T, dim] or None.

    Returns:
        [rows, heads, Q, N + T], not scaled.
    """
    rows, heads, length, _ = query.shape
    batch, kv_heads, _, _ = prefix_keys.shape
    copies = rows // batch
    scores = torch.matmul(_by_input(query, kv_heads, copies), prefix_keys.transpose(-1, -2))
    scores = _by_row(scores, heads, copies)
    if suffix_keys is None:
        return scores
    own = torch.matmul(_own(query, kv_heads), suffix_keys.transpose(-1, -2))
    return torch.cat([scores, own.reshape(rows, heads, length, suffix_keys.shape[2])], dim=-1)


def shared_prefix_context(weights: Tensor, prefix_values: Tensor, suffix_values: Tensor | None) -> Tensor:
    """Attention weights times values, without the full values ever existing.

    Args:
        weights: [rows, heads, Q, N + T], any floating dtype.
        prefix_values: [batch, kv heads, N, dim] of the same dtype; rows must be a multiple of batch.
        suffix_values: [rows, kv heads, T, dim] or None.

    Returns:
        [rows, heads, Q, dim].
    """
    rows, heads, length, _ = weights.shape
    batch, kv_heads, prefix_length, width = prefix_values.shape
    copies = rows // batch
    context = torch.matmul(_by_input(weights[..., :prefix_length], kv_heads, copies), prefix_values)
    context = _by_row(context, heads, copies)
    if suffix_values is None:
        return context
    own = torch.matmul(_own(weights[..., prefix_length:], kv_heads), suffix_values)
    return context + own.reshape(rows, heads, length, width)


def shared_prefix_attention(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention over a shared prefix and an own suffix.

    The result is that of `torch.nn.functional.scaled_dot_product_attention` on the full tensors with
    `enable_gqa=True`, `dropout_p=0` and `is_causal=False`, for the same `attn_mask` and `scale`.

    Args:
        query: [rows, heads, Q, dim].
        prefix_keys, prefix_values: [batch, kv heads, N, dim]; values may have another dim than keys.
        suffix_keys, suffix_values: [rows, kv heads, T, dim], or None both.
        mask: broadcastable to [rows, heads, Q, N + T]; bool (True: attend) or additive in the dtype of the query.
        scale: factor on the scores; 1 / sqrt(dim) by default.

    Returns:
        [rows, heads, Q, dim of the values], in the dtype of the query.
    """
    if suffix_keys is None or suffix_values is None:
        return _prefix_attention(query, prefix_keys, prefix_values, mask, scale)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    # Scaling the query instead of the scores: it is the smaller tensor by far.
    scores = shared_prefix_scores(query * scale, prefix_keys, suffix_keys)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(mask.logical_not(), float("-inf"))
        else:
            scores = scores.add_(mask)
    # Half-precision scores are normalised in float32, as fused kernels do.
    normalised = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=normalised).to(query.dtype)
    if mask is not None:
        # A query that may attend to nothing has no weights; fused kernels return zeros for it, and so do we.
        nothing = mask.logical_not() if mask.dtype == torch.bool else mask.isneginf()
        weights = weights.masked_fill_(nothing.all(dim=-1, keepdim=True), 0.0)
    return shared_prefix_context(weights, prefix_values, suffix_values)


def _prefix_attention(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """`shared_prefix_attention` without a suffix: one fused kernel does it, the copies of an input being its rows."""
    rows, heads, length, _ = query.shape
    batch, kv_heads, prefix_length, _ = prefix_keys.shape
    copies = rows // batch
    if mask is not None:
        mask = mask.expand(rows, *mask.shape[-3:]) if mask.dim() == 4 else mask.expand(rows, 1, length, prefix_length)
        # A mask for all heads stays one; the query heads of a group are rows, of which each needs a row of the mask.
        mask_heads = 1 if mask.shape[1] == 1 else kv_heads
        mask = mask.expand(rows, mask_heads * (heads // kv_heads), length, prefix_length)
        mask = _by_input(mask, mask_heads, copies)
    context = F.scaled_dot_product_attention(
        _by_input(query, kv_heads, copies), prefix_keys, prefix_values, attn_mask=mask, scale=scale
    )
    return _by_row(context, heads, copies)
