"""What a model's rows have to do with each other."""

from __future__ import annotations

from typing import Any

from torch import nn

# Rotary embeddings of these kinds have frequencies that depend on the longest row of the batch.
_ADAPTIVE_ROPE = ("dynamic", "longrope")
_ROPE = ("rope_type", "rope_parameters", "rope_scaling")


def rows_depend_on_each_other(model: Any) -> bool:
    """Whether what the model says of one input depends on which others are in the batch, or on how long they are."""
    seen = set()
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao."):
            return True  # dynamically quantised layers have one scale for all rows
        for holder in (module, _attribute(module, "config")):
            if holder is None or id(holder) in seen:
                continue
            seen.add(id(holder))
            if any(_is_adaptive(_attribute(holder, name)) for name in _ROPE):
                return True
            if _attribute(holder, "moe_eval_capacity_token_fraction") is not None:
                return True  # rows compete for the places of an expert
    return False


def _attribute(holder: Any, name: str) -> Any:
    """An attribute, or None."""
    if isinstance(holder, nn.Module) and name not in vars(holder) and not hasattr(type(holder), name):
        return None  # it would look through its parameters and parts, and make an error: that takes most of the time
    return getattr(holder, name, None)


def _is_adaptive(rope: Any) -> bool:
    return rope is not None and any(kind in repr(rope) for kind in _ADAPTIVE_ROPE)
