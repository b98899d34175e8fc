"""Attention of one decoding step: a query per row, over a shared prefix and a suffix read through an ancestry table.

The suffix is never moved: when beams are reordered, only the table `ancestry` changes, which says for every row and
suffix position in which row the K and V of that position lie.

The sequence is cut into parts that are worked on at the same time and merged by their maxima and sums, as in
flash-decoding (Dao et al., 2023) and, for a shared prefix, in FlashInfer's cascade inference (Ye et al., 2024). Here
the prefix and the suffixes of all rows of an input are one sequence of blocks, so that one kernel reads both.

Shapes are those of `fastgen.ops.attention`, but for the query, [rows, query heads, dim], and the suffix, of `capacity`
positions, of which the first `suffix_length` are filled: as many of all rows, or a number for each.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops import _library, gpu
from fastgen.ops.attention import composed, gather_suffix


def decode_attention(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    suffix_length: Tensor | None = None,
    ancestry: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    queries: int = 1,
    owners: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of one query per row, or a few, over what its input and its own history have.

    The score of a key is `query . key * scale`, plus the bias.

    Args:
        query: [rows, heads, dim]; the last dimension contiguous, as of all of these. With `queries`, a head of the
            model is as many of these heads, one behind the other.
        prefix_keys, prefix_values: [batch, kv heads, N, dim]; values may have another dim. N may be 0.
        suffix_keys, suffix_values: [rows, kv heads, capacity, dim], or None both.
        starts, ends: [batch], int32 or int64, on the device: prefix positions outside [start, end) are padding; they
            are not read. By default all count.
        suffix_length: one integer on the device for all rows, or [rows]: filled positions of the suffix, the query's
            own the last of them. Needed with a suffix. On the CPU a row gets the same bits either way; on a GPU that is
            so in one part (`splits`), without a window, or where the rows of an input agree.
        ancestry: [rows, capacity or more], int32: the row in which suffix position t of a row lies; rows of the same
            input. By default its own.
        bias: broadcastable to [rows, heads, N + capacity], any floating type: added to the scores; -inf masks.
        window: the query sees so many positions, its own the last of them; padding counts, and a prefix ends at N.
        queries: how many of each head there are. They belong to the last positions of the suffix, in their order, and
            do not see the positions behind their own. More than one need a suffix and no window.
        owners: [rows], int64: the row of the store that each row of the query reads. Then the suffix may have another
            number of rows, and `batch`, `starts` and `ends` are those of the store. A row of the store may be read by
            several rows, each as far as its own `suffix_length`. With one query, and without an ancestry. On a GPU,
            what is read is copied. Without a suffix, a row of the store is an input. By default each row reads its own.
        splits: in how many parts to work on a sequence; chosen by default.

    Returns:
        [rows, heads, dim of the values], in the type of the query; zeros for a row that sees nothing.

    Raises:
        ValueError: shapes or types are not as above.
    """
    suits_cpu = _suits_cpu(query, starts, ends, suffix_length, bias)

    def on_cpu() -> Tensor:
        out = query.new_empty(*query.shape[:2], prefix_values.shape[3])
        torch.ops.fastgen.decode_attention_out(
            out, query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts, ends, suffix_length,
            ancestry, bias, scale, window, queries, owners,
        )  # fmt: skip
        return out

    def check() -> None:
        prefix, suffix = (prefix_keys, prefix_values), (suffix_keys, suffix_values)
        _check(query, prefix, suffix, suffix_length, ancestry, bias, owners)
        _check_queries(query, prefix_keys, suffix_keys, window, queries, owners)

    if suits_cpu and _has_a_whole_suffix(suffix_keys, suffix_values, ancestry) and not gpu.available(query):
        try:
            return on_cpu()  # which looks at its arguments itself, in less time than Python takes
        except (RuntimeError, IndexError):
            check()
            raise
    check()
    given = (query, prefix_keys, starts, ends, suffix_length, ancestry, bias)
    if owners is not None or query.dtype not in gpu.KERNEL_TYPES or not gpu.available(*given):
        if suits_cpu:
            return on_cpu()
        return reference(
            query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts=starts, ends=ends,
            suffix_length=suffix_length, ancestry=ancestry, bias=bias, scale=scale, window=window, queries=queries,
            owners=owners,
        )  # fmt: skip
    from fastgen.ops.gpu import decode_attention as on_gpu

    return on_gpu.launch(
        query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts=starts, ends=ends,
        suffix_length=suffix_length, ancestry=ancestry, bias=bias, scale=scale, window=window, queries=queries,
        splits=splits,
    )  # fmt: skip


