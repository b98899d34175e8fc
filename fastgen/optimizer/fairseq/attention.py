"""FairSeq's attention on FastGen's KV cache.

`MultiheadAttention` concatenates to its K/V in every step, and copies all of them when the beams are reordered. In an
accelerated call it uses a `GrowingKV`, which stores the source's K/V once per source, and appends new K/V in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.optimizer.fairseq.call import Call, State, Unsupported, inside_call


@inside_call
def attention(
    call: Call,
    wrapped: Any,
    module: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None = None,
    incremental_state: State | None = None,
    need_weights: bool = True,
    static_kv: bool = False,
    attn_mask: Tensor | None = None,
    before_softmax: bool = False,
    need_head_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Wrapper of `MultiheadAttention.forward`: query [positions, rows, dim], key, value [positions, sources, dim]."""
    state = call.state(module, incremental_state)
    if state is None:
        return NotImplemented  # the encoder, or a language model that contributes to the scores
    if module.self_attention:
        new = module.k_proj(query), module.v_proj(query)
        keys, values = call.extend(module, state, *(_heads(module, each) for each in new))
        mask = attn_mask if call.prefilled is not None else call.own_mask(key_padding_mask, query.dtype)
    else:
        keys, values = _of_source(call, module, key, state)
        mask = call.source_mask(key_padding_mask, query.dtype) if key_padding_mask is not None else None
    queries = _heads(module, module.q_proj(query))
    if need_head_weights:  # only for a layer whose weights the decoder returns
        context, weights = _with_weights(queries, keys, values, mask)
    else:
        context, weights = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), None
    return module.out_proj(context.permute(2, 0, 1, 3).flatten(2)), weights


@inside_call
def extend(
    call: Call, wrapped: Any, module: Any, keys: Tensor, values: Tensor, incremental_state: State | None
) -> tuple[Tensor, Tensor]:
    """Wrapper of ProphetNet's `NgramSelfAttention.extend`: K and V of the main stream, which all streams read."""
    state = call.state(module, incremental_state)
    return NotImplemented if state is None else call.extend(module, state, keys, values)


def _of_source(call: Call, module: Any, key: Tensor | None, state: State) -> tuple[Tensor, Tensor]:
    """Returns K and V of the encoder output, which the first step computes."""
    layer, is_new = call.layer(module, state)
    if is_new:
        if key is None or key.shape[1] != call.beams.batch:
            raise Unsupported("the encoder output does not have a row for each source")
        layer.extend(_heads(module, module.k_proj(key)).contiguous(), _heads(module, module.v_proj(key)).contiguous())
        if call.is_expanded:
            layer.expand(call.beams)
    return layer.read()


def _heads(module: Any, x: Tensor) -> Tensor:
    """Reshapes [positions, rows, dim] -> [rows, heads, positions, head dim]."""
    return x.unflatten(2, (module.num_heads, module.head_dim)).permute(1, 2, 0, 3)


def _with_weights(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the context, and the weights as [heads, rows, queries, keys]."""
    scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2))
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.matmul(weights.type_as(queries), values), weights.transpose(0, 1)
