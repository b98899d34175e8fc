"""The state of the user's own objects, saved so that a call can be done over as if it had not been tried before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class SavedState:
    """The attributes of some objects: numbers and other values, and the contents of containers and tensors.

    What an attribute only refers to (a model, a tokenizer) is left alone, and so is what is kept elsewhere, in a
    file or a closure.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        owners = [getattr(part, "__self__", part) for part in objects]  # a method's state is that of its object
        self._saved = [
            (owner, {name: (value, _copy(value)) for name, value in vars(owner).items()})
            for owner in owners
            if hasattr(owner, "__dict__") and not isinstance(owner, torch.nn.Module)
        ]

    def restore(self) -> None:
        """Every object as it was."""
        for part, attributes in self._saved:
            state = vars(part)
            for name in state.keys() - attributes.keys():
                del state[name]
            for name, (value, content) in attributes.items():
                state[name] = _put_back(value, content)


def _copy(value: Any) -> Any:
    """The contents of a container or tensor; of anything else the object itself."""
    if type(value) is dict:
        return {key: _copy(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(part) for part in value)
    if type(value) is set:
        return set(value)
    if type(value) is torch.Tensor:
        return value.detach().clone()
    return value


def _put_back(value: Any, content: Any) -> Any:
    """The same container or tensor, with its contents of before: others may hold it too."""
    if type(value) is list:
        value[:] = content
    elif type(value) in (dict, set):
        value.clear()
        value.update(content)
    elif type(value) is torch.Tensor and value.shape == content.shape:
        value.detach().copy_(content)
    return value
