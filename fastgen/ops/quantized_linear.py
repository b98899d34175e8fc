"""Linear layers on weights of 4 or 8 bits or in bfloat16: for those who ask for them, results are not those of float32.

`int8` and `int4` are rounded to the nearest in groups of inputs (`fastgen.ops.linear.grouped`), `int8` after rotating
them. `bf16` rounds weights and inputs to 8 significant bits; products are summed in float32. Its kernels
(csrc/cpu/gemm/bf16.cpp) use AMX tiles or the vector instructions (AVX-512 BF16) of the
processor. Where there is nothing to gain, `unavailable` says so.

On a GPU, no weight is rotated, and inputs are not rounded (`fastgen.ops.gpu.grouped_linear`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.gpu import grouped_linear as lines
from fastgen.ops.gpu.grouped_linear import LinedWeight
from fastgen.ops.linear import as_rows, grouped, with_shape_of
from fastgen.ops.linear.grouped import PackedWeight

PRECISIONS = ("int8", "int4", "bf16")
# Those in groups.
_BITS = {"int8": 8, "int4": 4}


class TiledWeight(NamedTuple):
    """A weight in bfloat16, in the tiles that the kernels multiply; valid in this process."""

    panels: Tensor  # [panels, bytes of an output's inputs, outputs of a panel], uint8
    outputs: int  # rows of the weight


def pack(weight: Tensor, precision: str, group_size: int = 64) -> PackedWeight | TiledWeight | LinedWeight:
    """The weight, [outputs, inputs], of one of the `types`, any strides, in one of `PRECISIONS`.

    Args:
        group_size: inputs that share a scale; not for `bf16`.

    Raises:
        RuntimeError: the weight has another shape or dtype, or this processor lacks the instructions.
    """
    if lines.is_for(weight.device):
        return lines.rounded(weight, _BITS[precision], group_size)
    if precision in _BITS:
        # In 4 bits, what rotating gains is lost among what rounding costs.
        return grouped.rounded(weight, _BITS[precision], group_size, rotated=precision == "int8")
    return TiledWeight(torch.ops.fastgen.pack_bf16.default(weight.detach()), weight.shape[0])


def types(precision: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Of the inputs that are multiplied with weights in this precision, on this device."""
    is_any = lines.is_for(device) or precision in _BITS
    return (torch.float32, torch.bfloat16, torch.float16) if is_any else (torch.float32,)


def quantized_linear(x: Tensor, weight: PackedWeight | TiledWeight | LinedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` in the precision of the weight; not differentiable.

    x is [..., inputs] and the bias [outputs], float32 like the result; with a weight in groups, of any floating type. A
    row of x that holds anything infinite or NaN gives NaN in `int8` and `int4`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    if isinstance(weight, LinedWeight):
        return lines.grouped_linear(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return grouped.grouped_linear(x, weight, bias)
    y = torch.ops.fastgen.bf16_gemm.default(as_rows(x), weight.panels, bias, weight.outputs)
    return with_shape_of(x, y)


def is_for(device: torch.device) -> bool:
    """Whether weights on this device can have one of `PRECISIONS`, if nothing is missing there."""
    return device.type == "cpu" or lines.is_for(device)


def unavailable(precision: str, device: torch.device | None = None) -> str | None:
    """Why there are no products with weights in this precision on this device, by default the CPU, or None.

    On the CPU the processor's instructions decide, on a GPU Triton.
    """
    if device is not None and lines.is_for(device):
        return lines.unavailable(device) if precision in _BITS else f"weights in {precision} are for CPUs"
    return _missing(precision)


def _missing(precision: str) -> str | None:
    if precision in _BITS:
        return grouped.unavailable()
    if not _library.has_kernel("fastgen::bf16_gemm"):
        return _library.load("CPU") or "no kernel for this processor"
    try:
        pack(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), precision)
    except RuntimeError:
        return "this processor does not have AVX-512 BF16, or may not use it"
    return None


def backend() -> str:
    """Which implementation serves these operators."""
    missing = {precision: _missing(precision) for precision in PRECISIONS}
    there = [precision for precision, reason in missing.items() if reason is None]
    phrases = [f"{grouped.backend()}: {', '.join(there)}"] if there else []
    phrases += [f"no {precision}: {reason}" for precision, reason in missing.items() if reason is not None]
    return "; ".join(phrases)


_library.define("pack_bf16(Tensor weight) -> Tensor")
_library.define(
    "bf16_gemm(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor",
    fake=lambda x, packed, bias, outputs: x.new_empty(x.shape[0], outputs),
)
