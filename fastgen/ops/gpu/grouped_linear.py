"""Linear layers on weights of 4 or 8 bits in groups of inputs, on a GPU; on the CPU `fastgen.ops.linear.grouped`.

    weight = scale * (number - zero)      or      weight = scale * number + minimum

Here x is not rounded. Up to `MAX_ROWS` rows, a kernel reads the weight in its bits: within a group it multiplies x with
the numbers less their zero, which float16 and bfloat16 hold exactly, adds up in float32, and multiplies the sum with
the scale. So of the weight nothing is rounded. Inputs are worked on in parts where a weight has too few outputs for all
multiprocessors (split-K; the parts are added in one order). More rows have the weight unpacked to the type of x, piece
by piece, and the product of torch: to unpack it takes less time than the product then.

A weight lies line by line, an output's inputs next to each other, so that a program reads whole sectors of memory with
16 bytes at a time. With 4 bits, the byte i of 16 has the input i in its lower half, and the input 16 + i in its upper
half, of 32: both halves are 16 inputs in a row, of which neither the numbers nor x need another order in registers.
Scales lie group by group, because the outputs of a program need them together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, gpu
from fastgen.ops.linear import as_rows
from fastgen.ops.linear import grouped as grouped_linear_on_cpu

# Rows up to which the kernel reads the weight in its bits. Not measured: with so many rows an H200 takes about as long
# for the arithmetic as for the bytes of 4 bits.
MAX_ROWS = 64
# Numbers of a weight that are in floating point at a time, where they are more rows.
_PIECE = 2**25
# Inputs of a line come in these: 16 bytes of 4 bits.
_CHUNK = 32
_MOST_INPUTS = 128  # of a tile
_PARTS_BLOCK = 1024


def is_for(device: torch.device) -> bool:
    """Whether weights on this device are kept in lines."""
    return device.type == "cuda"


def unavailable(device: torch.device) -> str | None:
    """Why weights on this device, which is one of those above, have no kernels, or None."""
    return gpu.unavailable(device) if device.type == "cuda" else None


class LinedWeight(NamedTuple):
    """What `pack` makes of a weight."""

    numbers: Tensor  # [outputs, inputs / 2 or inputs], uint8; inputs in full 32s
    scales: Tensor  # [groups, outputs], float16, bfloat16 or float32
    zeros: Tensor | None  # the same, uint8
    minimums: Tensor | None  # the same, of the types of scales
    order: Tensor | None  # [inputs], int64: which input each column belongs to
    outputs: int
    inputs: int
    bits: int
    group_size: int


def pack(
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    order: Tensor | None = None,
) -> LinedWeight:
    """A weight [outputs, inputs] in the layout of the kernels, on the device on which it is.

    The arguments are those of `fastgen.ops.linear.grouped.pack`, but groups may have any size. Nothing is checked.
    """
    outputs, inputs = numbers.shape
    wide = F.pad(numbers, (0, -inputs % _CHUNK))
    if bits == 4:
        low, high = wide.unflatten(1, (-1, 2, _CHUNK // 2)).unbind(2)
        wide = (low | high << 4).flatten(1)
    zeros, minimums = (None if part is None else part.t().contiguous() for part in (zeros, minimums))
    order = None if order is None else order.contiguous()
    by_group = scales.t().contiguous()
    return LinedWeight(wide.contiguous(), by_group, zeros, minimums, order, outputs, inputs, bits, group_size)


def rounded(weight: Tensor, bits: int, group_size: int) -> LinedWeight:
    """A weight [outputs, inputs], floating, rounded as `fastgen.ops.linear.grouped.rounded` does without rotating."""
    weight = weight.detach()
    groups = F.pad(weight, (0, -weight.shape[1] % group_size)).unflatten(1, (-1, group_size))
    least, most = torch.aminmax(groups, dim=2)
    scales = grouped_linear_on_cpu.scales_of(least.float(), most.float(), bits)
    middle, (outputs, inputs) = 2 ** (bits - 1), weight.shape
    factors = torch.where(scales == 0, 0.0, 1 / scales.float())
    lines = max(1, _PIECE // max(1, inputs))
    pieces = []
    for begin in range(0, outputs, lines):
        each = factors[begin : begin + lines].repeat_interleave(group_size, dim=1)[:, :inputs]
        # Like the minimum of C: what is no number becomes the least.
        found = (weight[begin : begin + lines].float() * each).nan_to_num(nan=-middle)
        pieces.append(found.clamp_(-middle, middle - 1).round_().add_(middle).to(torch.uint8))
    numbers = torch.cat(pieces) if len(pieces) != 1 else pieces[0]
    return pack(numbers, scales, bits=bits, group_size=group_size)


def unpacked(weight: LinedWeight, outputs: Tensor | slice = slice(None)) -> tuple[Tensor, list[Tensor | None]]:
    """What `pack` was given, of all outputs or some, [n] int64: numbers, [n, inputs], scales, zeros and minimums."""
    lines = weight.numbers[outputs]
    if weight.bits == 4:
        lines = lines.unflatten(1, (-1, 1, _CHUNK // 2))
        lines = torch.cat((lines & 15, lines >> 4), dim=2).flatten(1)
    factors = weight.scales, weight.zeros, weight.minimums
    return lines[:, : weight.inputs], [None if part is None else part.t()[outputs] for part in factors]


def rows(weight: LinedWeight, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Lines of the weight, [n, inputs], in a floating type: those that `which`, [n] integers on the device, names.

    A line that is not there is NaN. Nothing waits for the device.
    """
    found = _lines(weight, dtype, 0, which.numel(), which.contiguous())
    return found if weight.order is None else found[:, weight.order.argsort()]