def _suits_cpu(
    query: Tensor, starts: Tensor | None, ends: Tensor | None, length: Tensor | None, bias: Tensor | None
) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype in gpu.KERNEL_TYPES
        and (bias is None or bias.dtype in (query.dtype, torch.float32))
        and _library.has_kernel("fastgen::decode_attention_out")
        and all(bound is None or (bound.dtype == torch.int32 and bound.is_contiguous()) for bound in (starts, ends))
        and (length is None or length.dtype == torch.int64)
    )


def _has_a_whole_suffix(keys: Tensor | None, values: Tensor | None, ancestry: Tensor | None) -> bool:
    """What the kernel of the CPU does not look at."""
    if keys is None or values is None:
        return keys is values and ancestry is None
    return keys.dim() == 4 and (ancestry is None or (ancestry.dim() == 2 and ancestry.shape[1] >= keys.shape[2]))


def reference(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    suffix_length: Tensor | None = None,
    ancestry: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    queries: int = 1,
    owners: Tensor | None = None,
) -> Tensor:
    """The operator in plain torch, for any device and type. Arguments as above."""
    if owners is not None:
        inputs = owners // (1 if suffix_keys is None else len(suffix_keys) // len(prefix_keys))
        prefix_keys, prefix_values = prefix_keys[inputs], prefix_values[inputs]
        starts, ends = (None if bound is None else bound[inputs] for bound in (starts, ends))
        suffix_keys, suffix_values = (None if part is None else part[owners] for part in (suffix_keys, suffix_values))
    batch, _, length, _ = prefix_keys.shape
    position = torch.arange(length, device=query.device).expand(batch, -1)
    first = 0 if starts is None else starts.unsqueeze(1)
    seen = (position >= first) & (position < (length if ends is None else ends.unsqueeze(1)))
    filled: Tensor | int = 0
    # What is not seen is not read: there may be anything, NaN too.
    dtype, accurate = query.dtype, torch.promote_types(query.dtype, torch.float32)
    prefix_keys, prefix_values = (
        part.masked_fill(~seen[:, None, :, None], 0).to(accurate) for part in (prefix_keys, prefix_values)
    )
    seen = seen.repeat_interleave(len(query) // batch, dim=0)
    if suffix_keys is not None and suffix_values is not None and suffix_length is not None:
        capacity = suffix_keys.shape[2]
        filled = suffix_length.reshape(-1, 1).clamp(0, capacity).expand(len(query), -1)
        is_filled = torch.arange(capacity, device=query.device) < filled
        if ancestry is not None:
            sources = torch.where(is_filled, ancestry[:, :capacity], 0)
            suffix_keys, suffix_values = (gather_suffix(part, sources) for part in (suffix_keys, suffix_values))
        suffix_keys, suffix_values = (
            part.masked_fill(~is_filled[:, None, :, None], 0).to(accurate) for part in (suffix_keys, suffix_values)
        )
        seen = torch.cat([seen, is_filled], dim=1)
    if window is not None:
        seen = seen & (torch.arange(seen.shape[1], device=query.device) >= length + filled - window)
    seen = seen.unsqueeze(1)
    if queries > 1:
        position = torch.arange(seen.shape[2], device=query.device)
        behind = torch.arange(queries - 1, -1, -1, device=query.device).repeat(query.shape[1] // queries)
        seen = seen & (position < (length + filled - behind).unsqueeze(2))
    mask = torch.zeros_like(seen, dtype=accurate).masked_fill(~seen, -torch.inf)
    mask = (mask if bias is None else mask + bias).to(accurate).unsqueeze(2)
    query = query.unsqueeze(2).to(accurate)
    out = composed(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale)
    return out.squeeze(2).to(dtype)


def _check_queries(
    query: Tensor,
    prefix_keys: Tensor,
    suffix_keys: Tensor | None,
    window: int | None,
    queries: int,
    owners: Tensor | None,
) -> None:
    require = _library.checks("decode_attention", ValueError)
    require(queries > 0 and query.shape[1] % (queries * prefix_keys.shape[1]) == 0, f"{queries} queries do not fit")
    is_served = queries == 1 or (suffix_keys is not None and window is None and owners is None)
    require(is_served, "several queries need a suffix, no window and no owners")


def _check(
    query: Tensor,
    prefix: tuple[Tensor, Tensor],
    suffix: tuple[Tensor | None, Tensor | None],
    suffix_length: Tensor | None,
    ancestry: Tensor | None,
    bias: Tensor | None,
    owners: Tensor | None,
) -> None:
    require = _library.checks("decode_attention", ValueError)
    (prefix_keys, prefix_values), (suffix_keys, suffix_values) = prefix, suffix
    require(query.dim() == 3 and prefix_keys.dim() == 4 and prefix_values.dim() == 4, "not the dimensions it takes")
    rows, heads, dim = query.shape
    batch, kv_heads, _, width = prefix_keys.shape
    stored = rows
    if owners is not None:
        stored = batch if suffix_keys is None else len(suffix_keys)
        fits = owners.shape == (rows,) and owners.dtype == torch.int64 and ancestry is None
        require(fits, "owners must be [rows], int64, and without an ancestry")
    require(batch > 0 and stored % batch == 0, f"{stored} rows are no multiple of {batch} inputs")
    require(kv_heads > 0 and heads % kv_heads == 0, f"{heads} heads are no multiple of {kv_heads} kv heads")
    require(width == dim, f"keys of {width} for a query of {dim}")
    require(prefix_values.shape[:3] == prefix_keys.shape[:3], "keys and values of different shapes")
    require((suffix_keys is None) == (suffix_values is None), "suffix keys without values, or the other way round")
    parts = [query, prefix_keys, prefix_values]
    if suffix_keys is not None and suffix_values is not None:
        parts += [suffix_keys, suffix_values]
        capacity = suffix_keys.shape[2]
        require(suffix_keys.shape == (stored, kv_heads, capacity, dim), "the suffix keys do not fit the query")
        require(suffix_values.shape == (*suffix_keys.shape[:3], prefix_values.shape[3]), "the suffix values do not fit")
        fits = suffix_length is not None and (suffix_length.numel() == 1 or suffix_length.shape == query.shape[:1])
        require(fits, "a suffix needs its length, one number, or one for each row")
        if ancestry is not None:
            fits = ancestry.dim() == 2 and ancestry.shape[0] == rows and ancestry.shape[1] >= capacity
            require(fits, "ancestry must be [rows, capacity]")
            require(ancestry.dtype == torch.int32 and ancestry.stride(1) == 1, "ancestry must be int32 and contiguous")
    require(all(part.dtype == query.dtype for part in parts), "query, keys and values of different types")
    require(all(part.shape[-1] < 2 or part.stride(-1) == 1 for part in parts), "the last dimension must be contiguous")
    require(bias is None or bias.is_floating_point(), "bias must be floating point")


backend = functools.partial(_library.backend, "fastgen::decode_attention_out")
_library.define(
    "decode_attention_out(Tensor(a!) out, Tensor query, Tensor prefix_keys, Tensor prefix_values, Tensor? suffix_keys, "
    "Tensor? suffix_values, Tensor? starts, Tensor? ends, Tensor? suffix_length, Tensor? ancestry, Tensor? bias, "
    "float? scale, int? window, int queries=1, Tensor? owners=None) -> ()"
)
