"""Attention over a prefix that several sequences share and a suffix that each has for itself.

One input is continued by `per_input` sequences (its beams, or its returned samples). They have the same prefix: the
prompt, or the encoder output in cross-attention. Its K/V is stored and read once per input: the queries of all
sequences of an input become the rows of one matrix product. The split into a shared and an own part is that of
FastSeq's attention cache optimisation (Yan et al., "FastSeq: Make Sequence Generation Faster", ACL 2021); the softmax
runs over the scores of both parts together, so the result is that of ordinary attention.

Shapes, used throughout:
    rows = batch * per_input   sequences, those of one input next to each other
    query heads             a multiple of kv heads; query head h reads kv head h // (query heads / kv heads)
    prefix                  [batch, kv heads, N, dim]
    suffix                  [rows, kv heads, T, dim], or None while there is none

The products `shared_prefix_scores` and `shared_prefix_context` are plain torch, for models with attention code of their
own. `shared_prefix_attention` is the whole of it: for the few queries of a decoding step it is an operator of that
name, with kernels in csrc/cpu/shared_prefix_attention.cpp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library

# The most query rows (per_input * query heads per kv head * Q) that go to the kernel: without a suffix, and with one,
# when the reference has two products each and a softmax instead of one fused kernel. Beyond, blocked matrix products
# over many rows gain more than is lost in memory traffic; bfloat16 products even have hardware of their own. Measured
# with AVX-512, with AVX2 and with SSE, for prefixes of 128 and 1024 positions.
MAX_ROWS = {torch.float32: (12, 128), torch.float16: (16, 128), torch.bfloat16: (6, 16)}


backend = functools.partial(_library.backend, "fastgen::shared_prefix_attention")


@functools.cache
def reads_ancestry(device: str) -> bool:
    """Whether there is a kernel for that kind of device which reads a suffix through a table without gathering it."""
    return device == "cpu" and _library.has_kernel("fastgen::shared_prefix_attention")


def _by_input(x: Tensor, kv_heads: int, per_input: int) -> Tensor:
    """[rows, heads, Q, c] -> [batch, kv heads, per_input * group * Q, c]: one matrix of all that reads the same K/V."""
    rows, heads, length, width = x.shape
    x = x.reshape(rows // per_input, per_input, kv_heads, heads // kv_heads, length, width)
    return x.transpose(1, 2).flatten(2, 4)


def _by_row(x: Tensor, heads: int, per_input: int) -> Tensor:
    """The inverse of `_by_input`: [batch, kv heads, per_input * group * Q, c] -> [rows, heads, Q, c]."""
    batch, kv_heads, length, width = x.shape
    group = heads // kv_heads
    x = x.reshape(batch, kv_heads, per_input, group, length // (per_input * group), width)
    return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)


def _product_with_prefix(x: Tensor, prefix: Tensor) -> Tensor:
    """[rows, heads, Q, c] x [batch, kv heads, c, d] -> [rows, heads, Q, d]."""
    per_input = x.shape[0] // prefix.shape[0]
    return _by_row(torch.matmul(_by_input(x, prefix.shape[1], per_input), prefix), x.shape[1], per_input)


def _product_with_suffix(x: Tensor, suffix: Tensor) -> Tensor:
    """[rows, heads, Q, c] x [rows, kv heads, c, d] -> [rows, heads, Q, d]."""
    rows, heads, length, width = x.shape
    kv_heads = suffix.shape[1]  # the query heads of a group read one kv head
    product = torch.matmul(x.reshape(rows, kv_heads, heads // kv_heads * length, width), suffix)
    return product.view(rows, heads, length, suffix.shape[3])


def shared_prefix_scores(query: Tensor, prefix_keys: Tensor, suffix_keys: Tensor | None) -> Tensor:
    """Query times transposed keys, without the full keys ever existing: [rows, heads, Q, N + T], not scaled.

    Args:
        query: [rows, heads, Q, dim], any floating dtype; keys of the same.
    """
    scores = _product_with_prefix(query, prefix_keys.transpose(-1, -2))
    if suffix_keys is None:
        return scores
    return torch.cat([scores, _product_with_suffix(query, suffix_keys.transpose(-1, -2))], dim=-1)


def shared_prefix_context(weights: Tensor, prefix_values: Tensor, suffix_values: Tensor | None) -> Tensor:
    """Attention weights times values, without the full values ever existing: [rows, heads, Q, dim].

    Args:
        weights: [rows, heads, Q, N + T], any floating dtype; values of the same.
    """
    length = prefix_values.shape[2]
    context = _product_with_prefix(weights[..., :length], prefix_values)
    return context if suffix_values is None else context + _product_with_suffix(weights[..., length:], suffix_values)


def shared_prefix_attention(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    ancestry: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention over a shared prefix and an own suffix.

    The result is that of `torch.nn.functional.scaled_dot_product_attention` on the full tensors with
    `enable_gqa=True`, `dropout_p=0` and `is_causal=False`, for the same `attn_mask` and `scale`.

    Args:
        query: [rows, heads, Q, dim], any floating dtype.
        prefix_keys, prefix_values: [batch, kv heads, N, dim] of the same dtype; values may have another dim than keys.
        suffix_keys, suffix_values: [rows, kv heads, T, dim], or None both.
        mask: broadcastable to [rows, heads, Q, N + T]; bool (True: attend) or additive in the dtype of the query.
        scale: factor on the scores; 1 / sqrt(dim) by default.
        ancestry: [rows, T], int32: suffix position t of row r is stored in row `ancestry[r, t]` of the suffix tensors;
            in row r itself by default. So rows that continue others need not be moved.

    Returns:
        [rows, heads, Q, dim of the values], in the dtype of the query. A query that may attend to nothing gives zeros.

    Raises:
        RuntimeError: a shape, a type or a device is not as above.
    """
    if not suits_kernel(query, (prefix_keys, prefix_values), (suffix_keys, suffix_values), mask):
        return composed(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale, ancestry)
    return torch.ops.fastgen.shared_prefix_attention.default(
        query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale, ancestry=ancestry
    )


