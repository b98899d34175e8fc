"""Mixtures of experts: their linear ops, inside a call, are one operator each, which skips experts without tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgen import settings
from fastgen.decoding import layer_forms
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import experts


def grouped_mm(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `_grouped_mm(input, weight, offs)`; the weight is [experts, K, N]."""
    found: dict[str, Any] = dict(zip(("input", "weight", "offs"), args, strict=False)) | kwargs
    x, weight, ends = found.get("input"), found.get("weight"), found.get("offs")
    if not FastLayers.are_in_use() or settings.current().packed_weights == "never":
        return wrapped(*args, **kwargs)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(ends, Tensor) and weight.dim() == 3):
        return wrapped(*args, **kwargs)
    weights = weight.transpose(1, 2)  # [experts, N, K]
    if not layer_forms.serves(x, weight.dtype) or not experts.serves(x, weights, ends):
        return wrapped(*args, **kwargs)
    return experts.expert_linear(x, weights, ends)
