# mypy: ignore-errors
"""The kernels of grouped_linear.py. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def _factors(part, k, group, n, is_there, inputs, outputs):
    """A scale, zero or minimum for each number of a tile, [outputs, inputs]."""
    inside = is_there[:, None] & (k < inputs)[None, :]
    return tl.load(part + (k // group).to(tl.int64)[None, :] * outputs + n[:, None], mask=inside, other=0)


@triton.jit
def _values(
    numbers, k, n, is_there, scales, zeros, minimums, group, inputs, outputs,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """What the numbers of a tile stand for, in float32; 0 for those beyond the inputs."""
    scale = _factors(scales, k, group, n, is_there, inputs, outputs).to(tl.float32)
    if HAS_MINIMUMS:
        least = _factors(minimums, k, group, n, is_there, inputs, outputs).to(tl.float32)
        return numbers.to(tl.float32) * scale + least
    if HAS_ZEROS:
        whole = numbers.to(tl.int16) - _factors(zeros, k, group, n, is_there, inputs, outputs).to(tl.int16)
    else:
        whole = numbers.to(tl.int16) - (1 << (BITS - 1))
    return whole.to(tl.float32) * scale


@triton.jit
def _add(
    numbers, x, k, sums, total, n, is_output, zero, scales, zeros, minimums, group, inputs, outputs,
    BITS: tl.constexpr, BY_NUMBER: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds the product of a tile of numbers, [outputs, inputs], with one of x, [rows, inputs].

    In a tile of one group the numbers are multiplied as they are, less the zero: float16 and bfloat16 hold them
    exactly, and the scale comes after the sum. `sums` is what x adds up to, for the minimums.
    """
    if BY_NUMBER:
        weight = _values(
            numbers, k, n, is_output, scales, zeros, minimums, group, inputs, outputs, BITS, HAS_ZEROS, HAS_MINIMUMS
        )
        x = x.to(tl.float32)
    else:
        if HAS_MINIMUMS:
            sums += tl.sum(x.to(tl.float32), 1)
        weight = (numbers.to(tl.int16) - zero).to(tl.float32).to(x.dtype)
        if WIDEN:
            weight = weight.to(tl.float32)
            x = x.to(tl.float32)
    # float32 means float32: without this, Triton would round the operands to tf32, which has 10 bits.
    return sums, tl.dot(weight, tl.trans(x), total, input_precision="ieee")


