"""Linear operators: `x @ weight.T + bias`, for every format and layout of a weight.

- `choose`: `linear`, which multiplies, and the static table by which it chooses a kernel
- `weights`: `PackedWeight`, a weight in the format and layout of a kernel; float weights are torch's tensors
- `copies`: packs float weights
- `kernels`: the kernels on the CPU, `on_gpu` those in Triton; only `choose` calls them
- `tune`: measures a machine, for a table of its own

This file defines the operators, whose kernels are in csrc/cpu/gemm. There are kernels only, and no references. M are
rows of x (tokens), N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import _library

# N of a panel of a weight in groups (csrc/cpu/gemm/packed.h).
PANEL = 32


def as_rows(x: Tensor) -> Tensor:
    """Returns [..., K] as the kernels take it: [M, K], contiguous along K; a view if possible."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def with_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """Returns [M, N] with the leading dimensions of x, [..., K]."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether x, [..., K], a weight [N, K] and a contiguous bias [N] or None have one type and are on the CPU."""
    others = (weight,) if bias is None else (weight, bias)
    return (
        all(each.dtype is x.dtype and each.device.type == "cpu" for each in (x, *others))
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def fit_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are float32 besides: x, [M, K], contiguous along K, and a contiguous weight; all with elements."""
    return (
        x.dtype is torch.float32
        and x.dim() == 2
        and fit(x, weight, bias)
        and min(*x.shape, *weight.shape) > 0
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


def _fake_panels(weight: Tensor, scales: Tensor, bits: int, group_size: int, rotated: bool) -> Tensor:
    panels, slices = -(-weight.shape[0] // PANEL), scales.shape[1] * group_size * bits // 32
    return weight.new_empty(panels, slices, PANEL, 4, dtype=torch.uint8)


def _fake_extremes(weight: Tensor, group_size: int, rotated: bool) -> Tensor:
    return weight.new_empty(2, weight.shape[0], -(-weight.shape[1] // group_size), dtype=torch.float32)


_OUT, _OUTS = "Tensor(a!) out, Tensor x", "Tensor(a!)[] out, Tensor x"
_GROUPS = "Tensor qweight, Tensor scales, Tensor? zeros, Tensor? mins"
_SIZES = "int bits, int group_size, bool rotated, bool floats"
# The schemas, with a fake implementation of those that `torch.compile` may meet.
_OPERATORS: Mapping[str, Callable[..., Any] | None] = {
    # Linear ops with one weight, and with several weights and the same x.
    **{f"{name}_out({_OUT}, Tensor weight, Tensor? bias) -> ()": None for name in ("gemv", "gemm", "bf16x3_gemm")},
    **{
        f"{name}_batch_out({_OUTS}, Tensor[] weight, Tensor?[] bias) -> ()": None
        for name in ("gemv", "gemm", "panels_gemm")
    },
    "bf16_gemm(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor": (
        lambda x, packed, bias, n: x.new_empty(x.shape[0], n)
    ),
    f"grouped_linear(Tensor x, {_GROUPS}, Tensor? order, Tensor? bias, int n, {_SIZES}) -> Tensor": (
        lambda x, *rest: x.new_empty(x.shape[0], rest[6])
    ),
    f"grouped_linear_out({_OUT}, {_GROUPS}, Tensor? order, Tensor? bias, {_SIZES}) -> ()": lambda *arguments: None,
    f"grouped_linear_batch_out({_OUTS}, Tensor[] qweight, Tensor[] scales, Tensor?[] zeros, Tensor?[] mins, "
    f"Tensor? order, Tensor?[] bias, {_SIZES}) -> ()": lambda *arguments: None,
    f"expert_linear_out({_OUT}, Tensor weight, Tensor ends, int gemv_rows) -> ()": None,
    # Packing, and reading what is packed.
    "exact_cast_out(Tensor(a!) out, Tensor x) -> bool": None,
    "pack_panels(Tensor weight) -> Tensor": None,
    "pack_bf16(Tensor weight) -> Tensor": None,
    "group_extremes(Tensor weight, int group_size, bool rotated) -> Tensor": _fake_extremes,
    "round_to_panels(Tensor weight, Tensor scales, int bits, int group_size, bool rotated) -> Tensor": _fake_panels,
    f"grouped_rows(Tensor like, Tensor which, {_GROUPS}, int n, int k, int bits, int group_size) -> Tensor": (
        lambda like, which, *rest: like.new_empty(which.shape[0], rest[-3])
    ),
    # What the processor has, and for `tune`: evicts a tensor from its caches.
    "instruction_set() -> int": None,
    "evict(Tensor x) -> bool": None,
}
for _schema, _fake in _OPERATORS.items():
    _library.define(_schema, fake=_fake)
