"""Attention within each of several packed (varlen) sequences, on the CPU, in float32.

One call processes all sequences and heads. Queries, keys and values are not copied, and the result has the layout that
the next linear layer reads. The softmax is computed online, in blocks of positions (Dao et al., "FlashAttention",
NeurIPS 2022; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018); see
csrc/cpu/attention/texts.h. A result depends neither on the number of threads nor on other sequences.

There are kernels only, and no reference (`is_available`). They take 0.6 to 0.9 of torch's time for sequences of 16 to
512 tokens.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops import _library


@functools.cache
def is_available() -> bool:
    """Whether there are kernels with wide vectors in this process."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_vectors and _library.has_kernel("fastgen::packed_attention")


def serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether there is a kernel for these, [..., heads, tokens, dim]; a head of keys may serve several query heads."""
    return (
        all(type(x) is Tensor and x.dtype is torch.float32 and x.device.type == "cpu" for x in (query, keys, values))
        and all(x.shape[-1] > 0 and x.stride(-1) == 1 for x in (query, keys, values))
        and keys.shape[-3] == values.shape[-3] > 0
        and query.shape[-3] % keys.shape[-3] == 0
        and query.shape[-2:] == keys.shape[-2:]
        and keys.shape[-2] == values.shape[-2]
        and is_available()
    )


def as_row(x: Tensor) -> Tensor | None:
    """Views [batch, heads, length, dim] as [heads, batch * length, dim]; None if the layout does not allow it."""
    count, heads, length, dim = x.shape
    try:
        return x.transpose(0, 1).view(heads, count * length, dim)
    except RuntimeError:
        return None


def packed_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """`scaled_dot_product_attention` of each sequence over its own tokens; not differentiable.

    Args:
        query, keys, values: [heads, tokens, dim], accepted by `serves`.
        lengths: [batch], int64: the number of tokens of each sequence, in their order.
        scale: factor on the scores; 1 / sqrt(dim) by default.

    Returns:
        [tokens, heads, dim of the values].

    Raises:
        RuntimeError: a shape, a type or a length is not as above.
    """
    return OPERATOR(query, keys, values, lengths, scale_of(query.shape[-1], scale))


def scale_of(dim: int, scale: float | None) -> float:
    return float(dim**-0.5) if scale is None else float(scale)


_SIGNATURE = "Tensor query, Tensor keys, Tensor values, Tensor lengths, float scale"
_library.define(f"packed_attention({_SIGNATURE}) -> Tensor")
_library.define(f"packed_attention.out({_SIGNATURE}, *, Tensor(a!) out) -> Tensor(a!)")
OPERATOR = torch.ops.fastgen.packed_attention.default
