"""Launches the kernels of attention, the best candidates, KV writes and RMS norm on a GPU, and chooses their sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import gpu


class Plan(NamedTuple):
    """How the kernel is launched: block sizes, parts of the sequence, warps, and pipeline stages."""

    block_m: int
    m_tiles: int
    block_n: int
    splits: int
    warps: int
    stages: int


def plan(
    batch: int, kv_heads: int, tile_rows: int, dim: int, positions: int, element_size: int, multiprocessors: int,
    shared_memory: int = 227 * 1024,
) -> Plan:  # fmt: skip
    """Returns the sizes for these tensors; they do not depend on values that are only on the device.

    `tile_rows` queries read the same K/V head of an input; its prefix and suffixes have at most `positions`. A program
    may use 227 KB of shared memory on an H200, 99 KB on GPUs for workstations.

    Throughput needs enough bytes in flight: by Little's law about 25 KB per multiprocessor on an H200 (4.8 TB/s, 0.7
    microseconds, 132 multiprocessors). A block of K is 16 KB (128 positions of 64 half-precision numbers), and so is a
    block of V. All blocks of a program take at most 96 KB, so that two programs fit into a multiprocessor.
    """
    # A matrix product has at least 16 rows; more than 64 would not fit into registers together with their context.
    block_m = min(max(gpu.power_of_two(tile_rows), 16), 64)
    width = max(gpu.power_of_two(dim), 16)
    block_bytes = 16 * 1024
    block_n = max(min(block_bytes // (width * element_size), 128), 16)
    # Scores are in registers: a tile of 16 x 128 takes 16 of each of 128 threads. Taller tiles get shorter blocks, or
    # registers would spill. True float32 products do not run on tensor cores, and keep their operands in registers,
    # too.
    if element_size == 4:
        block_n = min(block_n, 32)
    elif block_m > 16:
        block_n = min(block_n, 64)
    stages = 3 if 2 * 3 * block_n * width * element_size <= 96 * 1024 else 2

    def needed() -> int:
        # Prefetched blocks of K and V, the queries, their weights, and the compiler's own use.
        return (2 * (stages - 1) * block_n * width + block_m * (width + block_n)) * element_size + 8 * 1024

    while needed() > shared_memory and (stages > 2 or block_m > 16):
        stages, block_m = (2, block_m) if stages > 2 else (2, block_m // 2)
    m_tiles = -(-tile_rows // block_m)
    programs = batch * kv_heads * m_tiles
    blocks = -(-max(positions, 1) // block_n)
    splits = split_count(programs, blocks, 2 * multiprocessors)
    return Plan(block_m, m_tiles, block_n, splits, 8 if block_m == 64 else 4, stages)


def split_count(programs: int, blocks: int, slots: int) -> int:
    """Returns the number of parts of every sequence: the fewest with which the last wave leaves few slots idle.

    A part costs writing its sums and reading them again, so it has at least two blocks of keys, and there are at most
    32 parts. With n waves of programs the last may be nearly empty; splitting every sequence makes waves shorter.
    """
    most = max(min(blocks // 2, 32), 1)

    def share_busy(splits: int) -> float:
        rounds = programs * splits / slots
        return rounds / max(-(-programs * splits // slots), 1)

    best = max(share_busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if share_busy(splits) >= 0.85 * best)


def launch_attention(
    query: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    suffix_keys: Tensor | None,
    suffix_values: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    *,
    starts: Tensor | None,
    ends: Tensor | None,
    suffix_lengths: Tensor | None,
    ancestry: Tensor | None,
    window: int | None,
    causal: bool,
    splits: int | None,
) -> Tensor:
    """Launches the kernels; the arguments are those of `decode_attention`, and have been checked.

    The kernels treat a head with several queries as several consecutive heads.
    """
    from fastgen.ops.gpu import _kernels as kernels

    shape = query.shape[:3]
    query = query.flatten(1, 2)
    if query.stride(2) != 1:
        query = query.contiguous()
    rows, heads, dim = query.shape
    batch, kv_heads, length, _ = prefix_keys.shape
    value_dim = prefix_values.shape[3]
    per_input, group = rows // batch, heads // kv_heads
    capacity = 0 if suffix_keys is None else suffix_keys.shape[2]
    if suffix_keys is not None and suffix_lengths is None:
        suffix_lengths = torch.full((1,), capacity, device=query.device)
    starts, ends = (None if bound is None else bound.contiguous() for bound in (starts, ends))
    if ancestry is not None and ancestry.stride(1) != 1:
        ancestry = ancestry.contiguous()
    bias = None if mask is None else _added(mask, shape, query.dtype)
    chosen = plan(
        batch, kv_heads, per_input * group, max(dim, value_dim), length + per_input * capacity, query.element_size(),
        *gpu.limits(query.device),
    )  # fmt: skip
    splits = chosen.splits if splits is None else splits
    out = query.new_empty(rows, heads, value_dim)
    # The parts are float32, and small: each split takes about as much memory as the queries.
    parts = (1 if splits == 1 else rows * heads * splits,)
    part_maximum = query.new_empty(parts, dtype=torch.float32)
    part_total = query.new_empty(parts, dtype=torch.float32)
    part_context = query.new_empty((*parts, value_dim), dtype=torch.float32)
    no_strides = (0, 0, 0)
    block_v = max(gpu.power_of_two(value_dim), 16)
    gpu.launch(
        kernels.attend,
        (batch * kv_heads * chosen.m_tiles, splits),
        (
            query, prefix_keys, prefix_values, suffix_keys, suffix_values, starts, ends, suffix_lengths, ancestry, bias,
            out, part_maximum, part_total, part_context,
            length, capacity, window or 0, kv_heads, float(dim**-0.5 if scale is None else scale),
            query.stride(0), query.stride(1), *prefix_keys.stride()[:3], *prefix_values.stride()[:3],
            *(no_strides if suffix_keys is None else suffix_keys.stride()[:3]),
            *(no_strides if suffix_values is None else suffix_values.stride()[:3]),
            0 if suffix_lengths is None or suffix_lengths.numel() == 1 else suffix_lengths.stride(0),
            0 if ancestry is None else ancestry.stride(0),
            *(no_strides if bias is None else bias.expand(rows, heads, length + capacity).stride()), splits,
        ),
        PER_INPUT=per_input,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_D=max(gpu.power_of_two(dim), 16),
        BLOCK_V=block_v,
        M_TILES=chosen.m_tiles,
        # The number of parts is no constant: it depends on the batch, and kernels would be compiled for each.
        IN_PARTS=splits > 1,
        # Keeps float32 accurate: by default, Triton would round the operands to tf32, which has 10 bits.
        PRECISION="ieee",
        # The interpreter has no bfloat16 products.
        WIDEN=gpu.is_interpreted() and query.dtype == torch.bfloat16,
        HAS_STARTS=starts is not None,
        HAS_ENDS=ends is not None,
        HAS_SUFFIX=suffix_keys is not None,
        HAS_ANCESTRY=ancestry is not None,
        HAS_BIAS=bias is not None,
        HAS_WINDOW=window is not None,
        QUERIES=shape[2] if causal else 1,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )  # fmt: skip
    if splits > 1:
        gpu.launch(
            kernels.merge,
            (rows * heads,),
            (part_maximum, part_total, part_context, out, splits),
            VALUE_DIM=value_dim,
            BLOCK_V=block_v,
            BLOCK_S=gpu.power_of_two(splits),
            num_warps=1 if splits <= 8 else 4,
        )
    return out.view(*shape, value_dim)


def _added(mask: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns what is added to the scores, [rows or 1, heads * queries or 1, positions]."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return mask[:, :, 0] if mask.shape[1:3] == (1, 1) else mask.expand(-1, *shape[1:], -1).flatten(1, 2)


# ---- the best candidates: every program finds the best of its part of a row and its share of the denominator, so that
# scores are read once. A second launch, on the few candidates that are left, combines the parts.

# Scores that a program reads: 32 for each of 128 threads. The vocabulary of BART in 13 parts, for each of 128 rows, is
# six waves on 132 multiprocessors with two programs each.
_BLOCK = 4096
# Candidates of an input that the second launch examines, all in one block.
_MOST_CANDIDATES = 32768


class _Sizes(NamedTuple):
    block: int  # scores of a row that a program reads
    parts: int  # programs of a row
    keep: int  # candidates that each program keeps
    candidates: int  # candidates of an input in the second launch

    @staticmethod
    def of(beams: int, vocabulary: int, count: int) -> _Sizes:
        block = min(_BLOCK, max(gpu.power_of_two(vocabulary), 16))
        parts = -(-vocabulary // block)
        keep = min(count, block)
        return _Sizes(block, parts, keep, gpu.power_of_two(beams) * gpu.power_of_two(parts * keep))


def serves_candidates(scores: Tensor, running: Tensor, count: int) -> bool:
    """Whether the kernels accept these arguments of `best_continuations`."""
    beams, vocabulary = running.shape[1], scores.shape[1]
    few = beams * vocabulary < 2**31 and _Sizes.of(beams, vocabulary, count).candidates <= _MOST_CANDIDATES
    return few and scores.dtype in gpu.KERNEL_TYPES


def launch_best_candidates(
    scores: Tensor, running: Tensor, count: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernels; returns the scores, beams and tokens of `best_continuations`."""
    from fastgen.ops.gpu import _kernels as kernels

    (batch, beams), (rows, vocabulary) = running.shape, scores.shape
    block, parts, keep, candidates = _Sizes.of(beams, vocabulary, count)
    part_best = scores.new_empty(rows * parts * keep, dtype=torch.int64)
    part_maximum = scores.new_empty(rows * parts, dtype=torch.float32)
    part_total = torch.empty_like(part_maximum)
    best = scores.new_empty(batch, count, dtype=torch.float32)
    out = best, torch.empty_like(best, dtype=torch.int64), torch.empty_like(best, dtype=torch.int64)
    gpu.launch(
        kernels.best_of_parts,
        (rows, parts),
        (scores, part_best, part_maximum, part_total, vocabulary, *scores.stride()),
        KEEP=keep,
        PARTS=parts,
        BLOCK=block,
        NORMALISE=normalise,
        num_warps=4,
    )
    gpu.launch(
        kernels.best_of_beams,
        (batch,),
        (part_best, part_maximum, part_total, running.contiguous(), *out, vocabulary),
        BEAMS=beams,
        BLOCK_BEAMS=gpu.power_of_two(beams),
        KEEP=keep,
        CANDIDATES=parts * keep,
        BLOCK_CANDIDATES=gpu.power_of_two(parts * keep),
        PARTS=parts,
        BLOCK_PARTS=gpu.power_of_two(parts),
        WANTED=count,
        NORMALISE=normalise,
        # There is one program per input, so it should be quick: up to eight candidates for each of 512 threads.
        num_warps=min(max(candidates // 256, 1), 16),
    )
    return out


# ---- KV writes and RMS norm


def launch_kv_write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor) -> None:
    """Launches the kernel; the arguments are those of `kv_write`."""
    from fastgen.ops.gpu import _kernels as kernels

    rows, heads, dim = keys.shape
    block_d = gpu.power_of_two(max(dim, values.shape[2]))
    # Enough heads for a few kilobytes: one 16-byte access for each of 128 threads, and a few of them in flight.
    block_h = min(max(4096 // block_d, 1), gpu.power_of_two(heads))
    gpu.launch(
        kernels.write,
        (rows, -(-heads // block_h)),
        (
            keys, values, key_cache, value_cache, position, heads, key_cache.shape[2],
            0 if position.numel() == 1 else position.stride(0),
            *keys.stride()[:2], *values.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        ),
        DIM=dim,
        VALUE_DIM=values.shape[2],
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip


# Elements of a row that a program holds in registers: 32 for each of its 512 threads.
_LARGEST_BLOCK = 16384


def launch_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, rounds_scaled: bool = False
) -> Tensor:
    """Launches the kernel; the arguments are those of `rms_norm`."""
    from fastgen.ops.gpu import _kernels as kernels

    width = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.reshape(x.numel() // max(width, 1), width)
    if width > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    block = min(gpu.power_of_two(width), _LARGEST_BLOCK)
    gpu.launch(
        kernels.rms_norm,
        (rows.shape[0],),
        (rows, weight.contiguous(), out, rows.stride(0), width, float(eps), float(offset)),
        BLOCK=block,
        BLOCKS=-(-width // block),
        ROUND_SCALED=rounds_scaled and x.dtype != torch.float32,
        # A step has few rows, so many threads share a row: 16 elements each, and at most 512 threads.
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