def suits_kernel(
    query: Tensor, prefix: tuple[Tensor, Tensor], suffix: tuple[Tensor | None, Tensor | None], mask: Tensor | None
) -> bool:
    """Whether the kernel takes these arguments of `shared_prefix_attention`, and less time than plain torch."""
    device, dtype = query.device.type, query.dtype
    if device != "cpu" or dtype not in MAX_ROWS or (dtype.itemsize == 2 and not _converts_halves()):
        return False
    if query.dim() != 4 or prefix[0].dim() != 4:
        return False
    if query.shape[:3].numel() > prefix[0].shape[:2].numel() * MAX_ROWS[dtype][suffix[0] is not None]:
        return False
    kv = (*prefix, *suffix)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, *kv, mask)):
        return False
    if any(x is not None and (x.stride(-1) != 1 or x.dtype != dtype) for x in kv):
        return False
    # Under autocast the result has its type.
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == dtype


@functools.cache
def _converts_halves() -> bool:
    """Whether the kernel reads half precision with instructions made for it."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The operator in plain torch, for any device. Arguments as in the schema."""
    _check(*args, **kwargs)
    return composed(*args, **kwargs)


def composed(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    ancestry: Tensor | None = None,
) -> Tensor:
    """Made of operations of torch, which take what autocast makes of types that differ."""
    if query.shape[0] == 0 or query.shape[2] == 0:
        return query.new_empty(*query.shape[:3], prefix_values.shape[3])
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if suffix_keys is None or suffix_values is None:
        return _prefix_attention(query, prefix_keys, prefix_values, mask, scale)
    if ancestry is not None:
        suffix_keys, suffix_values = gather_suffix(suffix_keys, ancestry), gather_suffix(suffix_values, ancestry)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    # Scaling the query instead of the scores: it is the smaller tensor by far.
    scores = shared_prefix_scores(query * scale, prefix_keys, suffix_keys)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(mask.logical_not(), float("-inf"))
        else:
            # The lowest number of float32 would be -inf in half precision.
            scores = scores.add_(mask) if mask.dtype == scores.dtype else scores + mask
    # Half-precision scores are normalised in float32, as fused kernels do.
    normalised = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=normalised).to(query.dtype)
    if mask is not None:
        # A query that may attend to nothing has no weights; fused kernels return zeros for it, and so do we.
        nothing = mask.logical_not() if mask.dtype == torch.bool else mask.isneginf()
        weights = weights.masked_fill_(nothing.all(dim=-1, keepdim=True), 0.0)
    return shared_prefix_context(weights, prefix_values, suffix_values)


