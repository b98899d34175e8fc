"""Attention that finds positions by the number of keys, in a captured step, where that number is the capacity.

GPT-Neo aligns its local window, and MPT its bias for distances, with the last key. These hooks align them with the
positions of the step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import releases
from fastgen.decoding.kv.view import CannotBeCaptured, KVView
from fastgen.optimizer.transformers.cache_layers import StepCache
from fastgen.optimizer.transformers.capturable import GPT_NEO, MPT, class_of

# Attribute of MPT's bias that carries the one of a step, which all layers share.
_OF_STEP = "_fastgen_bias"


def windows(model: Any, of_cache: list[int | None]) -> list[int | None]:
    """Returns the sliding window of each layer. The library's cache does not know those of GPT-Neo, whose layers have
    made masks from the config, [1, 1, positions, positions], and do not read it again.
    """
    if class_of(model) != GPT_NEO:
        return of_cache
    return [_window_in(block.attn.attention.bias[0, 0, -1]) for block in model.transformer.h]


def _window_in(last: Tensor) -> int | None:
    """Returns how many positions the last row of a mask lets through; None for all."""
    count = int(last.count_nonzero())
    if not bool(last[len(last) - count :].all()):
        raise CannotBeCaptured("a mask of a layer that is no sliding window")
    return count if count < len(last) else None


def most_positions(model: Any) -> int | None:
    """Returns up to how many positions steps of a model have, if it raises an error beyond, which a captured step does
    not; None for any number.
    """
    table = getattr(model, "position_embeds_layer", None)  # Bark's
    if table is not None:
        return int(table.num_embeddings)
    name = {GPT_NEO: "max_position_embeddings", MPT: "max_seq_len"}.get(class_of(model))
    return None if name is None else getattr(model.config, name)


def attend_gpt_neo(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `GPTNeoSelfAttention._attn(query, key, value, attention_mask)`. The cache of a step has the window."""
    key = args[1] if len(args) == 4 and not kwargs else None
    if not isinstance(key, KVView) or not key.is_of_step:
        return wrapped(*args, **kwargs)
    query, _, value, mask = args
    if mask is not None and mask.is_floating_point():
        mask = mask >= 0
    return F.scaled_dot_product_attention(query, key, value, mask, scale=1.0), None


def attend_mpt(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `MptAttention.forward`, whose arguments its block passes by name."""
    cache, bias = releases.cache_in(kwargs), kwargs.get("position_bias")
    if type(cache) is not StepCache or bias is None:
        return wrapped(*args, **kwargs)
    keys = cache.get_mask_sizes(1, module.layer_idx)[0]
    of_step = getattr(bias, _OF_STEP, None)
    if of_step is None:
        of_step = _bias_for(bias, cache.get_seq_length(), keys)
        setattr(bias, _OF_STEP, of_step)
    # The module would add its own number of tokens to the length, and cut the bias by the sum.
    stored = SimpleNamespace(update=cache.update, get_seq_length=lambda: keys)
    return wrapped(*args, **{**kwargs, **releases.with_cache(stored), "position_bias": of_step})


def _bias_for(bias: Tensor, length: Any, keys: int) -> Tensor:
    """Returns the bias of the key after `length` others for `keys` keys, [heads, 1, keys], from that of any number.

    The softmax does not see what is added to all keys, so that a row may have another length.
    """
    slope = bias[:, :, -1:] - bias[:, :, -2:-1]
    length = getattr(length, "bounds", length)
    return slope * (torch.arange(keys, device=bias.device) - length)
