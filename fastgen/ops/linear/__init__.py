"""Linear operators: `x @ weight.T + bias` by the format of the weight, with a single choice of their kernels.

`kernels` read the unpacked weight, `panels` exact copies in 16 bits, `grouped` weights of 4 to 8 bits. Only `choose`
decides which kernel serves a linear op. M are rows of x (tokens), N out_features, K in_features.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
