"""Linear layers on weights of 8 bits or in bfloat16: for those who ask for them, the results are not those of float32.

`int8` holds each output's weights as multiples of a 127th of the largest of them. Inputs become multiples of a 255th of
their range, row by row, in each product; what these integers come to is exact (Bhandare et al., "Efficient 8-Bit
Quantization of Transformer Neural Machine Language Translation Model", 2019). `bf16` rounds both to 8 significant bits;
products are summed in float32. Inputs and results are float32 in both.

The kernels (csrc/cpu/quantized_linear.cpp) use the matrix registers (AMX) or the vector instructions (AVX-512 VNNI and
BF16) of the processor. Where it has neither there is nothing to gain, and `unavailable` says so.
"""

from __future__ import annotations

import timeit
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, _timings
from fastgen.ops.linear import as_rows

PRECISIONS = ("int8", "bf16")

# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "quantized linear 2"
# What a processor must have for products in each precision to be faster.
_INSTRUCTIONS = {"int8": "AVX-512 VNNI", "bf16": "AVX-512 BF16"}
# What is measured, in rows, inputs and outputs: a decoding step and a prompt.
_MEASURED = ((16, 768, 768), (256, 768, 768))
_ROUNDS = 20


class QuantizedWeight(NamedTuple):
    """What `pack` makes of a weight; valid in this process."""

    panels: Tensor  # [panels, bytes of an output's inputs, outputs of a panel], uint8
    scales: Tensor | None  # [outputs], of `int8` only: what the integers of an output are multiples of
    totals: Tensor | None  # [outputs], of `int8` only: their sum
    outputs: int  # rows of the weight


def pack(weight: Tensor, precision: str) -> QuantizedWeight:
    """The weight, [outputs, inputs], float32, any strides, in "int8" or "bf16"; at most 65,536 inputs.

    Raises:
        RuntimeError: the weight has another shape or dtype, or this processor lacks the instructions.
    """
    weight = weight.detach()
    if precision == "int8":
        panels, scales, totals = torch.ops.fastgen.pack_int8_linear.default(weight)
        return QuantizedWeight(panels, scales, totals, weight.shape[0])
    return QuantizedWeight(torch.ops.fastgen.pack_bf16_linear.default(weight), None, None, weight.shape[0])


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` in the precision of the weight; not differentiable.

    x is [..., inputs] and the bias [outputs], float32 like the result. A row of x that holds anything infinite or NaN
    gives NaN in `int8`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    panels, scales, totals, outputs = weight
    rows = as_rows(x)
    if scales is None or totals is None:
        y = torch.ops.fastgen.bf16_linear.default(rows, panels, bias, outputs)
    else:
        y = torch.ops.fastgen.int8_linear.default(rows, panels, scales, totals, bias, outputs)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], outputs)


def unavailable(precision: str, measure: bool = True) -> str | None:
    """Why weights in this precision make nothing faster here, or None.

    The processor's instructions decide, and a measurement, if allowed: once per machine, in milliseconds.
    """
    missing = _missing(precision)
    if missing is not None or not measure:
        return missing
    plain, quantized = _timings.get(_KERNEL, precision, 2, lambda: _measure(precision)) or (0.0, 0.0)
    return None if quantized < plain else f"products in {precision} are not faster than in float32 on this processor"


def _missing(precision: str) -> str | None:
    if not _library.has_kernel(f"fastgen::{precision}_linear"):
        return _library.load("CPU") or "no kernel for this processor"
    try:
        pack(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), precision)
    except RuntimeError:
        return f"this processor does not have {_INSTRUCTIONS[precision]}, or may not use it"
    return None


def backend() -> str:
    """Which implementation serves these operators."""
    missing = {precision: _missing(precision) for precision in PRECISIONS}
    there = [precision for precision, reason in missing.items() if reason is None]
    phrases = [f"{_library.backend(f'fastgen::{there[0]}_linear')}: {', '.join(there)}"] if there else []
    phrases += [f"no {precision}: {reason}" for precision, reason in missing.items() if reason is not None]
    return "; ".join(phrases)


@torch.no_grad()
def _measure(precision: str) -> tuple[float, float]:
    """Seconds of the measured products, in float32 and in `precision`; the shorter of many turns."""
    plain = quantized = 0.0
    for rows, inputs, outputs in _MEASURED:
        x = torch.full((rows, inputs), 0.5, dtype=torch.float32, device="cpu")
        weight = torch.full((outputs, inputs), 0.25, dtype=torch.float32, device="cpu")
        packed = pack(weight, precision)
        plain += min(timeit.repeat(partial(F.linear, x, weight), number=1, repeat=_ROUNDS))
        quantized += min(timeit.repeat(partial(quantized_linear, x, packed, None), number=1, repeat=_ROUNDS))
    return plain, quantized


_library.define("pack_int8_linear(Tensor weight) -> (Tensor, Tensor, Tensor)")
_library.define(
    "int8_linear(Tensor x, Tensor packed, Tensor scales, Tensor totals, Tensor? bias, int outputs) -> Tensor"
)
_library.define("pack_bf16_linear(Tensor weight) -> Tensor")
_library.define("bf16_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
