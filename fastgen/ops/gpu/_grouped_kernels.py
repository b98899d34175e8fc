# mypy: ignore-errors
"""The kernels of `fastgen.ops.linear.on_gpu`. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def _factors(part, k, group, n, exists, K, N):
    """Returns a scale, zero point or min for each element of a tile, [N, K]."""
    inside = exists[:, None] & (k < K)[None, :]
    return tl.load(part + (k // group).to(tl.int64)[None, :] * N + n[:, None], mask=inside, other=0)


@triton.jit
def _values(
    qweight, k, n, exists, scales, zeros, mins, group, K, N,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr,
):  # fmt: skip
    """Returns the dequantised weight of a tile, in float32; 0 beyond K."""
    scale = _factors(scales, k, group, n, exists, K, N).to(tl.float32)
    if HAS_MINS:
        least = _factors(mins, k, group, n, exists, K, N).to(tl.float32)
        return qweight.to(tl.float32) * scale + least
    if HAS_ZEROS:
        whole = qweight.to(tl.int16) - _factors(zeros, k, group, n, exists, K, N).to(tl.int16)
    else:
        whole = qweight.to(tl.int16) - (1 << (BITS - 1))
    return whole.to(tl.float32) * scale


@triton.jit
def _add(
    qweight, x, k, sums, total, n, is_output, zero, scales, zeros, mins, group, K, N,
    BITS: tl.constexpr, BY_ELEMENT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds the product of a tile of the weight, [N, K], and a tile of x, [M, K].

    In a tile of one group, the zero point is subtracted before the product: float16 and bfloat16 hold the difference
    exactly; the scale is applied to the sum. `sums` are the sums of x, for the mins.
    """
    if BY_ELEMENT:
        weight = _values(qweight, k, n, is_output, scales, zeros, mins, group, K, N, BITS, HAS_ZEROS, HAS_MINS)
        x = x.to(tl.float32)
    else:
        if HAS_MINS:
            sums += tl.sum(x.to(tl.float32), 1)
        weight = (qweight.to(tl.int16) - zero).to(tl.float32).to(x.dtype)
        if WIDEN:
            weight = weight.to(tl.float32)
            x = x.to(tl.float32)
    # Keeps float32 accurate: by default, Triton would round the operands to tf32, which has 10 bits.
    return sums, tl.dot(weight, tl.trans(x), total, input_precision="ieee")


