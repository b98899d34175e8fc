"""Linear ops on weights of 4 or 8 bits in groups on a GPU: the launch of their Triton kernels.

Activations stay floats. Up to `MAX_ROWS` rows, a kernel reads the quantised weight: within a group it multiplies x with
q - zero, which float16 and bfloat16 hold exactly, sums in float32, and multiplies the sum with the scale. So the weight
is not rounded. K is split if N is too small for all multiprocessors (split-K; the parts are added in a fixed order).
For more rows, the weight is dequantised to the type of x, piece by piece, and torch multiplies: dequantising then takes
less time than the product.

A weight is stored row by row, contiguous along K (`weights.PackedWeight`), so that a program reads whole sectors of
memory with 16 bytes at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, gpu
from fastgen.ops.linear import weights
from fastgen.ops.linear.weights import ROW_K, Layout, PackedWeight

# Most rows for which the kernel reads the quantised weight. An estimate, not a measurement: with this many rows, an
# H200 takes about as long for the arithmetic as for reading 4 bits.
MAX_ROWS = 64
# Elements of a weight that are dequantised at a time, for more rows.
_PIECE = 2**25
_MOST_K = 128  # of a tile
_PARTS_BLOCK = 1024


def is_for(device: torch.device) -> bool:
    """Whether weights on this device are packed in rows."""
    return device.type == "cuda"


def rounded(weight: Tensor, bits: int, group_size: int) -> PackedWeight:
    """Rounds a floating weight [N, K] as `copies.rounded` does without rotating, and packs it in rows."""
    weight = weight.detach()
    groups = F.pad(weight, (0, -weight.shape[1] % group_size)).unflatten(1, (-1, group_size))
    least, most = torch.aminmax(groups, dim=2)
    scales = weights.scales_of(least.float(), most.float(), bits)
    zero, (n, k) = 2 ** (bits - 1), weight.shape
    factors = torch.where(scales == 0, 0.0, 1 / scales.float())
    count = max(1, _PIECE // max(1, k))
    pieces = []
    for begin in range(0, n, count):
        each = factors[begin : begin + count].repeat_interleave(group_size, dim=1)[:, :k]
        # As C's fmin: NaN becomes the least value.
        found = (weight[begin : begin + count].float() * each).nan_to_num(nan=-zero)
        pieces.append(found.clamp_(-zero, zero - 1).round_().add_(zero).to(torch.uint8))
    qweight = torch.cat(pieces) if len(pieces) != 1 else pieces[0]
    return weights.pack(qweight, scales, bits=bits, group_size=group_size, layout=Layout.ROWS)


def rows(weight: PackedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of the weight, [n, K], in a floating type: those that `which`, [n] integers on the device, names.

    A row that does not exist is NaN. Does not synchronize.
    """
    found = _rows(weight, dtype, 0, which.numel(), which.contiguous())
    return found if weight.order is None else found[:, weight.order.argsort()]


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, weight in floating point, bias)`; not differentiable.

    x is [M, K] in float32, bfloat16 or float16, as is the result; the bias [N] in any of them. Sums are in float32, and
    the result is rounded once. Beyond `MAX_ROWS` rows the weight is rounded to the type of x.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    require = _library.checks("linear", RuntimeError)
    require(x.dtype in gpu.KERNEL_TYPES, f"x is {x.dtype}")
    require(bias is None or bias.shape == (weight.n,), "the bias is not [N]")
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.shape[0] > MAX_ROWS:
        return _unpacking(x, weight, bias, x.dtype)
    if gpu.available(x, *weight[:4], bias):
        return _product(x, weight, bias)
    return _unpacking(x, weight, bias, torch.float32)


def reference(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`multiply` in plain torch, for few rows; for any device and type."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return _unpacking(x, weight, bias, torch.promote_types(x.dtype, torch.float32))


def _unpacking(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies with the dequantised weight by torch, in this type, a piece at a time."""
    count = max(1, _PIECE // max(1, weight.k))
    x_of_type, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    parts = [
        F.linear(
            x_of_type,
            _rows(weight, dtype, begin, min(count, weight.n - begin)),
            None if bias is None else bias[begin : begin + count],
        )
        for begin in range(0, max(1, weight.n), count)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(x.dtype)


class Tiling(NamedTuple):
    """How the kernel divides a product."""

    block_m: int  # rows of a tile: all of them
    block_n: int  # N of a tile
    block_k: int  # K of a tile
    by_element: bool  # a tile has several groups: each element is multiplied with its own scale
    blocks: int  # tiles along K
    splits: int  # parts of the blocks


def tiling(rows: int, weight: PackedWeight, itemsize: int, multiprocessors: int) -> Tiling:
    """Returns the tiling for this many rows of x, with `itemsize` bytes per element: four programs per
    multiprocessor.
    """
    block_k = min(_MOST_K, max(gpu.power_of_two(weight.k), ROW_K))
    while _group(weight) % block_k:
        block_k //= 2
    by_element = block_k < ROW_K
    if by_element or itemsize == 4:  # without tensor cores, operands are float32
        block_k = min(max(block_k, ROW_K), ROW_K if rows > 16 else 2 * ROW_K)  # more rows need the registers
    # Tensor cores take at least eight rows.
    block_m = max(gpu.power_of_two(rows), 1 if itemsize == 4 or by_element else 8)
    block_n = 64
    blocks, tiles = -(-weight.k // block_k), -(-weight.n // block_n)
    # Writing and reading the parts must stay below an eighth of reading the weight; four tiles are in flight at a time.
    cheap = weight.k * weight.bits // 8 // (64 * max(rows, 1))
    splits = max(1, min(4 * multiprocessors // max(tiles, 1), blocks // 4, cheap))
    return Tiling(block_m, block_n, block_k, by_element, blocks, splits)


def _group(weight: PackedWeight) -> int:
    """Returns the group size. A single group may extend beyond K."""
    return weight.group_size if weight.scales.shape[0] > 1 else -(-weight.k // _MOST_K) * _MOST_K


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Launches the kernels: x is [M, K], in the order of `qweight`. Every element of `out` is written."""
    from fastgen.ops.gpu import _grouped_kernels as kernels

    rows, n = x.shape[0], weight.n
    chosen = tiling(rows, weight, x.element_size(), gpu.limits(x.device)[0])
    out = x.new_empty(rows, n) if out is None else out
    in_parts = chosen.splits > 1
    to = x.new_empty(chosen.splits, rows, n, dtype=torch.float32) if in_parts else out
    bias = None if bias is None else bias.contiguous()
    gpu.launch(
        kernels.grouped_product,
        (-(-n // chosen.block_n) if rows else 0, chosen.splits),
        (
            x, *weight[:4], bias, to, rows, n, weight.k, x.stride(0), weight.qweight.shape[1],
            _group(weight), chosen.blocks, chosen.splits,
        ),
        BITS=weight.bits,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        BY_ELEMENT=chosen.by_element,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINS=weight.mins is not None,
        HAS_BIAS=bias is not None,
        IN_PARTS=in_parts,
        # The interpreter has no bfloat16 products.
        WIDEN=gpu.is_interpreted() and x.dtype is torch.bfloat16,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 and not chosen.by_element else 2,
    )  # fmt: skip
    if in_parts:
        size = rows * n
        gpu.launch(
            kernels.add_parts,
            (-(-size // _PARTS_BLOCK),),
            (to, bias, out, size, n, chosen.splits),
            HAS_BIAS=bias is not None,
            BLOCK=_PARTS_BLOCK,
            num_warps=4,
        )
    return out


def _rows(weight: PackedWeight, dtype: torch.dtype, begin: int, count: int, which: Tensor | None = None) -> Tensor:
    """Returns `count` weight rows from `begin` on, or those of `which`, [count, K], with the columns of `qweight`."""
    if dtype not in gpu.KERNEL_TYPES or not gpu.available(*weight[:4], which):
        return _rows_reference(weight, dtype, begin, count, which)
    from fastgen.ops.gpu import _grouped_kernels as kernels

    out = torch.empty(count, weight.k, dtype=dtype, device=weight.qweight.device)
    row_bytes = weight.qweight.shape[1]
    gpu.launch(
        kernels.grouped_rows,
        (-(-count // 8), -(-row_bytes // 128)),
        (*weight[:4], which, out, begin, count, weight.n, weight.k, row_bytes, _group(weight)),
        BITS=weight.bits,
        BLOCK_N=8,
        BLOCK_K=128,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINS=weight.mins is not None,
        HAS_WHICH=which is not None,
        num_warps=4,
    )
    return out


def _rows_reference(weight: PackedWeight, dtype: torch.dtype, begin: int, count: int, which: Tensor | None) -> Tensor:
    if which is None:
        qweight, factors = weights.unpacked(weight, slice(begin, begin + count))
        return weights.values(qweight, factors, weight.bits, weight.group_size).to(dtype)
    is_there = (which >= 0) & (which < weight.n)
    qweight, factors = weights.unpacked(weight, which.long().masked_fill(~is_there, 0))
    found = weights.values(qweight, factors, weight.bits, weight.group_size)
    return found.masked_fill(~is_there.unsqueeze(1), torch.nan).to(dtype)
