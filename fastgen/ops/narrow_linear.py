"""Linear layers in float32 whose weight has 16 bits, in panels, for the rows of a decoding step on the CPU.

Reading a weight of 16 bits takes half of the time, and its numbers are widened in the registers. A panel holds the
outputs that are multiplied at the same time, side by side in a vector. So nothing has to be added up over the places of
a vector, and no place of it is left empty, whatever the number of rows (see csrc/cpu/narrow_linear.cpp). The result has
the bits of `fastgen.ops.linear.packed_linear` with the widened weight.

Whether it is faster than products with the weight as it is, is measured, once per machine and shape (`costs`). There
are kernels alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, _timings, split_linear
from fastgen.ops.linear import MAX_BYTES, MAX_DOT_ROWS, as_rows, count_of_cold, rows_measured, shortest_times

# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "narrow linear 3"
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Steps have seldom more rows; shapes are measured up to here.
MAX_ROWS = 128


class Costs(NamedTuple):
    """Seconds that a product takes."""

    wide: float  # the fastest one with the weight in float32, as it is
    narrow: float


def pack(weight: Tensor) -> Tensor:
    """A weight, [outputs, inputs], bfloat16 or float16, in panels: an opaque tensor that is valid in this process.

    Raises:
        RuntimeError: the weight has another shape or dtype, or its inputs are not next to each other.
    """
    return torch.ops.fastgen.pack_narrow.default(weight.detach())


def narrow_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """`torch.nn.functional.linear(x, weight.float(), bias)` with the weight in panels; not differentiable.

    x is [..., inputs] and the bias [outputs], float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], outputs)
    torch.ops.fastgen.narrow_linears_out.default([y], rows, [packed], [bias])
    return y if x.dim() == 2 else y.view(*x.shape[:-1], outputs)


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a weight in 16 bits may take the place of this one: x is [rows, inputs], all of float32.

    The weight is [outputs, inputs], its numbers next to each other; the bias [outputs] or None.
    """
    others = (weight,) if bias is None else (weight, bias)
    return (
        all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in (x, *others))
        and weight.dim() == 2
        and x.shape[1:] == weight.shape[1:]
        and 0 < x.numel() <= MAX_ROWS * x.shape[1]
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and is_available()
    )


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process."""
    return _library.has_kernel("fastgen::narrow_linears_out")


def costs(rows: int, inputs: int, outputs: int, narrow: torch.dtype, measure: bool = True) -> Costs | None:
    """What a layer of this shape costs on this machine for an input of some rows, with the number of threads in force.

    Measured once, which takes as long as some tens of such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured.

    Args:
        narrow: the type of the numbers in 16 bits.
    """
    bucket = rows_measured(rows) if rows <= MAX_DOT_ROWS else -(-rows // 8) * 8
    key = f"{_NAMES[narrow]} {bucket}x{inputs}x{outputs}"
    measuring = (lambda: _measure(bucket, inputs, outputs, narrow)) if measure else None
    known = _timings.get(_KERNEL, key, len(Costs._fields), measuring)
    return None if known is None else Costs(*known)


@torch.no_grad()
def _measure(rows: int, inputs: int, outputs: int, narrow: torch.dtype) -> Costs:
    """All in turn: shares of torch's time from two measurements tell less than the products differ."""
    some = min(outputs, max(MAX_BYTES // (inputs * 4), 1))
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=torch.float32, device="cpu")
    x, y, weight = full((rows, inputs), 0.5), full((rows, some), 0.0), full((some, inputs), 0.25)
    packed = pack(weight.to(narrow))
    weights = [weight.clone() for _ in range(count_of_cold(weight.nbytes, 64))]

    def wide(operator: Callable[..., object]) -> tuple[Callable[[Tensor], object], list[Tensor]]:
        # With copies: what another product has just read would be in the cache.
        return lambda weight: operator(y, x, weight, None), [weight.clone() for weight in weights]

    products: list[tuple[Callable[[Tensor], object], list[Tensor]]] = [
        (
            lambda packed: torch.ops.fastgen.narrow_linears_out.default([y], x, [packed], [None]),
            [packed.clone() for _ in range(count_of_cold(packed.nbytes, 64))],
        ),
        (lambda weight: F.linear(x, weight), weights),
        wide(torch.ops.fastgen.folded_linear_out.default),
    ]
    if rows <= MAX_DOT_ROWS:
        products.append(wide(torch.ops.fastgen.dot_linear_out.default))
    if rows >= split_linear.MIN_ROWS and split_linear.is_available():
        products.append(wide(torch.ops.fastgen.split_linear_out.default))
    own, *others = shortest_times(products)
    return Costs(min(others) * outputs / some, own * outputs / some)


backend = functools.partial(_library.backend, "fastgen::narrow_linears_out")
_library.define("pack_narrow(Tensor weight) -> Tensor")
_library.define("narrow_linears_out(Tensor(a!)[] out, Tensor x, Tensor[] packed, Tensor?[] bias) -> ()")
