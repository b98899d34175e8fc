"""Attention of an encoder over a batch of sequences of one length, by FastGen's operator.

torch's runs for everything else, and where it is measured to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastgen import patching, releases
from fastgen.decoding import packing
from fastgen.decoding.captured.recording import is_capturing

# Arguments of attention functions that change which tokens of its sequence one attends to.
_CHANGING = ("sliding_window", "softcap", "s_aux", "position_bias", "is_causal", releases.PAGED_CACHE)

_is_overridden: ContextVar[bool] = ContextVar("fastgen_overridden_attention", default=False)


def override_attention() -> AbstractContextManager[None]:
    """Inside this, the library's attention function for SDPA is `over_all_tokens`."""
    return patching.held(_is_overridden, True)


def changing_argument(kwargs: Mapping[str, Any]) -> str | None:
    """A further argument of an attention function that changes which tokens attend to each other, if there is one."""
    given = ((name, kwargs.get(name)) for name in _CHANGING)
    return next((name for name, value in given if value is not None and value is not False), None)


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function that runs in the place of one of the library."""
    if function is not sdpa_attention_forward or not _is_overridden.get() or not patching.is_active():
        return function
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return function
    # What is compiled or captured runs as it is.
    return function if torch.compiler.is_compiling() or is_capturing() else over_all_tokens


def over_all_tokens(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`sdpa_attention_forward`, by FastGen's operator where each token attends to all of its sequence, and nothing
    else.
    """
    is_over_all = attention_mask is None and not dropout and not getattr(module, "is_causal", True)
    if is_over_all and changing_argument(kwargs) is None:
        context = packing.attend_equal(query, key, value, scaling)
        if context is not None:
            return context, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
