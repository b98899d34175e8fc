# mypy: ignore-errors
"""The operators' kernels. Importing this module needs Triton."""

import triton
import triton.language as tl

# Exponentials use base two, which the hardware provides.
LOG2E = tl.constexpr(1.4426950408889634)


# ---- decode_attention


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _take_in(
    q, k, v, attended, bias, maximum, total, context, scale,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys and values to the running softmax of all rows of the tile."""
    scores = _dot(q, tl.trans(k), PRECISION, WIDEN) * scale
    if HAS_BIAS:
        scores += bias
    scores = tl.where(attended, scores * LOG2E, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has attended to nothing yet: subtracting minus infinity from itself would give NaN.
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
    q_row, q_head, pk_batch, pk_head, pk_position, pv_batch, pv_head, pv_position,
    sk_row, sk_head, sk_position, sv_row, sv_head, sv_position,
    length_row, ancestry_row, bias_row, bias_head, bias_position, splits,
    PER_INPUT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    M_TILES: tl.constexpr, IN_PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr, HAS_SUFFIX: tl.constexpr, HAS_ANCESTRY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Processes one tile: the queries of one input that read the same K/V head, over one part of the blocks of keys.

    The blocks of an input are those of its prefix, followed by those of the suffix of each of its rows. All queries of
    the tile are multiplied with all blocks. A query's own history consists of suffix positions of several rows, which
    the ancestry table names; products with other positions are masked. These cost arithmetic, of which there is plenty;
    in return, every key is read once per input, contiguously, and the products are matrix products.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = tile % M_TILES
    kv_head = (tile // M_TILES) % kv_heads
    batch = (tile // M_TILES) // kv_heads

    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < PER_INPUT * GROUP
    # Offsets of whole rows and heads are 64-bit: a cache easily exceeds 2^31 elements.
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

    # The positions that count, all read on the device: [start, end) of the prefix and [first, length) of the suffix,
    # for all rows of the tile together. A single row reads up to its `lengths`, and with a window from its `begins` on,
    # counted over prefix and suffix together.
    start = 0
    end = prefix_length
    if HAS_STARTS:
        start = tl.maximum(tl.load(starts + batch).to(tl.int32), 0)
    if HAS_ENDS:
        end = tl.minimum(tl.load(ends + batch).to(tl.int32), prefix_length)
    length = 0
    first = 0
    lengths = tl.zeros([BLOCK_M], tl.int32)
    if HAS_SUFFIX:
        # Lengths of rows outside the input would distort the maximum and the minimum.
        filled = tl.load(suffix_length + tl.where(real, row, batch * PER_INPUT) * length_row)
        lengths = tl.minimum(tl.maximum(filled, 0), capacity).to(tl.int32)
        length = tl.max(lengths, 0)
        # Each of a row's queries but the last does not see the positions after its own.
        lengths -= QUERIES - 1 - m % GROUP % QUERIES
    if HAS_WINDOW:
        begins = prefix_length + lengths - window
        start = tl.maximum(start, tl.min(begins, 0))
        first = tl.maximum(tl.min(begins, 0) - prefix_length, 0)
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
        position = start + block * BLOCK_N + n
        inside = position < end
        # Padding is not read at all.
        k = tl.load(
            keys + (position * pk_position)[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
        )
        v = tl.load(
            values + (position * pv_position)[:, None] + e[None, :], mask=inside[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(
                bias + (row * bias_row + head * bias_head)[:, None] + (position * bias_position)[None, :],
                mask=real[:, None] & inside[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
        attended = inside[None, :]
        if HAS_WINDOW:
            attended = attended & (position[None, :] >= begins[:, None])
        maximum, total, context = _take_in(
            q, k, v, attended, added, maximum, total, context, scale, HAS_BIAS, PRECISION, WIDEN
        )

    if HAS_SUFFIX:
        for block in range(tl.maximum(low, prefix_blocks), high):
            # The rows of an input alternate at the same positions, so that the part of the table that they share stays
            # in cache.
            copy = (block - prefix_blocks) % PER_INPUT
            position = first + (block - prefix_blocks) // PER_INPUT * BLOCK_N + n
            inside = real[:, None] & (position[None, :] < lengths[:, None])
            if HAS_WINDOW:
                inside = inside & (prefix_length + position[None, :] >= begins[:, None])
            source = wide * PER_INPUT + copy
            if HAS_ANCESTRY:
                parents = tl.load(ancestry + (row * ancestry_row)[:, None] + position[None, :], mask=inside, other=-1)
                mine = parents == source
            else:
                mine = (row == source)[:, None] & inside
            # Positions that are in no row's beam ancestry any more are not read.
            alive = tl.max(mine.to(tl.int32), 0) > 0
            k = tl.load(
                suffix_keys + source * sk_row + wide_head * sk_head + (position * sk_position)[:, None] + d[None, :],
                mask=alive[:, None] & (d < DIM)[None, :], other=0.0,
            )  # fmt: skip
            v = tl.load(
                suffix_values + source * sv_row + wide_head * sv_head + (position * sv_position)[:, None] + e[None, :],
                mask=alive[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            if HAS_BIAS:
                added = tl.load(
                    bias
                    + (row * bias_row + head * bias_head)[:, None]
                    + ((prefix_length + position) * bias_position)[None, :],
                    mask=inside, other=0.0,
                ).to(tl.float32)  # fmt: skip
            maximum, total, context = _take_in(
                q, k, v, mine, added, maximum, total, context, scale, HAS_BIAS, PRECISION, WIDEN
            )

    at = row * (kv_heads * GROUP) + head
    inside = real[:, None] & (e < VALUE_DIM)[None, :]
    if not IN_PARTS:
        # A row that sees nothing has no weights: its result is zero, as from fused kernels.
        context = context / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + (at * VALUE_DIM)[:, None] + e[None, :], context.to(out.dtype.element_ty), mask=inside)
    else:
        # Parts are laid out as [query, split, ...]; a split without blocks has a maximum of minus infinity.
        at = at * splits + split
        tl.store(part_maximum + at, maximum, mask=real)
        tl.store(part_total + at, total, mask=real)
        tl.store(part_context + (at * VALUE_DIM)[:, None] + e[None, :], context, mask=inside)


@triton.jit
def merge(
    part_maximum, part_total, part_context, out, splits,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one query into its context. All are scaled to the largest maximum, so that none overflows."""
    at = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_V)
    part = at * splits + s
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
    tl.store(out + at * VALUE_DIM + e, context.to(out.dtype.element_ty), mask=e < VALUE_DIM)


