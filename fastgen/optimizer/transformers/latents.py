"""Multi-head latent attention: heads that make their K and V of one vector a position, which is what the cache holds.

The library makes K and V of all positions in each step. Here, views stand for them, of which attention reads what is
stored (`decoding.kv.view.of_latents`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastgen.decoding import library_code
from fastgen.decoding.kv.view import KVView, of_latents
from fastgen.decoding.layer_forms import Replacement
from fastgen.decoding.modules import is_plain


def expand_kv(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `expand_kv(kv_nope, k_rot)`, which gives K and V."""
    layer = module.kv_b_proj
    if kwargs or len(args) != 2 or not all(isinstance(each, KVView) for each in args) or layer.bias is not None:
        return wrapped(*args, **kwargs)
    latents, rotary = args
    if not _is_a_product(layer) or not is_plain(layer, latents.dtype, latents.device.type):
        return wrapped(*args, **kwargs)
    dim = module.qk_nope_head_dim
    return of_latents(latents, rotary, layer.weight.unflatten(0, (-1, dim + module.v_head_dim)), dim)


def _is_a_product(layer: nn.Module) -> bool:
    """Whether a layer does nothing but multiply with its weight: nobody else has put something in its place."""
    own = vars(layer).get("forward")
    is_plain_or_ours = own is None or isinstance(own, Replacement)
    return type(layer) is nn.Linear and is_plain_or_ours and library_code.is_own(nn.Linear.forward)
