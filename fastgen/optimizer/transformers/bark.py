"""Bark's attention in a captured step.

The model masks with a table of `max_position_embeddings` positions. A step has one query, which sees every stored
position, and its buffers may be longer than the table. So the step attends without the table.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

from fastgen.decoding.kv.view import KVView


def attend(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `BarkSelfAttention._attn(query, key, value, attention_mask)`."""
    query, key = args[:2] if len(args) > 1 else (None, None)
    if query is None or not isinstance(key, KVView) or query.shape[-2] != 1 or type(wrapped) is not MethodType:
        return wrapped(*args, **kwargs)
    without_table = SimpleNamespace(is_causal=False, head_dim=module.head_dim, attn_dropout=module.attn_dropout)
    return wrapped.__func__(without_table, *args, **kwargs)
