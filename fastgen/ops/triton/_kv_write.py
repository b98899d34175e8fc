# mypy: ignore-errors
"""The kernel of kv_write.py. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def write(
    keys, values, key_cache, value_cache, position,
    heads, capacity, k_row, k_head, v_row, v_head, kc_row, kc_head, kc_place, vc_row, vc_head, vc_place,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row: some of its heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    place = tl.load(position).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    # A position outside of the cache writes nothing: there is nobody on the device who could raise.
    valid = head < tl.where((place >= 0) & (place < capacity), heads, 0)
    inside = valid[:, None] & (d < DIM)[None, :]
    new = tl.load(keys + row * k_row + (head * k_head)[:, None] + d[None, :], mask=inside)
    tl.store(key_cache + row * kc_row + place * kc_place + (head * kc_head)[:, None] + d[None, :], new, mask=inside)
    inside = valid[:, None] & (d < VALUE_DIM)[None, :]
    new = tl.load(values + row * v_row + (head * v_head)[:, None] + d[None, :], mask=inside)
    tl.store(value_cache + row * vc_row + place * vc_place + (head * vc_head)[:, None] + d[None, :], new, mask=inside)