def grouped_linear(x: Tensor, weight: LinedWeight, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, weight in floating point, bias)`; not differentiable.

    x is [..., inputs] in float32, bfloat16 or float16, as is the result; the bias [outputs] in any of them. Sums are
    in float32, and the result is rounded once. Beyond `MAX_ROWS` rows the weight is rounded to the type of x.

    Raises:
        RuntimeError: shapes or types do not fit together.
    """
    flat = as_rows(x)
    require = _library.checks("grouped_linear", RuntimeError)
    require(flat.shape[1] == weight.inputs, f"{flat.shape[1]} inputs for a weight of {weight.inputs}")
    require(x.dtype in gpu.KERNEL_TYPES, f"x is {x.dtype}")
    require(bias is None or bias.shape == (weight.outputs,), "the bias is not [outputs]")
    if weight.order is not None:
        flat = flat.index_select(1, weight.order)
    if flat.shape[0] > MAX_ROWS:
        y = _unpacking(flat, weight, bias, x.dtype)
    elif gpu.available(flat, *weight[:4], bias):
        y = _product(flat, weight, bias)
    else:
        y = _unpacking(flat, weight, bias, torch.float32)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.outputs)


def reference(x: Tensor, weight: LinedWeight, bias: Tensor | None = None) -> Tensor:
    """`grouped_linear` in plain torch, for few rows; for any device and type."""
    flat = as_rows(x)
    if weight.order is not None:
        flat = flat.index_select(1, weight.order)
    y = _unpacking(flat, weight, bias, torch.promote_types(x.dtype, torch.float32))
    return y.view(*x.shape[:-1], weight.outputs)


def _unpacking(x: Tensor, weight: LinedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of torch in this type with the weight in floating point, a piece of it at a time."""
    lines = max(1, _PIECE // max(1, weight.inputs))
    wide, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    parts = [
        F.linear(
            wide,
            _lines(weight, dtype, begin, min(lines, weight.outputs - begin)),
            None if bias is None else bias[begin : begin + lines],
        )
        for begin in range(0, max(1, weight.outputs), lines)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(x.dtype)


class Plan(NamedTuple):
    """How the kernel works on a product."""

    block_m: int  # rows of a tile: all of them
    block_n: int  # outputs of a tile
    block_k: int  # inputs of a tile
    by_number: bool  # a tile has several groups: its numbers are multiplied with their scales one by one
    blocks: int  # tiles of an output
    splits: int  # parts of the blocks


def plan(rows: int, weight: LinedWeight, itemsize: int, multiprocessors: int) -> Plan:
    """The tiles for so many rows, of numbers of `itemsize` bytes, and parts for four programs a multiprocessor."""
    block_k = min(_MOST_INPUTS, max(gpu.power_of_two(weight.inputs), _CHUNK))
    while _group(weight) % block_k:
        block_k //= 2
    by_number = block_k < _CHUNK
    if by_number or itemsize == 4:  # without tensor cores, operands are float32
        block_k = min(max(block_k, _CHUNK), _CHUNK if rows > 16 else 2 * _CHUNK)  # more rows need the registers
    # Tensor cores take eight rows at the least.
    block_m = max(gpu.power_of_two(rows), 1 if itemsize == 4 or by_number else 8)
    block_n = 64
    blocks, tiles = -(-weight.inputs // block_k), -(-weight.outputs // block_n)
    # Writing the parts and reading them must stay an eighth of reading the weight; four tiles are under way at a time.
    cheap = weight.inputs * weight.bits // 8 // (64 * max(rows, 1))
    splits = max(1, min(4 * multiprocessors // max(tiles, 1), blocks // 4, cheap))
    return Plan(block_m, block_n, block_k, by_number, blocks, splits)


def _group(weight: LinedWeight) -> int:
    """Inputs of a group. A single one may be taken to go on beyond the last input."""
    return weight.group_size if weight.scales.shape[0] > 1 else -(-weight.inputs // _MOST_INPUTS) * _MOST_INPUTS


def _product(x: Tensor, weight: LinedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Starts the kernels: x is [rows, inputs], in the order of the numbers. Every number of `out` is written."""
    from fastgen.ops.gpu import _grouped_kernels as kernels

    rows, outputs = x.shape[0], weight.outputs
    chosen = plan(rows, weight, x.element_size(), gpu.limits(x.device)[0])
    out = x.new_empty(rows, outputs) if out is None else out
    in_parts = chosen.splits > 1
    to = x.new_empty(chosen.splits, rows, outputs, dtype=torch.float32) if in_parts else out
    bias = None if bias is None else bias.contiguous()
    gpu.launch(
        kernels.grouped_product,
        (-(-outputs // chosen.block_n) if rows else 0, chosen.splits),
        (
            x, *weight[:4], bias, to, rows, outputs, weight.inputs, x.stride(0), weight.numbers.shape[1],
            _group(weight), chosen.blocks, chosen.splits,
        ),
        BITS=weight.bits,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        BY_NUMBER=chosen.by_number,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINIMUMS=weight.minimums is not None,
        HAS_BIAS=bias is not None,
        IN_PARTS=in_parts,
        # The interpreter has no products of bfloat16.
        WIDEN=gpu.is_interpreted() and x.dtype is torch.bfloat16,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 and not chosen.by_number else 2,
    )  # fmt: skip
    if in_parts:
        size = rows * outputs
        gpu.launch(
            kernels.add_parts,
            (-(-size // _PARTS_BLOCK),),
            (to, bias, out, size, outputs, chosen.splits),
            HAS_BIAS=bias is not None,
            BLOCK=_PARTS_BLOCK,
            num_warps=4,
        )
    return out


def _lines(weight: LinedWeight, dtype: torch.dtype, begin: int, count: int, which: Tensor | None = None) -> Tensor:
    """`count` lines from `begin` on, or those of `which`, [count, inputs], columns in the order of the numbers."""
    if dtype not in gpu.KERNEL_TYPES or not gpu.available(*weight[:4], which):
        return _lines_reference(weight, dtype, begin, count, which)
    from fastgen.ops.gpu import _grouped_kernels as kernels

    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.numbers.device)
    line = weight.numbers.shape[1]
    gpu.launch(
        kernels.grouped_lines,
        (-(-count // 8), -(-line // 128)),
        (*weight[:4], which, out, begin, count, weight.outputs, weight.inputs, line, _group(weight)),
        BITS=weight.bits,
        BLOCK_N=8,
        BLOCK_K=128,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINIMUMS=weight.minimums is not None,
        HAS_WHICH=which is not None,
        num_warps=4,
    )
    return out


def _lines_reference(weight: LinedWeight, dtype: torch.dtype, begin: int, count: int, which: Tensor | None) -> Tensor:
    if which is None:
        numbers, factors = unpacked(weight, slice(begin, begin + count))
        return grouped_linear_on_cpu.values(numbers, factors, weight.bits, weight.group_size).to(dtype)
    is_there = (which >= 0) & (which < weight.outputs)
    numbers, factors = unpacked(weight, which.long().masked_fill(~is_there, 0))
    found = grouped_linear_on_cpu.values(numbers, factors, weight.bits, weight.group_size)
    return found.masked_fill(~is_there.unsqueeze(1), torch.nan).to(dtype)
