"""Attention of a decode step: over a prefix that several rows share, and a suffix of each row's own.

`per_input` rows (beams, or returned samples) continue one input. They have the same prefix: the prompt, or the encoder
output in cross-attention. Its K and V are stored and read once per input: the queries of all rows of an input become
the rows of one matrix product. The split into a shared and an own part follows FastSeq's attention cache optimisation
(Yan et al., "FastSeq: Make Sequence Generation Faster", ACL 2021); one softmax runs over the scores of both parts, so
the result is that of ordinary attention. The suffix is never moved: a reorder of beams only changes `ancestry`.

Shapes, used throughout:
    rows = batch * per_input   sequences, those of one input next to each other
    query heads             a multiple of kv heads; query head h reads kv head h // (query heads / kv heads)
    prefix                  [batch, kv heads, N, dim]
    suffix                  [rows, kv heads, T, dim], or None while there is none

`decode_attention` is the operator, with kernels for the CPU (csrc/cpu/decode_attention.cpp) and for NVIDIA GPUs
(gpu/launches.py). They split a sequence into parts that are processed in parallel and merged by their maxima and
sums, as in flash-decoding (Dao et al., 2023) and, for a shared prefix, in FlashInfer's cascade inference (Ye et al.,
2024).

`shared_prefix_scores`, `shared_prefix_context` and `composed` compute the same with torch operations: for models with
their own attention code, and for more queries than a decode step has.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, gpu
from fastgen.ops.linear.choose import upcast

# The most query rows (per_input * query heads per kv head * Q) for which the CPU kernel is faster than torch: without a
# suffix, and with one, for which torch needs two products each and a softmax instead of one fused kernel. Beyond,
# blocked matrix products over many rows save more than memory traffic costs; bfloat16 products even have their own
# hardware. Measured with AVX-512, with AVX2 and with SSE, for prefixes of 128 and 1024 positions.
MAX_ROWS = {torch.float32: (12, 128), torch.float16: (16, 128), torch.bfloat16: (6, 16)}


@functools.cache
def reads_ancestry(device: str) -> bool:
    """Whether a kernel for this kind of device reads a suffix through the ancestry without gathering it."""
    return device == "cpu" and _library.has_kernel("fastgen::decode_attention_out")


def decode_attention(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    suffix_lengths: Tensor | None = None,
    ancestry: Tensor | None = None,
    window: int | None = None,
    causal: bool = False,
    row_map: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Scaled dot-product attention of a few queries per row over the input's prefix and the row's own suffix.

    The result is that of `torch.nn.functional.scaled_dot_product_attention` on the full tensors with
    `enable_gqa=True`. Does not synchronize; the kernel reads lengths and tables when it runs.

    Args:
        query: [rows, heads, Q, dim], any floating type.
        prefix_keys, prefix_values: [batch, kv heads, N, dim] of the same type; values may have another dim. N may be 0.
        suffix_keys, suffix_values: [rows, kv heads, T, dim], or both None. All K and V are contiguous along dim.
        mask: broadcastable to [rows, heads, Q, N + T]; bool (True: attend), or floating: added to the scores.
        scale: factor on the scores; 1 / sqrt(dim) by default.
        starts, ends: [batch], int32 or int64: prefix positions outside [start, end) are padding, which is not read. By
            default, there is none.
        suffix_lengths: one integer for all rows, or [rows]: cached positions of the suffix; T by default. On a CPU, a
            row gets the same bits either way; on a GPU, only in one part (`splits`), without a window, or if the rows
            of an input agree.
        ancestry: [rows, T or more], int32: the row, of the same input, that holds suffix position t of a row. By
            default the row itself.
        window: queries see only this many positions, up to the last of the suffix; padding counts, a prefix ends at N.
        causal: the queries of a row belong to the last Q positions of its suffix, and do not see positions after their
            own. Not with a window or a row map.
        row_map: [rows], int64: the row of the KV cache that each query row reads, up to its own length. The suffix may
            then have another number of rows, and `batch`, `starts` and `ends` are those of the cache; without a suffix,
            a row of the cache is an input. Not with an ancestry. On a GPU, the cache that is read is copied.
        splits: number of parts into which a GPU splits a sequence; chosen by default.

    Returns:
        [rows, heads, Q, dim of the values], in the type of the query; zeros for a query that sees nothing.

    Raises:
        ValueError: shapes or types are not as above.
    """
    given = (query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale)
    places = (query, starts, ends, suffix_lengths, ancestry, mask)
    on_gpu = row_map is None and query.dtype in gpu.KERNEL_TYPES and query.numel() > 0 and gpu.available(*places)
    if not on_gpu and _suits_cpu(query, mask, starts, ends, suffix_lengths):
        try:  # the kernel checks its arguments itself, faster than Python would
            return on_cpu(*given, starts, ends, suffix_lengths, ancestry, window, causal, row_map)
        except (RuntimeError, IndexError):
            _check(*given[:6], suffix_lengths, ancestry, window, causal, row_map)
            raise
    _check(*given[:6], suffix_lengths, ancestry, window, causal, row_map)
    if on_gpu:
        from fastgen.ops.gpu import launches as kernels

        return kernels.launch_attention(
            *given, starts=starts, ends=ends, suffix_lengths=suffix_lengths, ancestry=ancestry, window=window,
            causal=causal, splits=splits,
        )  # fmt: skip
    return reference(
        *given, starts=starts, ends=ends, suffix_lengths=suffix_lengths, ancestry=ancestry, window=window,
        causal=causal, row_map=row_map,
    )  # fmt: skip


