"""The log-probabilities of a step on their way through FairSeq's loop.

The loop looks for NaN in all of them, and writes into those that it finds: two passes over the vocabulary, and a mask
of its size. There are hardly ever any, which the sum tells in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Below, a pass over the scores takes less time than what is around it.
MIN_SCORES = 2**16

# What `x != y` may come as.
_NOT_EQUAL = (Tensor.__ne__, Tensor.ne, torch.ne)


class LogProbabilities(Tensor):
    """Log-probabilities without NaN, as long as nobody writes into them: `x != x` is the mask that holds nowhere."""

    _version_without_nan: int

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NOT_EQUAL and args[0] is args[1] and args[0]._version == args[0]._version_without_nan:
                return torch.zeros((), dtype=torch.bool).expand(args[0].shape).as_subclass(_Nowhere)
            if func is Tensor.__setitem__ and type(args[1]) is _Nowhere:
                return None
            return func(*_plain(args), **_plain(kwargs or {}))


class _Nowhere(Tensor):
    """A mask that is false everywhere. Whatever is done with it, but for writing where it holds, is done as ever."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, LogProbabilities) for kind in types):
            return NotImplemented  # theirs
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_plain(args), **_plain(kwargs or {}))


def _plain(value: Any) -> Any:
    if isinstance(value, (LogProbabilities, _Nowhere)):
        return value.as_subclass(Tensor)
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(part) for part in value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value


def without_nan(log_probs: Tensor) -> Tensor:
    """The log-probabilities of a step as the loop is to get them; as they are where nothing is gained, or NaN is found.

    Args:
        log_probs: any shape.
    """
    if type(log_probs) is not Tensor or log_probs.device.type != "cpu" or log_probs.numel() < MIN_SCORES:
        return log_probs
    if not log_probs.dtype.is_floating_point or log_probs.sum().isnan():
        return log_probs
    made = log_probs.as_subclass(LogProbabilities)
    made._version_without_nan = made._version
    return made
