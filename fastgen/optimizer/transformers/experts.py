"""Mixtures of experts: their linear ops, inside a call, are one operator each, which skips experts without tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from fastgen import counters, interrupts, settings
from fastgen.decoding import layer_forms
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import experts


def grouped_mm(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `_grouped_mm(input, weight, offs)`; the weight is [experts, K, N]."""
    found: dict[str, Any] = dict(zip(("input", "weight", "offs"), args, strict=False)) | kwargs
    given: list[Any] = [found.get(name) for name in ("input", "weight", "offs")]
    try:
        if settings.current().packed_weights != "never" and _is_served(*given):
            x, weight, ends = given
            return experts.expert_linear(x, weight.transpose(1, 2), ends)
    except Exception as error:
        interrupts.pass_on(error)
        counters.count_fallback("experts", f"{type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)


def longcat_flash(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `LongcatFlashExperts.forward(hidden_states, top_k_index, top_k_weights)`, which asks the host which experts
    have tokens. In a captured step, tokens are sorted by expert. The last experts return their input.
    """
    if not is_capturing() or kwargs or len(args) != 3 or module.gate_up_proj is None:
        return wrapped(*args, **kwargs)
    x, chosen, weights = args
    count = module.num_routed_experts
    numbers, order = chosen.flatten().sort()
    ends = torch.searchsorted(numbers, torch.arange(count, device=x.device), right=True, out_int32=True)
    rows = x[order // chosen.shape[1]]
    gate, up = moe._grouped_mm(rows, module.gate_up_proj[:count].transpose(1, 2), ends).chunk(2, dim=-1)
    found = moe._grouped_mm(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), ends)
    found = torch.where(numbers.unsqueeze(1) < count, found, rows) * weights.flatten()[order].unsqueeze(1)
    in_order = torch.empty_like(found).index_copy_(0, order, found)
    return in_order.unflatten(0, chosen.shape).sum(dim=1).to(x.dtype)


def _is_served(x: Any, weight: Any, ends: Any) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or type(ends) is not Tensor or weight.dim() != 3:
        return False
    if not layer_forms.serves(x, weight.dtype):
        return False
    # A recording refuses to be asked for an address, and runs no other model's code.
    is_here = is_capturing() or FastLayers.have_experts(weight)
    return is_here and experts.serves(x, weight.transpose(1, 2), ends)
