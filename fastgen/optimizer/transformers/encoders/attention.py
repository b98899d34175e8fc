"""Attention of an encoder over whole texts that are as long as each other, by FastGen's operator.

torch's runs for everything else, and where it is measured to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastgen import patching
from fastgen.decoding import packing

# Arguments of attention functions that change what one token sees of the others of its text.
_CHANGING = ("sliding_window", "softcap", "s_aux", "position_bias", "is_causal", "cache")

_is_in_force: ContextVar[bool] = ContextVar("fastgen_attention_of_texts", default=False)


def own() -> AbstractContextManager[None]:
    """Inside this, attention functions of the library are `of_whole_texts`."""
    return patching.held(_is_in_force, True)


def changing_argument(kwargs: Mapping[str, Any]) -> str | None:
    """A further argument of an attention function that changes what tokens see of each other, if there is one."""
    given = ((name, kwargs.get(name)) for name in _CHANGING)
    return next((name for name, value in given if value is not None and value is not False), None)


def of_whole_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of the library, or in its place one that has FastGen's operator where that serves."""
    return partial(_attend, function) if _is_in_force.get() and function is sdpa_attention_forward else function


def _attend(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    is_over_all = attention_mask is None and not getattr(module, "is_causal", True)
    if is_over_all and not dropout and changing_argument(kwargs) is None and not torch.is_grad_enabled():
        context = packing.attend_texts(query, key, value, scaling)
        if context is not None:
            return context, None
    return function(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