def on_cpu(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None, mask: Tensor | None = None, scale: float | None = None,
    starts: Tensor | None = None, ends: Tensor | None = None, suffix_lengths: Tensor | None = None,
    ancestry: Tensor | None = None, window: int | None = None, causal: bool = False, row_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs the CPU kernel. It raises RuntimeError if the arguments are not those of `decode_attention`."""
    out = query.new_empty(*query.shape[:3], prefix_values.shape[3])
    OPERATOR(
        out, query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale, starts, ends, suffix_lengths,
        ancestry, window, causal, row_map,
    )  # fmt: skip
    return out


def _suits_cpu(
    query: Tensor, mask: Tensor | None, starts: Tensor | None, ends: Tensor | None, lengths: Tensor | None
) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype in gpu.KERNEL_TYPES
        and (mask is None or mask.dtype in (query.dtype, torch.float32, torch.bool))
        and _library.has_kernel("fastgen::decode_attention_out")
        and all(bound is None or (bound.dtype == torch.int32 and bound.is_contiguous()) for bound in (starts, ends))
        and (lengths is None or lengths.dtype == torch.int64)
    )


def reference(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None = None,
    suffix_values: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    suffix_lengths: Tensor | None = None,
    ancestry: Tensor | None = None,
    window: int | None = None,
    causal: bool = False,
    row_map: Tensor | None = None,
) -> Tensor:
    """The operator in plain torch, for any device and type. Arguments as above."""
    if not query.shape[:3].numel():
        return query.new_empty(*query.shape[:3], prefix_values.shape[3])
    starts, ends, suffix_lengths, ancestry, mask = (
        None if given is None else given.to(query.device) for given in (starts, ends, suffix_lengths, ancestry, mask)
    )
    if row_map is not None:
        inputs = row_map // (1 if suffix_keys is None else len(suffix_keys) // len(prefix_keys))
        prefix_keys, prefix_values = prefix_keys[inputs], prefix_values[inputs]
        starts, ends = (None if bound is None else bound[inputs] for bound in (starts, ends))
        suffix_keys, suffix_values = (None if part is None else part[row_map] for part in (suffix_keys, suffix_values))
    rows, _, queries, _ = query.shape
    batch, _, length, _ = prefix_keys.shape
    position = torch.arange(length, device=query.device).expand(batch, -1)
    first = 0 if starts is None else starts.unsqueeze(1)
    attended = (position >= first) & (position < (length if ends is None else ends.unsqueeze(1)))
    lengths: Tensor | int = 0
    # Masked positions must not affect the result: they may hold any value, even NaN.
    dtype, accurate = query.dtype, torch.promote_types(query.dtype, torch.float32)
    prefix_keys, prefix_values = (
        part.masked_fill(~attended[:, None, :, None], 0).to(accurate) for part in (prefix_keys, prefix_values)
    )
    attended = attended.repeat_interleave(rows // batch, dim=0)
    if suffix_keys is not None and suffix_values is not None:
        capacity = suffix_keys.shape[2]
        given = torch.tensor(capacity, device=query.device) if suffix_lengths is None else suffix_lengths
        lengths = given.reshape(-1, 1).clamp(0, capacity).expand(rows, -1)
        is_filled = torch.arange(capacity, device=query.device) < lengths
        if ancestry is not None:
            sources = torch.where(is_filled, ancestry[:, :capacity], 0)
            suffix_keys, suffix_values = (gather_suffix(part, sources) for part in (suffix_keys, suffix_values))
        suffix_keys, suffix_values = (
            part.masked_fill(~is_filled[:, None, :, None], 0).to(accurate) for part in (suffix_keys, suffix_values)
        )
        attended = torch.cat([attended, is_filled], dim=1)
    if window is not None:
        attended = attended & (torch.arange(attended.shape[1], device=query.device) >= length + lengths - window)
    attended = attended[:, None, None]
    if causal:
        position = torch.arange(attended.shape[3], device=query.device)
        behind = torch.arange(queries - 1, -1, -1, device=query.device)
        attended = attended & (position < (length + lengths - behind)[:, None, :, None])
    if mask is not None and mask.dtype == torch.bool:
        attended, mask = attended & mask, None
    added = torch.zeros_like(attended, dtype=accurate).masked_fill(~attended, -torch.inf)
    added = (added if mask is None else added + mask).to(accurate)
    query = query.to(accurate)
    return composed(query, prefix_keys, prefix_values, suffix_keys, suffix_values, added, scale).to(dtype)


def _check(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None,
    suffix_values: Tensor | None,
    mask: Tensor | None,
    suffix_lengths: Tensor | None,
    ancestry: Tensor | None,
    window: int | None,
    causal: bool,
    row_map: Tensor | None,
) -> None:
    """Raises on arguments that the operator does not accept. The C++ kernel itself checks its memory accesses."""
    require = _library.checks("decode_attention", ValueError)
    require(query.dim() == 4, "query must be [rows, heads, Q, dim]")
    require(prefix_keys.dim() == prefix_values.dim() == 4, "the prefix must be [batch, kv heads, N, dim]")
    require((suffix_keys is None) == (suffix_values is None), "a suffix needs both keys and values")
    own = suffix_keys is not None
    fits = suffix_keys is None or suffix_values is None or suffix_keys.dim() == suffix_values.dim() == 4
    require(fits, "the suffix must be [rows, kv heads, T, dim]")
    require(own or not (causal or suffix_lengths is not None or ancestry is not None), "what is said is of a suffix")
    require(not causal or (window is None and row_map is None), "a causal call has no window and no row map")
    rows, heads, queries, dim = query.shape
    batch, kv_heads, prefix, _ = prefix_keys.shape
    cache_rows = rows
    if row_map is not None:
        cache_rows = batch if suffix_keys is None else len(suffix_keys)
        fits = row_map.shape == (rows,) and row_map.dtype == torch.int64 and ancestry is None
        require(fits, "a row map must be [rows], int64, and without an ancestry")
        require(cache_rows > 0 or not rows, f"{rows} rows cannot read a KV cache of no rows")
    for what, many, few in (("rows", cache_rows, batch), ("heads", heads, kv_heads)):
        multiple = many % few == 0 if few > 0 else many == 0
        require(multiple, f"the {many} {what} of the query must be a multiple of the {few} {what} of the prefix")
    suffix, value_dim = 0 if suffix_keys is None else suffix_keys.shape[2], prefix_values.shape[3]
    for name, part, shape in (
        ("prefix_keys", prefix_keys, (batch, kv_heads, prefix, dim)),
        ("prefix_values", prefix_values, (batch, kv_heads, prefix, value_dim)),
        ("suffix_keys", suffix_keys, (cache_rows, kv_heads, suffix, dim)),
        ("suffix_values", suffix_values, (cache_rows, kv_heads, suffix, value_dim)),
    ):
        if part is not None:
            right = part.dtype == query.dtype and part.device == query.device and tuple(part.shape) == shape
            given = f"{list(part.shape)} {part.dtype} on {part.device}"
            require(right, f"{name} must be {list(shape)} {query.dtype} on {query.device}, but is {given}")
            require(part.shape[3] < 2 or part.stride(3) == 1, f"the last dimension of {name} must be contiguous")
    if suffix_lengths is not None:
        fits = suffix_lengths.numel() == 1 or suffix_lengths.shape == (rows,)
        require(fits and not suffix_lengths.is_floating_point(), "lengths must be one integer, or one for each row")
    if ancestry is not None:
        fits = ancestry.dim() == 2 and ancestry.shape[0] == rows and ancestry.shape[1] >= suffix
        require(fits and ancestry.dtype == torch.int32, f"ancestry must be [{rows}, {suffix} or more], int32")
    if mask is not None:
        scores = (rows, heads, queries, prefix + suffix)
        fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False))
        require(fits, f"the mask {list(mask.shape)} cannot be expanded to {list(scores)}")
        require(mask.dtype == torch.bool or mask.is_floating_point(), "the mask must be bool or floating")


# ---- the same with torch operations


def _by_input(x: Tensor, kv_heads: int, per_input: int) -> Tensor:
    """[rows, heads, Q, c] -> [batch, kv heads, per_input * group * Q, c]: one matrix per K and V that are read."""
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
    return _by_row(upcast(torch.matmul, _by_input(x, prefix.shape[1], per_input), prefix), x.shape[1], per_input)


def _product_with_suffix(x: Tensor, suffix: Tensor) -> Tensor:
    """[rows, heads, Q, c] x [rows, kv heads, c, d] -> [rows, heads, Q, d]."""
    rows, heads, length, width = x.shape
    kv_heads = suffix.shape[1]  # the query heads of a group read one kv head
    product = upcast(torch.matmul, x.reshape(rows, kv_heads, heads // kv_heads * length, width), suffix)
    return product.view(rows, heads, length, suffix.shape[3])


def shared_prefix_scores(query: Tensor, prefix_keys: Tensor, suffix_keys: Tensor | None) -> Tensor:
    """Query times transposed keys, without materializing the full keys: [rows, heads, Q, N + T], not scaled.

    Args:
        query: [rows, heads, Q, dim], any floating dtype; the keys have the same.
    """
    scores = _product_with_prefix(query, prefix_keys.transpose(-1, -2))
    if suffix_keys is None:
        return scores
    return torch.cat([scores, _product_with_suffix(query, suffix_keys.transpose(-1, -2))], dim=-1)


def shared_prefix_context(weights: Tensor, prefix_values: Tensor, suffix_values: Tensor | None) -> Tensor:
    """Attention weights times values, without materializing the full values: [rows, heads, Q, dim].

    Args:
        weights: [rows, heads, Q, N + T], any floating dtype; the values have the same.
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
    """`decode_attention` of any number of queries: by the kernel, or in plain torch if that is faster.

    Arguments as there, but autocast allows their types to differ. Raises RuntimeError if they do not fit.
    """
    if pays(query, (prefix_keys, prefix_values), (suffix_keys, suffix_values), mask):
        return on_cpu(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale, ancestry=ancestry)
    return composed(query, prefix_keys, prefix_values, suffix_keys, suffix_values, mask, scale, ancestry)


def pays(
    query: Tensor, prefix: tuple[Tensor, Tensor], suffix: tuple[Tensor | None, Tensor | None], mask: Tensor | None
) -> bool:
    """Whether the CPU kernel accepts these arguments of `decode_attention`, and is faster than plain torch."""
    device, dtype = query.device.type, query.dtype
    if device != "cpu" or dtype not in MAX_ROWS or (dtype.itemsize == 2 and not _converts_halves()):
        return False
    if query.dim() != 4 or prefix[0].dim() != 4 or not reads_ancestry(device):
        return False
    if query.shape[:3].numel() > prefix[0].shape[:2].numel() * MAX_ROWS[dtype][suffix[0] is not None]:
        return False
    kv = (*prefix, *suffix)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, *kv, mask)):
        return False
    if any(x is not None and (x.stride(-1) != 1 or x.dtype != dtype) for x in kv):
        return False
    # Under autocast, the result must have autocast's type.
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == dtype