@triton.jit
def _of_block(part, block, high, n, group, outputs, BLOCK_K: tl.constexpr):
    """The scale, zero or minimum of each output, of the one group that a block of inputs is in."""
    at = (block * BLOCK_K // group).to(tl.int64) * outputs + n
    return tl.load(part + at, mask=n < tl.where(block < high, outputs, 0), other=0)


@triton.jit
def grouped_product(
    x, numbers, scales, zeros, minimums, bias, out,
    rows, outputs, inputs, x_row, line, group, blocks, splits,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_NUMBER: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, over one part of the blocks of inputs.

    The weight is the first operand: its numbers go from their bytes to the tensor cores within registers, and few rows
    fill less of a tile than they would as the first one.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    is_output, is_row = n < outputs, m < rows
    lines = numbers + n.to(tl.int64)[:, None] * line
    x_rows = x + m.to(tl.int64)[:, None] * x_row
    share = tl.cdiv(blocks, splits)
    low = split * share
    high = tl.minimum(low + share, blocks)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Factors are loaded a block ahead: only what tensor cores read is copied ahead by itself.
    zero = tl.full([BLOCK_N], 0 if HAS_MINIMUMS else 1 << (BITS - 1), tl.int16)
    if not BY_NUMBER:
        scale = _of_block(scales, low, high, n, group, outputs, BLOCK_K)
        if HAS_ZEROS:
            zero = _of_block(zeros, low, high, n, group, outputs, BLOCK_K).to(tl.int16)
        if HAS_MINIMUMS:
            least = _of_block(minimums, low, high, n, group, outputs, BLOCK_K)
    for block in range(low, high):
        first = block * BLOCK_K
        now = zero[:, None]
        if not BY_NUMBER:
            scale_now = scale.to(tl.float32)[:, None]
            scale = _of_block(scales, block + 1, high, n, group, outputs, BLOCK_K)
            if HAS_ZEROS:
                zero = _of_block(zeros, block + 1, high, n, group, outputs, BLOCK_K).to(tl.int16)
            if HAS_MINIMUMS:
                least_now = least.to(tl.float32)[:, None]
                least = _of_block(minimums, block + 1, high, n, group, outputs, BLOCK_K)
        sums = tl.zeros([BLOCK_M], tl.float32)
        part = total if BY_NUMBER else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BITS == 4:
            i = tl.arange(0, BLOCK_K // 2)
            at = block * (BLOCK_K // 2) + i
            pairs = tl.load(lines + at[None, :], mask=is_output[:, None] & (at < line)[None, :], other=0)
            k = first + i // 16 * 32 + i % 16
            x_low = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < inputs)[None, :], other=0.0)
            x_high = tl.load(x_rows + (k + 16)[None, :], mask=is_row[:, None] & (k + 16 < inputs)[None, :], other=0.0)
            sums, part = _add(
                pairs & 15, x_low, k, sums, part, n, is_output, now, scales, zeros, minimums, group, inputs, outputs,
                BITS, BY_NUMBER, HAS_ZEROS, HAS_MINIMUMS, WIDEN,
            )  # fmt: skip
            sums, part = _add(
                pairs >> 4, x_high, k + 16, sums, part, n, is_output, now, scales, zeros, minimums, group, inputs,
                outputs, BITS, BY_NUMBER, HAS_ZEROS, HAS_MINIMUMS, WIDEN,
            )  # fmt: skip
        else:
            k = first + tl.arange(0, BLOCK_K)
            whole = tl.load(lines + k[None, :], mask=is_output[:, None] & (k < line)[None, :], other=0)
            x_tile = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < inputs)[None, :], other=0.0)
            sums, part = _add(
                whole, x_tile, k, sums, part, n, is_output, now, scales, zeros, minimums, group, inputs, outputs,
                BITS, BY_NUMBER, HAS_ZEROS, HAS_MINIMUMS, WIDEN,
            )  # fmt: skip
        if BY_NUMBER:
            total = part
        else:
            total += part * scale_now
            if HAS_MINIMUMS:
                total += least_now * sums[None, :]
    if HAS_BIAS and not IN_PARTS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # Parts lie as [split, row, output].
    to = out + (split * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit
def add_parts(parts, bias, out, size, outputs, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of a product, added in their order: the result is the same every time."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    part = parts + at
    for _ in range(splits):
        total += tl.load(part, mask=inside, other=0.0)
        part += size
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def grouped_lines(
    numbers, scales, zeros, minimums, which, out, begin, count, outputs, inputs, line, group,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_WHICH: tl.constexpr,
):  # fmt: skip
    """Some lines of the weight in floating point: `count` of them from `begin` on, or those that `which` names."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = begin + row
    if HAS_WHICH:
        n = tl.load(which + row, mask=row < count, other=-1).to(tl.int64)
    is_there = (row < count) & (n >= 0) & (n < outputs)
    lines = numbers + n[:, None] * line
    i = tl.arange(0, BLOCK_K)
    at = tl.program_id(1) * BLOCK_K + i
    found = tl.load(lines + at[None, :], mask=is_there[:, None] & (at < line)[None, :], other=0)
    for half in tl.static_range(8 // BITS):
        if BITS == 4:
            k = at // 16 * 32 + at % 16 + half * 16
            whole = (found >> (4 * half)) & 15
        else:
            k = at
            whole = found
        value = _values(
            whole, k, n, is_there, scales, zeros, minimums, group, inputs, outputs, BITS, HAS_ZEROS, HAS_MINIMUMS
        )
        # A line that is not there is made of NaN: there is nobody on the device who could raise.
        value = tl.where(is_there[:, None], value, float("nan"))
        to = out + row[:, None] * inputs + k[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(row < count)[:, None] & (k < inputs)[None, :])
