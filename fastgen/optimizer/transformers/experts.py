"""Mixtures of experts: in a captured step, and in other passes of a call, their linear ops skip experts without tokens.

The library's code of some models asks the host which experts have tokens. In a captured step, tokens are sorted by
expert on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen import counters, interrupts, settings
from fastgen.decoding import layer_forms, library_code
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose

# ---- experts in one weight: their linear ops are one operator each


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


def longcat_flash(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `LongcatFlashExperts.forward(hidden_states, top_k_index, top_k_weights)`, which asks the host which experts
    have tokens. In a captured step, tokens are sorted by expert. The last experts return their input.
    """
    if not is_capturing() or kwargs or len(args) != 3 or module.gate_up_proj is None:
        return wrapped(*args, **kwargs)
    from transformers.integrations import moe  # not in every release

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
    return is_here and choose.serves_experts(x, weight.transpose(1, 2), ends)


class _LeavesOnDevice(TorchFunctionMode):
    """Has `tolist` return the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return args[0] if func is Tensor.tolist else func(*args, **(kwargs or {}))


def jetmoe_gating(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `JetMoeTopKGating.forward`. In a captured step, the numbers of tokens that it returns are a tensor."""
    if not is_capturing():
        return wrapped(*args, **kwargs)
    with _LeavesOnDevice():
        return wrapped(*args, **kwargs)


def jetmoe(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `JetMoeParallelExperts.forward(inputs, expert_size)`."""
    if kwargs or len(args) != 2 or not isinstance(args[1], Tensor):
        return wrapped(*args, **kwargs)
    from transformers.integrations import moe  # not in every release

    x, sizes = args
    return moe._grouped_mm(x, module.weight.transpose(1, 2), sizes.cumsum(0).int())


# ---- experts that are modules of two linear layers


def switch_transformers(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `SwitchTransformersExperts.forward(hidden_states, selected_experts, routing_weights)`.

    `selected_experts`, [tokens, 1, experts], is one-hot, or zero beyond the capacity of an expert.
    """
    is_float = settings.current().weight_dtype == "fp32"
    if not is_capturing() or kwargs or len(args) != 3 or not args[0].is_cpu or not is_float:
        return wrapped(*args, **kwargs)
    experts = [*module.values()]
    layers = [(expert.wi, expert.wo) for expert in experts]
    if not _are_alike(layers) or len({type(expert.act) for expert in experts}) > 1:
        return wrapped(*args, **kwargs)
    x, selected, weights = args
    number, count = selected[:, 0].max(dim=1).indices, len(layers)
    number = torch.where(selected[:, 0].sum(dim=1) > 0, number, count)
    numbers, order = number.sort()
    ends = torch.searchsorted(numbers, torch.arange(count, device=x.device), right=True, out_int32=True)
    first, second = ([layer.weight for layer in each] for each in zip(*layers, strict=True))
    found = experts[0].act(choose.separate_linear(x[order], first, ends)).to(second[0].dtype)
    found = choose.separate_linear(found, second, ends) * weights[order]
    return torch.zeros_like(x).index_copy_(0, order, found.to(x.dtype))


def _are_alike(layers: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the layers of all experts are linear ones, of the same types, which only multiply by their weight."""
    if not all(map(_is_a_product, itertools.chain.from_iterable(layers))):
        return False
    return len({tuple((layer.weight.dtype, layer.weight.shape) for layer in each) for each in layers}) == 1


def _is_a_product(layer: Any) -> bool:
    is_own = layer_forms.runs_own_forward(layer) or isinstance(layer.forward, layer_forms.Replacement)
    is_linear = type(layer) is nn.Linear and is_own and library_code.is_own(nn.Linear.forward)
    return is_linear and layer.bias is None and layer_forms.is_plain(layer, layer.weight.dtype, "cpu")
