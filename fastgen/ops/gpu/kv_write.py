"""Launches the kernel of `fastgen.ops.kv_write` on a GPU: one launch for K and V."""

from __future__ import annotations

from torch import Tensor

from fastgen.ops import gpu


def launch(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor) -> None:
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
