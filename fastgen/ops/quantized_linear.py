"""Linear layers on weights in 4 or 8 bits or in bfloat16, on request: results differ from those of float32.

`int8` and `int4` are rounded to nearest in groups (`fastgen.ops.linear.grouped`), `int8` after rotating them. `bf16`
rounds weights and activations to 8 significant bits; products are summed in float32. Its kernels
(csrc/cpu/gemm/bf16.cpp) use AMX tiles or AVX-512 BF16. If there is nothing to gain, `unavailable` says so.

On a GPU, no weight is rotated, and activations are not rounded (`fastgen.ops.gpu.grouped_linear`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.gpu import grouped_linear as on_gpu
from fastgen.ops.linear import as_rows, grouped, with_shape_of
from fastgen.ops.linear.grouped import PackedWeight

PRECISIONS = ("int8", "int4", "bf16")
# Precisions that are rounded in groups.
_BITS = {"int8": 8, "int4": 4}


class PackedBF16(NamedTuple):
    """A weight, [N, K], in bfloat16, in panels for AMX or AVX-512 BF16; valid in this process."""

    panels: Tensor  # [panels, bytes of K, N of a panel], uint8
    n: int


def pack(weight: Tensor, precision: str, group_size: int = 64) -> PackedWeight | PackedBF16:
    """Packs a weight, [N, K], of one of the `types`, any strides, in one of `PRECISIONS`.

    Args:
        group_size: in_features that share a scale; not for `bf16`.

    Raises:
        RuntimeError: the weight has another shape or dtype, or this processor lacks the instructions.
    """
    if on_gpu.is_for(weight.device):
        return on_gpu.rounded(weight, _BITS[precision], group_size)
    if precision in _BITS:
        # In 4 bits, rounding costs much more than rotating gains.
        return grouped.rounded(weight, _BITS[precision], group_size, rotated=precision == "int8")
    return PackedBF16(torch.ops.fastgen.pack_bf16.default(weight.detach()), weight.shape[0])


def types(precision: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the types of activations that weights of this precision can multiply on this device."""
    is_any = on_gpu.is_for(device) or precision in _BITS
    return (torch.float32, torch.bfloat16, torch.float16) if is_any else (torch.float32,)


def quantized_linear(x: Tensor, weight: PackedWeight | PackedBF16, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` in the precision of the weight; not differentiable.

    x is [..., K] and the bias [N], float32 like the result; with a weight in groups, of any floating type. Infinities
    or NaN in a row of x give NaN in `int8` and `int4`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    if isinstance(weight, PackedWeight):
        kernels = on_gpu if weight.in_rows else grouped
        return kernels.grouped_linear(x, weight, bias)
    y = torch.ops.fastgen.bf16_gemm.default(as_rows(x), weight.panels, bias, weight.n)
    return with_shape_of(x, y)


def is_for(device: torch.device) -> bool:
    """Whether weights on this device can have one of `PRECISIONS`, if nothing is missing there."""
    return device.type == "cpu" or on_gpu.is_for(device)


def unavailable(precision: str, device: torch.device | None = None) -> str | None:
    """Returns why weights of this precision cannot be used on this device, by default the CPU; None if they can.

    On the CPU this depends on the processor's instructions, on a GPU on Triton.
    """
    if device is not None and on_gpu.is_for(device):
        return on_gpu.unavailable(device) if precision in _BITS else f"weights in {precision} are for CPUs"
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
    """Returns which implementation serves these operators."""
    missing = {precision: _missing(precision) for precision in PRECISIONS}
    there = [precision for precision, reason in missing.items() if reason is None]
    phrases = [f"{_library.backend('fastgen::grouped_linear_out')}: {', '.join(there)}"] if there else []
    phrases += [f"no {precision}: {reason}" for precision, reason in missing.items() if reason is not None]
    return "; ".join(phrases)


_library.define("pack_bf16(Tensor weight) -> Tensor")
_library.define(
    "bf16_gemm(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor",
    fake=lambda x, packed, bias, n: x.new_empty(x.shape[0], n),
)
