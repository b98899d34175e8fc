"""Attention that finds positions by the number of keys, in a captured step, where that number is the capacity.

GPT-Neo aligns its local window, and MPT its bias for distances, with the last key. These hooks align them with the
positions of the step. ProphetNet makes its position a host number, and computes distances to keys from their number. It
gets the position on the device, and the buckets of the distances, for which its attention has arguments.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import releases
from fastgen.decoding.captured.capturable import SymbolicLength
from fastgen.decoding.kv.view import CannotBeCaptured, KVView
from fastgen.optimizer.transformers.cache_layers import StepCache
from fastgen.optimizer.transformers.capturable import GPT_NEO, MPT, class_of

# Attribute of MPT's bias that carries the one of a step, which all layers share.
_OF_STEP = "_fastgen_bias"
# Attribute of a step's positions that carries the buckets of all layers of ProphetNet.
_BUCKETS = "_fastgen_buckets"


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


def embed_prophetnet(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `ProphetNetPositionalEmbeddings.forward(inputs_shape, device, ...)`, with a K/V cache."""
    cache = releases.cache_in(kwargs)
    length = cache.get_seq_length() if cache is not None else None
    if not isinstance(length, SymbolicLength):
        return wrapped(*args, **kwargs)
    # ProphetNet counts positions from 1.
    position_ids = (length + (1 + module.padding_idx)).view(1, 1)
    return module._forward(position_ids), position_ids


def attend_prophetnet(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `ProphetNetNgramSelfAttention.forward`, whose arguments the decoder passes by name."""
    cache = releases.cache_in(kwargs)
    length = cache.get_seq_length() if cache is not None else None
    if isinstance(length, SymbolicLength):
        rows = kwargs["hidden_states"].shape[0]
        keys = cache.get_mask_sizes(1, module.layer_idx)[0]
        kwargs = {**kwargs, **_buckets(module, kwargs["position_ids"], rows, keys)}
    return wrapped(*args, **kwargs)


def _buckets(module: Any, position_ids: Tensor, rows: int, keys: int) -> dict[str, Tensor]:
    """Returns buckets of the distances to `keys` positions, [rows, 1, keys]; for predicting streams, to one more.

    The additional position is the streams' own. A position after the step's gets the bucket of the step's own position.
    All layers have the same buckets, which are kept on the tensor that all layers get.
    """
    from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

    found = getattr(position_ids, _BUCKETS, None)
    if found is None:
        relative_positions = torch.arange(keys + 1, device=position_ids.device) - position_ids
        main, predicting = (
            compute_relative_buckets(module.num_buckets, module.relative_max_distance, distances, False)
            for distances in (relative_positions[:, :keys] + 1, relative_positions)
        )
        found = {
            "main_relative_position_buckets": main.expand(rows, 1, -1),
            "predict_relative_position_buckets": predicting.expand(rows, 1, -1),
        }
        setattr(position_ids, _BUCKETS, found)
    return found
