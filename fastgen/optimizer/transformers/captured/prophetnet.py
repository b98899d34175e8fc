"""Positions of Transformers' ProphetNet in a captured step.

The model makes its position a host number, and computes distances to keys from their number. These hooks pass it the
position on the device, and the buckets of the distances, for which its attention has arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

from fastgen import releases
from fastgen.decoding.captured.capturable import SymbolicLength

# Attribute of a step's positions that carries the buckets of all layers.
_BUCKETS = "_fastgen_buckets"


def embed_positions(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `ProphetNetPositionalEmbeddings.forward(inputs_shape, device, ...)`, with a K/V cache."""
    cache = releases.cache_in(kwargs)
    length = cache.get_seq_length() if cache is not None else None
    if not isinstance(length, SymbolicLength):
        return wrapped(*args, **kwargs)
    # ProphetNet counts positions from 1.
    position_ids = (length + (1 + module.padding_idx)).view(1, 1)
    return module._forward(position_ids), position_ids


def attend(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