@functools.cache
def _converts_halves() -> bool:
    """Whether the kernel reads half precision with dedicated instructions."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


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
    """Attention of any number of queries, with torch operations; autocast handles differing types.

    Half-precision scores and weights are rounded, as in torch; `reference` computes in float32.
    """
    if not query.shape[:3].numel():
        return query.new_empty(*query.shape[:3], prefix_values.shape[3])
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if suffix_keys is None or suffix_values is None:
        return _prefix_attention(query, prefix_keys, prefix_values, mask, scale)
    if ancestry is not None:
        suffix_keys, suffix_values = gather_suffix(suffix_keys, ancestry), gather_suffix(suffix_values, ancestry)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    # Scales the query instead of the scores: it is the smaller tensor by far.
    scores = shared_prefix_scores(query * scale, prefix_keys, suffix_keys)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(mask.logical_not(), float("-inf"))
        else:
            # Converting the mask to half precision would turn float32's lowest number into -inf.
            scores = scores.add_(mask) if mask.dtype == scores.dtype else scores + mask
    # Half-precision scores are normalised in float32, as fused kernels do.
    normalised = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=normalised).to(query.dtype)
    if mask is not None:
        # A query that may attend to nothing has no weights; the result is zero, as from fused kernels.
        nothing = mask.logical_not() if mask.dtype == torch.bool else mask.isneginf()
        weights = weights.masked_fill_(nothing.all(dim=-1, keepdim=True), 0.0)
    return shared_prefix_context(weights, prefix_values, suffix_values)


def gather_suffix(suffix: Tensor, ancestry: Tensor) -> Tensor:
    """Gathers the suffix [rows, kv heads, T, dim]: position t of row r comes from row `ancestry[r, t]`, [rows, T]."""
    positions = torch.arange(suffix.shape[2], device=suffix.device)
    return suffix.transpose(1, 2)[ancestry.long(), positions].transpose(1, 2)


def _prefix_attention(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """`composed` without a suffix: one fused kernel, whose rows are the sequences of an input."""
    rows, heads, length, _ = query.shape
    batch, kv_heads, prefix_length, _ = prefix_keys.shape
    per_input = rows // batch
    if mask is not None:
        # A mask for all heads stays one; query heads of a group become rows, each of which needs a row of the mask.
        mask_heads = 1 if mask.shape[1] == 1 else kv_heads
        mask = mask.expand(rows, mask_heads * (heads // kv_heads), length, prefix_length)
        mask = _by_input(mask, mask_heads, per_input)
    context = F.scaled_dot_product_attention(
        _by_input(query, kv_heads, per_input), prefix_keys, prefix_values, attn_mask=mask, scale=scale
    )
    return _by_row(context, heads, per_input)


_library.define(
    "decode_attention_out(Tensor(a!) out, Tensor query, Tensor prefix_keys, Tensor prefix_values, Tensor? suffix_keys, "
    "Tensor? suffix_values, Tensor? mask, float? scale, Tensor? starts, Tensor? ends, Tensor? suffix_lengths, "
    "Tensor? ancestry, int? window, bool causal, Tensor? row_map) -> ()"
)
OPERATOR = torch.ops.fastgen.decode_attention_out.default
