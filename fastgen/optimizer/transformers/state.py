"""The state of the user's own objects, saved so that a call can be done over as if it had not been tried before."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch

# An object with more than so many parts, or larger tensors, is not saved: copying it would cost more than it is worth.
_MAX_PARTS = 10_000
_MAX_TENSOR_BYTES = 2**24
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)


class _TooMuch(Exception):
    """An object is too large, or too deep, to be saved."""


class SavedState:
    """The attributes of some objects: numbers and other values, and the contents of containers and tensors.

    What an attribute only refers to (a model, a tokenizer) is left alone, and so is what is kept elsewhere, in a file
    or a closure, and what is large.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._saved: list[tuple[Any, dict[str, tuple[Any, Any, int]]]] = []
        for part in objects:
            owner = getattr(part, "__self__", part)  # a method's state is that of its object
            if isinstance(owner, (type, torch.nn.Module)) or not isinstance(getattr(owner, "__dict__", None), dict):
                continue
            copier = _Copier()
            try:
                attributes = {name: (value, copier.copy(value), _version(value)) for name, value in vars(owner).items()}
            except _TooMuch:
                continue
            self._saved.append((owner, attributes))

    def restore(self) -> None:
        """Every object as it was."""
        for owner, attributes in self._saved:
            state = vars(owner)
            for name in state.keys() - attributes.keys():
                del state[name]
            for name, (value, content, version) in attributes.items():
                state[name] = value
                if version == 0 or version != _version(value):
                    _put_back(value, content)


class _Copier:
    """Copies containers and tensors, up to a size; of anything else it returns the object itself."""

    def __init__(self) -> None:
        self._left = _MAX_PARTS

    def copy(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > 50:  # a container that contains itself is infinitely deep
            raise _TooMuch
        content: Any = None
        if type(value) in _MAPPINGS:
            content = {key: self.copy(part, depth + 1) for key, part in value.items()}
        elif type(value) in _SEQUENCES:
            content = [self.copy(part, depth + 1) for part in value]
        if content is not None:
            made = copy.copy(value)
            _put_back(made, content)
            return made
        if type(value) is tuple:
            return tuple(self.copy(part, depth + 1) for part in value)
        if type(value) is set:
            return set(value)
        if type(value) is torch.Tensor:
            if value.nbytes > _MAX_TENSOR_BYTES or value.is_inference():
                raise _TooMuch
            return value.detach().clone()
        return value


def _version(value: Any) -> int:
    """How often a tensor has been changed, counted from 1; 0 for what does not count it."""
    return value._version + 1 if type(value) is torch.Tensor and not value.is_inference() else 0


def _put_back(value: Any, content: Any) -> None:
    """The contents of before into the same container or tensor: others may hold it too."""
    if type(value) in _SEQUENCES:
        value.clear()
        value.extend(content)
    elif type(value) in (*_MAPPINGS, set):
        value.clear()
        value.update(content)
    elif type(value) is torch.Tensor:
        value.detach().copy_(content)
