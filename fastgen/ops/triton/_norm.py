# mypy: ignore-errors
"""The kernel of norm.py. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, weight, out, x_row, width, eps, offset,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROUND_SCALED: tl.constexpr,
):  # fmt: skip
    """One row, in one block where it fits, so that it is read once; in several, and read again, where it does not."""
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