# ---- best_candidates
#
# A candidate is one 64-bit number: the upper half holds its score, in a form whose integer order is that of the floats;
# the lower half holds its index, counted down. The largest number is then the best candidate, and of two with the same
# score the one that comes first.

_NONE = tl.constexpr(-(2**63))


@triton.jit
def _pack(score, index):
    # -0 and 0 are equal, and NaN, of either sign, is above everything else, as in torch.topk.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score != score, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _unpack(key):
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    index = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def best_of_parts(
    scores, part_best, part_maximum, part_total, vocabulary, row_stride, column_stride,
    KEEP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Processes one part of the vocabulary of one row: its best candidates, and its share of the softmax's denominator.

    Within a row, the log-softmax keeps the order of the scores: the best are known before its denominator is.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    score = tl.load(
        scores + row * row_stride + token.to(tl.int64) * column_stride, mask=inside, other=float("-inf")
    ).to(tl.float32)
    at = row * PARTS + part
    if NORMALISE:
        maximum = tl.max(score, 0)
        base = tl.where(maximum == float("-inf"), 0.0, maximum)
        tl.store(part_maximum + at, maximum)
        tl.store(part_total + at, tl.sum(tl.exp(score - base), 0))
    keys = tl.where(inside, _pack(score, token), _NONE)
    for k in range(KEEP):
        best = tl.max(keys, 0)
        tl.store(part_best + at * KEEP + k, best)
        keys = tl.where(keys == best, _NONE, keys)


@triton.jit
def best_of_beams(
    part_best, part_maximum, part_total, running, out_scores, out_beams, out_tokens, vocabulary,
    BEAMS: tl.constexpr, BLOCK_BEAMS: tl.constexpr, KEEP: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK_CANDIDATES: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, WANTED: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Processes one input: takes the best candidates of its beams."""
    batch = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BLOCK_BEAMS)
    real = beam < BEAMS
    row = batch * BEAMS + beam
    candidate = tl.arange(0, BLOCK_CANDIDATES)
    inside = real[:, None] & (candidate < CANDIDATES)[None, :]
    keys = tl.load(part_best + (row * CANDIDATES)[:, None] + candidate[None, :], mask=inside, other=_NONE)
    inside = inside & (keys != _NONE)
    score, token = _unpack(keys)
    if NORMALISE:
        part = tl.arange(0, BLOCK_PARTS)
        there = real[:, None] & (part < PARTS)[None, :]
        at = (row * PARTS)[:, None] + part[None, :]
        maxima = tl.load(part_maximum + at, mask=there, other=float("-inf"))
        totals = tl.load(part_total + at, mask=there, other=0.0)
        maximum = tl.max(maxima, 1)
        base = tl.where(maximum == float("-inf"), 0.0, maximum)
        # A part of minus infinities has added exp(-inf) = 0 for each; its maximum keeps it from counting twice.
        total = tl.sum(totals * tl.exp(maxima - base[:, None]), 1)
        score = (score - maximum[:, None]) - tl.log(total)[:, None]
    score += tl.load(running + row, mask=real, other=0.0).to(tl.float32)[:, None]
    keys = tl.where(inside, _pack(score, beam[:, None] * vocabulary + token), _NONE)
    for k in range(WANTED):
        best = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == best, _NONE, keys)
        found, index = _unpack(best)
        tl.store(out_scores + batch * WANTED + k, found)
        tl.store(out_beams + batch * WANTED + k, (index // vocabulary).to(tl.int64))
        tl.store(out_tokens + batch * WANTED + k, (index % vocabulary).to(tl.int64))


# ---- kv_write


@triton.jit
def write(
    keys, values, key_cache, value_cache, position,
    heads, capacity, position_row, k_row, k_head, v_row, v_head,
    kc_row, kc_head, kc_position, vc_row, vc_head, vc_position,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes some heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.load(position + row * position_row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    # A position outside the cache writes nothing, because nothing on the device can raise.
    valid = head < tl.where((at >= 0) & (at < capacity), heads, 0)
    inside = valid[:, None] & (d < DIM)[None, :]
    new = tl.load(keys + row * k_row + (head * k_head)[:, None] + d[None, :], mask=inside)
    tl.store(key_cache + row * kc_row + at * kc_position + (head * kc_head)[:, None] + d[None, :], new, mask=inside)
    inside = valid[:, None] & (d < VALUE_DIM)[None, :]
    new = tl.load(values + row * v_row + (head * v_head)[:, None] + d[None, :], mask=inside)
    tl.store(value_cache + row * vc_row + at * vc_position + (head * vc_head)[:, None] + d[None, :], new, mask=inside)


# ---- norm


@triton.jit
def rms_norm(
    x, weight, out, x_row, width, eps, offset,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROUND_SCALED: tl.constexpr,
):  # fmt: skip
    """Normalises one row: in one block if it fits, so that it is read once; in several, read twice, otherwise."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    out += row * width
    i = tl.arange(0, BLOCK)
    if BLOCKS == 1:
        value = tl.load(x + i, mask=i < width, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
        _store(out, weight, i, i < width, value * scale, offset, ROUND_SCALED)
    else:
        squares = 0.0
        for block in range(BLOCKS):
            at = block * BLOCK + i
            value = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
            squares += tl.sum(value * value, 0)
        scale = 1.0 / tl.sqrt(squares / width + eps)
        for block in range(BLOCKS):
            at = block * BLOCK + i
            value = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
            _store(out, weight, at, at < width, value * scale, offset, ROUND_SCALED)


@triton.jit
def _store(out, weight, at, inside, value, offset, ROUND_SCALED: tl.constexpr):
    if ROUND_SCALED:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
