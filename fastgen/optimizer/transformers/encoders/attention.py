"""Encoder attention over a batch of sequences of equal length, by FastGen's operator.

torch's attention runs in all other cases, and where measurements show that it is faster.
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
from fastgen.decoding import unpadding
from fastgen.decoding.captured.recording import is_capturing

# Arguments of attention functions that change which tokens of its sequence a token attends to.
_CHANGING = ("sliding_window", "softcap", "s_aux", "position_bias", "is_causal", releases.PAGED_CACHE)

_is_overridden: ContextVar[bool] = ContextVar("fastgen_overridden_attention", default=False)


def override_attention() -> AbstractContextManager[None]:
    """A context in which `over_all_tokens` replaces the library's attention function for SDPA."""
    return patching.held(_is_overridden, True)


def changing_argument(kwargs: Mapping[str, Any]) -> str | None:
    """Returns the name of an argument that changes which tokens attend to each other; None if none is given."""
    given = ((name, kwargs.get(name)) for name in _CHANGING)
    return next((name for name, value in given if value is not None and value is not False), None)


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the attention function that runs in place of a library function."""
    if function is not sdpa_attention_forward or not _is_overridden.get() or not patching.is_active():
        return function
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return function
    # Compiled or captured code keeps the library's function.
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
    """`sdpa_attention_forward`, by FastGen's operator if each token attends to exactly all tokens of its sequence."""
    is_over_all = attention_mask is None and not dropout and not getattr(module, "is_causal", True)
    if is_over_all and changing_argument(kwargs) is None:
        context = unpadding.attend_equal(query, key, value, scaling)
        if context is not None:
            return context, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