@triton.jit
def _of_block(part, block, high, n, group, N, BLOCK_K: tl.constexpr):
    """Returns the scale, zero point or min of each n, for the one group that a block of K belongs to."""
    at = (block * BLOCK_K // group).to(tl.int64) * N + n
    return tl.load(part + at, mask=n < tl.where(block < high, N, 0), other=0)


@triton.jit
def grouped_product(
    x, qweight, scales, zeros, mins, bias, out,
    M, N, K, x_stride, row_bytes, group, blocks, splits,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_ELEMENT: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes a tile of N, for all M, over one part of the blocks of K.

    The weight is the first operand: it is unpacked in registers on its way to the tensor cores, and a few rows of x
    fill a smaller tile than they would as the first operand.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    is_output, is_row = n < N, m < M
    w_rows = qweight + n.to(tl.int64)[:, None] * row_bytes
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    share = tl.cdiv(blocks, splits)
    low = split * share
    high = tl.minimum(low + share, blocks)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Loads factors a block ahead: only the operands of tensor cores are prefetched automatically.
    zero = tl.full([BLOCK_N], 0 if HAS_MINS else 1 << (BITS - 1), tl.int16)
    if not BY_ELEMENT:
        scale = _of_block(scales, low, high, n, group, N, BLOCK_K)
        if HAS_ZEROS:
            zero = _of_block(zeros, low, high, n, group, N, BLOCK_K).to(tl.int16)
        if HAS_MINS:
            least = _of_block(mins, low, high, n, group, N, BLOCK_K)
    for block in range(low, high):
        first = block * BLOCK_K
        now = zero[:, None]
        if not BY_ELEMENT:
            scale_now = scale.to(tl.float32)[:, None]
            scale = _of_block(scales, block + 1, high, n, group, N, BLOCK_K)
            if HAS_ZEROS:
                zero = _of_block(zeros, block + 1, high, n, group, N, BLOCK_K).to(tl.int16)
            if HAS_MINS:
                least_now = least.to(tl.float32)[:, None]
                least = _of_block(mins, block + 1, high, n, group, N, BLOCK_K)
        sums = tl.zeros([BLOCK_M], tl.float32)
        part = total if BY_ELEMENT else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BITS == 4:
            i = tl.arange(0, BLOCK_K // 2)
            at = block * (BLOCK_K // 2) + i
            pairs = tl.load(w_rows + at[None, :], mask=is_output[:, None] & (at < row_bytes)[None, :], other=0)
            k = first + i // 16 * 32 + i % 16
            x_low = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
            x_high = tl.load(x_rows + (k + 16)[None, :], mask=is_row[:, None] & (k + 16 < K)[None, :], other=0.0)
            sums, part = _add(
                pairs & 15, x_low, k, sums, part, n, is_output, now, scales, zeros, mins, group, K, N,
                BITS, BY_ELEMENT, HAS_ZEROS, HAS_MINS, WIDEN,
            )  # fmt: skip
            sums, part = _add(
                pairs >> 4, x_high, k + 16, sums, part, n, is_output, now, scales, zeros, mins, group, K, N,
                BITS, BY_ELEMENT, HAS_ZEROS, HAS_MINS, WIDEN,
            )  # fmt: skip
        else:
            k = first + tl.arange(0, BLOCK_K)
            whole = tl.load(w_rows + k[None, :], mask=is_output[:, None] & (k < row_bytes)[None, :], other=0)
            x_tile = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
            sums, part = _add(
                whole, x_tile, k, sums, part, n, is_output, now, scales, zeros, mins, group, K, N,
                BITS, BY_ELEMENT, HAS_ZEROS, HAS_MINS, WIDEN,
            )  # fmt: skip
        if BY_ELEMENT:
            total = part
        else:
            total += part * scale_now
            if HAS_MINS:
                total += least_now * sums[None, :]
    if HAS_BIAS and not IN_PARTS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # Parts are laid out as [split, M, N].
    to = out + (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit
def add_parts(parts, bias, out, size, N, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the parts of a product in a fixed order, so that the result is reproducible."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    part = parts + at
    for _ in range(splits):
        total += tl.load(part, mask=inside, other=0.0)
        part += size
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def grouped_rows(
    qweight, scales, zeros, mins, which, out, begin, count, N, K, row_bytes, group,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, HAS_WHICH: tl.constexpr,
):  # fmt: skip
    """Dequantises some weight rows: `count` of them from `begin` on, or those that `which` names."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = begin + row
    if HAS_WHICH:
        n = tl.load(which + row, mask=row < count, other=-1).to(tl.int64)
    exists = (row < count) & (n >= 0) & (n < N)
    w_rows = qweight + n[:, None] * row_bytes
    i = tl.arange(0, BLOCK_K)
    at = tl.program_id(1) * BLOCK_K + i
    found = tl.load(w_rows + at[None, :], mask=exists[:, None] & (at < row_bytes)[None, :], other=0)
    for half in tl.static_range(8 // BITS):
        if BITS == 4:
            k = at // 16 * 32 + at % 16 + half * 16
            whole = (found >> (4 * half)) & 15
        else:
            k = at
            whole = found
        value = _values(whole, k, n, exists, scales, zeros, mins, group, K, N, BITS, HAS_ZEROS, HAS_MINS)
        # A row that does not exist is NaN, because nothing on the device can raise.
        value = tl.where(exists[:, None], value, float("nan"))
        to = out + row[:, None] * K + k[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(row < count)[:, None] & (k < K)[None, :])
