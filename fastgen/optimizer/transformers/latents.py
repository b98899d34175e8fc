"""Multi-head latent attention: all heads derive their K and V from one vector per position, which the cache holds.

The library computes K and V of all positions in each step. Here, views replace them, and attention reads the latents
(`decoding.kv.view.of_latents`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastgen.decoding import library_code
from fastgen.decoding.kv.view import KVView, of_latents
from fastgen.decoding.layer_forms import Replacement, is_plain, runs_own_forward


def expand_kv(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `expand_kv(kv_nope, k_rot)`, which returns K and V."""
    layer = module.kv_b_proj
    if kwargs or len(args) != 2 or not all(isinstance(each, KVView) for each in args) or layer.bias is not None:
        return wrapped(*args, **kwargs)
    latents, rotary = args
    if not _is_a_product(layer) or not is_plain(layer, latents.dtype, latents.device.type):
        return wrapped(*args, **kwargs)
    dim = module.qk_nope_head_dim
    return of_latents(latents, rotary, layer.weight.unflatten(0, (-1, dim + module.v_head_dim)), dim)


def _is_a_product(layer: nn.Module) -> bool:
    """Whether a layer only multiplies by its weight, and no third-party code replaces it."""
    is_plain_or_ours = runs_own_forward(layer) or isinstance(layer.forward, Replacement)
    return type(layer) is nn.Linear and is_plain_or_ours and library_code.is_own(nn.Linear.forward)
