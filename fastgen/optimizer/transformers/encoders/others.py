"""Code in a model that is not the library's: nobody knows what it does with padding."""

from __future__ import annotations

from typing import Any

from fastgen.decoding.layers import Replacement

# Where modules are from that work on single tokens, but for attention of the library's.
_LIBRARIES = ("transformers.", "torch.nn.", "peft.")


def code_of_others(model: Any) -> str | None:
    """A class of modules in a model whose forward pass is not the library's, or has been compiled; None without one."""
    return next((type(module).__name__ for module in model.modules() if not _is_of_library(module)), None)


def _is_of_library(module: Any) -> bool:
    kind, own = type(module), vars(module).get("forward")
    return (
        module._compiled_call_impl is None
        and all(place.startswith(_LIBRARIES) for place in (kind.__module__, kind.forward.__module__))
        and (own is None or isinstance(own, Replacement) or hasattr(module, "_old_forward"))  # accelerate's
    )
