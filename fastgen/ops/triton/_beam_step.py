# mypy: ignore-errors
"""The kernels of beam_step.py. Importing this needs Triton.

A candidate is one 64-bit number: its score in the upper half, in a form whose order as an integer is that of the
floats, and its place in the lower half, counted down. The largest number is then the best candidate, and of two with
the same score the one that comes first.
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(-(2**63))


@triton.jit
def _pack(score, place):
    # -0 and 0 are equal, and NaN, of any sign, is above everything else, as in torch.topk.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score != score, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _unpack(key):
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    place = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), place


@triton.jit
def best_of_parts(
    scores, part_best, part_maximum, part_total, vocabulary, row_stride, column_stride,
    KEEP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One part of the vocabulary of one row: its best candidates, and its share of the softmax's denominator.

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
    """One input: the best of what its beams have."""
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
        found, place = _unpack(best)
        tl.store(out_scores + batch * WANTED + k, found)
        tl.store(out_beams + batch * WANTED + k, (place // vocabulary).to(tl.int64))
        tl.store(out_tokens + batch * WANTED + k, (place % vocabulary).to(tl.int64))
