"""Mixtures of experts: their linear ops, inside a call, are one operator each, which skips experts without tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastgen import counters, interrupts, settings
from fastgen.decoding import layer_forms
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose


def grouped_mm(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `_grouped_mm(input, weight, offs)`; the weight is [experts, K, N]."""
    found: dict[str, Any] = dict(zip(("input", "weight", "offs"), args, strict=False)) | kwargs
    given: list[Any] = [found.get(name) for name in ("input", "weight", "offs")]
    try:
        if settings.current().packed_weights != "never" and _is_served(*given):
            x, weight, ends = given
            return choose.expert_linear(x, weight.transpose(1, 2), ends)
    except Exception as error:
        interrupts.pass_on(error)
        counters.count_fallback("experts", f"{type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)


def _is_served(x: Any, weight: Any, ends: Any) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or type(ends) is not Tensor or weight.dim() != 3:
        return False
    if not layer_forms.serves(x, weight.dtype):
        return False
    # A recording refuses to be asked for an address, and runs no other model's code.
    is_here = is_capturing() or FastLayers.have_experts(weight)
    return is_here and choose.serves_experts(x, weight.transpose(1, 2), ends)
