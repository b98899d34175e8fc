# mypy: ignore-errors
"""The kernels of decode_attention.py. Importing this needs Triton."""

import triton
import triton.language as tl

# Exponentials are taken to the base two, which is what the hardware has.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _take_in(
    q, k, v, seen, bias, maximum, total, context, scale,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One block of keys and values into the running softmax of all rows of the tile."""
    scores = _dot(q, tl.trans(k), PRECISION, WIDEN) * scale
    if HAS_BIAS:
        scores += bias
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet: subtracting minus infinity from itself would give NaN.
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(maximum - base)
    total = total * fade + tl.sum(weights, 1)
    context = context * fade[:, None] + _dot(weights.to(v.dtype), v, PRECISION, WIDEN)
    return new_maximum, total, context


@triton.jit
def attend(
    query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts, ends, suffix_length, ancestry, bias,
    out, part_maximum, part_total, part_context,
    prefix_length, capacity, window, kv_heads, scale,
    q_row, q_head, pk_batch, pk_head, pk_place, pv_batch, pv_head, pv_place,
    sk_row, sk_head, sk_place, sv_row, sv_head, sv_place,
    ancestry_row, bias_row, bias_head, bias_place, out_row, out_head, queries, splits,
    PER_INPUT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    M_TILES: tl.constexpr, IN_PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr, HAS_SUFFIX: tl.constexpr, HAS_ANCESTRY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile: the queries of one input that read the same K/V head, over one part of the blocks of keys.

    The blocks of an input are those of its prefix, and then those of the suffix of each of its rows. All queries of the
    tile are multiplied with all of them. A query's own history consists of suffix positions of several rows: which, is
    in the ancestry table, and the products with what is not its history are masked. They cost arithmetic, of which
    there is plenty, and in return every key is read once per input, in one piece, and the products are matrix products.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = tile % M_TILES
    kv_head = (tile // M_TILES) % kv_heads
    batch = (tile // M_TILES) // kv_heads

    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < PER_INPUT * GROUP
    # Offsets of whole rows and heads are 64 bit: a cache is soon larger than 2^31 elements.
    row = (batch * PER_INPUT + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    wide = batch.to(tl.int64)
    wide_head = kv_head.to(tl.int64)
    q = tl.load(
        query + (row * q_row + head * q_head)[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0
    )

    # The places that count, all read on the device: [start, end) of the prefix and [first, length) of the suffix.
    start = 0
    end = prefix_length
    if HAS_STARTS:
        start = tl.maximum(tl.load(starts + batch).to(tl.int32), 0)
    if HAS_ENDS:
        end = tl.minimum(tl.load(ends + batch).to(tl.int32), prefix_length)
    length = 0
    first = 0
    if HAS_SUFFIX:
        length = tl.minimum(tl.maximum(tl.load(suffix_length).to(tl.int32), 0), capacity)
    if HAS_WINDOW:
        start = tl.maximum(start, prefix_length + length - window)
        first = tl.maximum(length - window, 0)
    prefix_blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    suffix_blocks = tl.cdiv(tl.maximum(length - first, 0), BLOCK_N)
    blocks = prefix_blocks + PER_INPUT * suffix_blocks
    share = tl.cdiv(blocks, splits)
    low = split * share
    high = tl.minimum(low + share, blocks)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    keys = prefix_keys + wide * pk_batch + wide_head * pk_head
    values = prefix_values + wide * pv_batch + wide_head * pv_head
    for block in range(low, tl.minimum(high, prefix_blocks)):
        place = start + block * BLOCK_N + n
        inside = place < end
        # Padding is not read at all.
        k = tl.load(
            keys + (place * pk_place)[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
        )
        v = tl.load(
            values + (place * pv_place)[:, None] + e[None, :], mask=inside[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(
                bias + (row * bias_row + head * bias_head)[:, None] + (place * bias_place)[None, :],
                mask=real[:, None] & inside[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
        maximum, total, context = _take_in(
            q, k, v, inside[None, :], added, maximum, total, context, scale, HAS_BIAS, PRECISION, WIDEN
        )

    if HAS_SUFFIX:
        for block in range(tl.maximum(low, prefix_blocks), high):
            # The rows of an input take turns at the same positions: the part of the table they share stays in cache.
            copy = (block - prefix_blocks) % PER_INPUT
            place = first + (block - prefix_blocks) // PER_INPUT * BLOCK_N + n
            inside = place < length
            source = wide * PER_INPUT + copy
            if HAS_ANCESTRY:
                parents = tl.load(
                    ancestry + (row * ancestry_row)[:, None] + place[None, :],
                    mask=real[:, None] & inside[None, :], other=-1,
                )  # fmt: skip
                mine = parents == source
            else:
                mine = (row == source)[:, None] & real[:, None] & inside[None, :]
            # What no row descends from any more is not read.
            alive = tl.max(mine.to(tl.int32), 0) > 0
            k = tl.load(
                suffix_keys + source * sk_row + wide_head * sk_head + (place * sk_place)[:, None] + d[None, :],
                mask=alive[:, None] & (d < DIM)[None, :], other=0.0,
            )  # fmt: skip
            v = tl.load(
                suffix_values + source * sv_row + wide_head * sv_head + (place * sv_place)[:, None] + e[None, :],
                mask=alive[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            if HAS_BIAS:
                added = tl.load(
                    bias
                    + (row * bias_row + head * bias_head)[:, None]
                    + ((prefix_length + place) * bias_place)[None, :],
                    mask=real[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
            maximum, total, context = _take_in(
                q, k, v, mine, added, maximum, total, context, scale, HAS_BIAS, PRECISION, WIDEN
            )

    if not IN_PARTS:
        # A row that sees nothing has no weights: zeros, as fused kernels give.
        context = context / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (row * out_row + head * out_head)[:, None] + e[None, :], context.to(out.dtype.element_ty),
            mask=real[:, None] & (e < VALUE_DIM)[None, :],
        )  # fmt: skip
    else:
        # Parts lie as [split, query, ...]; a split without blocks says so by a maximum of minus infinity.
        at = split.to(tl.int64) * queries + row * (kv_heads * GROUP) + head
        tl.store(part_maximum + at, maximum, mask=real)
        tl.store(part_total + at, total, mask=real)
        tl.store(
            part_context + (at * VALUE_DIM)[:, None] + e[None, :], context,
            mask=real[:, None] & (e < VALUE_DIM)[None, :],
        )  # fmt: skip


@triton.jit
def merge(
    part_maximum, part_total, part_context, out, heads, queries, splits, out_row, out_head,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The parts of one query into its context, all scaled to the largest maximum: no part can overflow."""
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    head = at % heads
    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_V)
    part = s.to(tl.int64) * queries + at
    maxima = tl.load(part_maximum + part, mask=s < splits, other=float("-inf"))
    totals = tl.load(part_total + part, mask=s < splits, other=0.0)
    contexts = tl.load(
        part_context + (part * VALUE_DIM)[:, None] + e[None, :],
        mask=(s < splits)[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
    )  # fmt: skip
    base = tl.max(maxima, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    fade = tl.exp2(maxima - base)
    total = tl.sum(totals * fade, 0)
    context = tl.sum(contexts * fade[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + e, context.to(out.dtype.element_ty), mask=e < VALUE_DIM)
