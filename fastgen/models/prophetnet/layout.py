"""Parameters that are stored under the names of the authors' checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn


def store_as(module: nn.Module, names: dict[str, str]) -> None:
    """Has the state dict of `module` call its parameters as in `names`, {its own name: name in checkpoints}.

    A name in checkpoints that is also a parameter of `module` stands for both, which are then the same parameter.
    """

    def save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for own, stored in names.items():
            state[prefix + stored] = state.pop(prefix + own)

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for own, stored in names.items():
            if prefix + stored in state:
                state[prefix + own] = state[prefix + stored]
                if stored not in parameters:
                    del state[prefix + stored]

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)
