# mypy: ignore-errors
"""The kernels of norm.py. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def norm(
    x, residual, weight, bias, out, summed, x_row, residual_row, out_row, summed_row, width, eps, offset,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_SUM: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ROUND_SCALED: tl.constexpr,
):  # fmt: skip
    """One row, in one block where it fits, so that it is read once; in several, and read anew, where it does not.

    The mean of a row in several blocks, and the squared distances from it, are merged block by block (Chan's formula):
    the difference of two sums of large numbers would lose the digits that count.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if BLOCKS == 1:
        inside = i < width
        value = _load(x, residual, row, x_row, residual_row, i, inside, HAS_RESIDUAL, ROUND_FIRST)
        if STORE_SUM:
            tl.store(summed + row * summed_row + i, value.to(summed.dtype.element_ty), mask=inside)
        mean = 0.0
        if not RMS:
            mean = tl.sum(value, 0) / width
        distance = tl.where(inside, value - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(distance * distance, 0) / width + eps)
        _store(out, weight, bias, row, out_row, i, inside, distance * scale, offset, HAS_WEIGHT, HAS_BIAS, ROUND_SCALED)
    else:
        count = 0.0
        mean = 0.0
        squares = 0.0
        for block in range(BLOCKS):
            at = block * BLOCK + i
            inside = at < width
            value = _load(x, residual, row, x_row, residual_row, at, inside, HAS_RESIDUAL, ROUND_FIRST)
            if STORE_SUM:
                tl.store(summed + row * summed_row + at, value.to(summed.dtype.element_ty), mask=inside)
            here = tl.minimum(width - block * BLOCK, BLOCK).to(tl.float32)
            if RMS:
                squares += tl.sum(value * value, 0)
            else:
                own = tl.sum(value, 0) / here
                distance = tl.where(inside, value - own, 0.0)
                between = own - mean
                both = count + here
                squares += tl.sum(distance * distance, 0) + between * between * count * here / both
                mean += between * here / both
                count = both
        scale = 1.0 / tl.sqrt(squares / width + eps)
        if STORE_SUM:
            tl.debug_barrier()  # what other threads of this program have written is read below
        for block in range(BLOCKS):
            at = block * BLOCK + i
            inside = at < width
            if STORE_SUM:
                # The sum may have been written over what it was made of.
                value = tl.load(summed + row * summed_row + at, mask=inside, other=0.0).to(tl.float32)
            else:
                value = _load(x, residual, row, x_row, residual_row, at, inside, HAS_RESIDUAL, ROUND_FIRST)
            _store(
                out,
                weight,
                bias,
                row,
                out_row,
                at,
                inside,
                (value - mean) * scale,
                offset,
                HAS_WEIGHT,
                HAS_BIAS,
                ROUND_SCALED,
            )


@triton.jit
def _load(
    x, residual, row, x_row, residual_row, i, inside, HAS_RESIDUAL: tl.constexpr, ROUND_FIRST: tl.constexpr
):  # fmt: skip
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_row + i, mask=inside, other=0.0).to(tl.float32)
        if ROUND_FIRST:
            value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _store(
    out, weight, bias, row, out_row, i, inside, value, offset,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_SCALED: tl.constexpr,
):  # fmt: skip
    if ROUND_SCALED:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        value *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) + offset
    if HAS_BIAS:
        value += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + i, value.to(out.dtype.element_ty), mask=inside)
