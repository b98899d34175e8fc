"""Writes the new K and V of all rows into the cache, at positions that are on the device: one launch for both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.ops import _library, gpu


def kv_write(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    row_map: Tensor | None = None,
) -> None:
    """`cache[row, :, position[row]] = new[row]` for K and V, with positions that a replayed graph can change.

    Args:
        keys, values: [rows, heads, dim] each; values may have another dim. The last dimension of all is contiguous.
        key_cache, value_cache: [rows, heads, capacity, dim], of the same types.
        position: one integer on the device for all rows, or [rows]. Outside [0, capacity) nothing is written.
        row_map: [rows], int64, on the CPU: the cache row that each row is written to; by default its own.

    Raises:
        ValueError: shapes or types do not fit. Nothing has been written then.
    """
    on_gpu = row_map is None and keys.dtype in gpu.KERNEL_TYPES
    on_gpu = on_gpu and gpu.available(keys, values, key_cache, value_cache, position)
    is_served = keys.is_cpu and position.dtype == torch.int64 and _library.has_kernel("fastgen::kv_write")
    if is_served and not on_gpu and key_cache.shape[:3] == value_cache.shape[:3]:
        try:  # the kernel checks its arguments itself, faster than Python would
            torch.ops.fastgen.kv_write(keys, values, key_cache, value_cache, position, row_map)
        except RuntimeError:
            _check(keys, values, key_cache, value_cache, position, row_map)
            raise
        return
    _check(keys, values, key_cache, value_cache, position, row_map)
    if not on_gpu:
        reference(keys, values, key_cache, value_cache, position, row_map)
        return
    from fastgen.ops.gpu import launches

    launches.launch_kv_write(keys, values, key_cache, value_cache, position)


def _check(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, row_map: Tensor | None
) -> None:
    require = _library.checks("kv_write", ValueError)
    is_one_or_each = position.numel() == 1 or position.shape == keys.shape[:1]
    require(is_one_or_each and not position.is_floating_point(), "position must be one integer, or one for each row")
    for new, cache in ((keys, key_cache), (values, value_cache)):
        require(new.dim() == 3 and cache.dim() == 4, "takes [rows, heads, dim] and [rows, heads, capacity, dim]")
        rows = cache.shape[0] if row_map is None else new.shape[0]
        fits = (rows, cache.shape[1], cache.shape[3]) == new.shape and new.dtype == cache.dtype
        require(fits, f"{tuple(new.shape)} {new.dtype} into a cache {tuple(cache.shape)} {cache.dtype}")
        is_contiguous = all(x.shape[-1] < 2 or x.stride(-1) == 1 for x in (new, cache))
        require(is_contiguous, "the last dimension must be contiguous")
    same = key_cache.shape[:3] == value_cache.shape[:3] and keys.shape[:2] == values.shape[:2]
    require(same, "keys and values of different shapes")
    if row_map is not None:
        fits = row_map.shape == keys.shape[:1] and row_map.dtype == torch.int64
        require(fits, "the row map must be int64, one for each row")
        stored = len(key_cache)
        require(bool(((row_map >= 0) & (row_map < stored)).all()), f"the row map names a row that is none of {stored}")


def undo(key_cache: Tensor, value_cache: Tensor, position: Tensor, row_map: Tensor | None = None) -> Callable[[], None]:
    """Called before a write: returns a function that restores the overwritten positions, of which it keeps copies."""
    position, row_map = position.clone().reshape(-1), None if row_map is None else row_map.clone()
    at = position.long().clamp(0, max(key_cache.shape[2] - 1, 0))
    if not key_cache.shape[2]:
        return lambda: None
    rows = torch.arange(key_cache.shape[0], device=at.device) if row_map is None else row_map
    keys, values = (cache[rows, :, at] for cache in (key_cache, value_cache))
    return lambda: kv_write(keys, values, key_cache, value_cache, position, row_map)


def reference(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    row_map: Tensor | None = None,
) -> None:
    """The operator in plain torch, for any device and type."""
    capacity = key_cache.shape[2]
    if capacity == 0:
        return
    position = position.reshape(-1).long().expand(keys.shape[0])
    at = position.clamp(0, capacity - 1)
    if row_map is not None:  # rows may share a cache row: those outside must not undo a write
        inside = at == position
        for new, cache in ((keys, key_cache), (values, value_cache)):
            cache[row_map[inside], :, at[inside]] = new[inside]
        return
    rows, is_inside = torch.arange(keys.shape[0], device=keys.device), (at == position).view(-1, 1, 1)
    for new, cache in ((keys, key_cache), (values, value_cache)):
        cache[rows, :, at] = torch.where(is_inside, new, cache[rows, :, at])


_library.define(
    "kv_write(Tensor keys, Tensor values, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor position,"
    " Tensor? row_map=None) -> ()"
)
OPERATOR = torch.ops.fastgen.kv_write.default
