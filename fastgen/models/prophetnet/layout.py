"""Parameters that are stored under the names of the authors' checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn


def store_as(module: nn.Module, names: dict[str, str]) -> None:
    """Has the state dict of `module` call its parameters as in `names`, {its own name: name in checkpoints}.

    A name in checkpoints that is also a parameter of `module` stands for both, which are then the same parameter.
    """
    # Not closures: those could not be pickled with the module.
    module.register_state_dict_post_hook(partial(_save, names))
    module.register_load_state_dict_pre_hook(partial(_load, names))


def _save(names: dict[str, str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for own, stored in names.items():
        state[prefix + stored] = state.pop(prefix + own)


def _load(names: dict[str, str], module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for own, stored in names.items():
        if prefix + stored in state:
            state[prefix + own] = state[prefix + stored]
            if stored not in parameters:
                del state[prefix + stored]