def gather_suffix(suffix: Tensor, ancestry: Tensor) -> Tensor:
    """The suffix [rows, kv heads, T, dim] gathered: position t of row r is that of row `ancestry[r, t]`, [rows, T]."""
    positions = torch.arange(suffix.shape[2], device=suffix.device)
    return suffix.transpose(1, 2)[ancestry.long(), positions].transpose(1, 2)


def _prefix_attention(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """`shared_prefix_attention` without a suffix: one fused kernel, whose rows are the sequences of an input."""
    rows, heads, length, _ = query.shape
    batch, kv_heads, prefix_length, _ = prefix_keys.shape
    per_input = rows // batch
    if mask is not None:
        # A mask for all heads stays one; the query heads of a group are rows, of which each needs a row of the mask.
        mask_heads = 1 if mask.shape[1] == 1 else kv_heads
        mask = mask.expand(rows, mask_heads * (heads // kv_heads), length, prefix_length)
        mask = _by_input(mask, mask_heads, per_input)
    context = F.scaled_dot_product_attention(
        _by_input(query, kv_heads, per_input), prefix_keys, prefix_values, attn_mask=mask, scale=scale
    )
    return _by_row(context, heads, per_input)


def _check(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    ancestry: Tensor | None = None,
) -> None:
    """Raises on what the operator does not take. The C++ kernel checks for itself that it reads no other memory."""
    require = _library.checks("shared_prefix_attention", RuntimeError)
    require(query.dim() == 4, "query must be [rows, heads, Q, dim]")
    require(prefix_keys.dim() == prefix_values.dim() == 4, "the prefix must be [batch, kv heads, N, dim]")
    require((suffix_keys is None) == (suffix_values is None), "a suffix needs both keys and values")
    require(suffix_keys is None or suffix_keys.dim() == 4, "the suffix must be [rows, kv heads, T, dim]")
    require(suffix_keys is not None or ancestry is None, "ancestry needs a suffix")
    rows, heads, queries, dim = query.shape
    batch, kv_heads, prefix, _ = prefix_keys.shape
    suffix, value_dim = 0 if suffix_keys is None else suffix_keys.shape[2], prefix_values.shape[3]
    for what, many, few in (("rows", rows, batch), ("heads", heads, kv_heads)):
        multiple = many % few == 0 if few > 0 else many == 0
        require(multiple, f"the {many} {what} of the query must be a multiple of the {few} {what} of the prefix")
    for name, part, dtype, shape in (
        ("prefix_keys", prefix_keys, query.dtype, (batch, kv_heads, prefix, dim)),
        ("prefix_values", prefix_values, query.dtype, (batch, kv_heads, prefix, value_dim)),
        ("suffix_keys", suffix_keys, query.dtype, (rows, kv_heads, suffix, dim)),
        ("suffix_values", suffix_values, query.dtype, (rows, kv_heads, suffix, value_dim)),
        ("ancestry", ancestry, torch.int32, (rows, suffix)),
    ):
        if part is not None:
            right = part.dtype == dtype and part.device == query.device and tuple(part.shape) == shape
            given = f"{list(part.shape)} {part.dtype} on {part.device}"
            require(right, f"{name} must be {list(shape)} {dtype} on {query.device}, but is {given}")
    if mask is not None:
        scores = (rows, heads, queries, prefix + suffix)
        fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False))
        require(fits, f"the mask {list(mask.shape)} cannot be expanded to {list(scores)}")
        known = mask.dtype in (torch.bool, torch.float32, query.dtype)
        require(known, "the mask must be bool, float32 or of the type of the query")


def _fake(query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    _check(query, prefix_keys, prefix_values, *args, **kwargs)
    return query.new_empty(*query.shape[:3], prefix_values.shape[3])


_library.define(
    "shared_prefix_attention(Tensor query, Tensor prefix_keys, Tensor prefix_values, Tensor? suffix_keys=None, "
    "Tensor? suffix_values=None, Tensor? mask=None, float? scale=None, *, Tensor? ancestry=None) -> Tensor",
    reference,
    _fake,
    tags=(torch.Tag.pt2_compliant_tag,),
)
