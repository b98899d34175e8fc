"""Linear operators: `x @ weight.T + bias` by the format of the weight, one module for each kernel, and one choice.

`choose` says which kernel serves a product; nobody else does. M are rows of x (tokens), N out_features, K in_features.
"""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as the kernels take it: [M, K], the inputs next to each other; a view where it can be."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def with_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """[M, N] with the leading dimensions of x, [..., K]."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
