"""What a model's rows have to do with each other."""

from __future__ import annotations

import functools
from typing import Any

# Rotary embeddings of these kinds have frequencies that depend on the longest row of the batch.
_ADAPTIVE_ROPE = ("dynamic", "longrope")
_ROPE = frozenset({"rope_type", "rope_parameters", "rope_scaling"})
# With this, rows compete for the places of an expert.
_EXPERT_CAPACITY = "moe_eval_capacity_token_fraction"
_NAMES = _ROPE | {_EXPERT_CAPACITY}


def rows_depend_on_each_other(model: Any) -> bool:
    """Whether what the model says of one input depends on which others are in the batch, or on how long they are."""
    holders = {}
    for module in model.modules():
        kind, own = type(module), vars(module)
        if kind.__module__.startswith("torch.ao."):
            return True  # dynamically quantised layers have one scale for all rows
        if not _NAMES.isdisjoint(own) or _class_has_names(kind):
            holders[id(module)] = module
        config = own["config"] if "config" in own else _class_config(module)
        if config is not None:
            holders[id(config)] = config
    return any(_couples_rows(holder) for holder in holders.values())


def _class_config(module: Any) -> Any:
    """The configuration that a module has through its class."""
    return getattr(module, "config", None) if hasattr(type(module), "config") else None


@functools.cache
def _class_has_names(kind: type) -> bool:
    return any(hasattr(kind, name) for name in _NAMES)


def _couples_rows(holder: Any) -> bool:
    """Whether a module, or a configuration, says that rows depend on each other."""
    if getattr(holder, _EXPERT_CAPACITY, None) is not None:
        return True
    return any(_is_adaptive(getattr(holder, name, None)) for name in _ROPE)


def _is_adaptive(rope: Any) -> bool:
    return rope is not None and any(kind in repr(rope) for kind in _ADAPTIVE_ROPE)
