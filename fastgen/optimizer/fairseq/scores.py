"""The log-probabilities of a step on their way through FairSeq's loop.

The loop looks for NaN in all of them, and writes into those that it finds: two passes over the vocabulary, and a mask
of its size. There are hardly ever any, which the sum tells in a fraction of the time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Below, a pass over the scores takes less time than what is around it.
MIN_SCORES = 2**16

# What `x != y` may come as.
_NOT_EQUAL = (Tensor.__ne__, Tensor.ne, torch.ne)


class LogProbabilities(Tensor):
    """Log-probabilities without NaN, as long as nobody writes into them: `x != x` holds nowhere.

    What is computed from them are ordinary tensors, and so is the mask. Writing where that holds is what is left out.
    """

    _version_without_nan = -1
    _nowhere: tuple[Tensor, int] | None = None  # the mask, and its version

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NOT_EQUAL and len(args) == 2 and args[0] is args[1] and not kwargs:
                return args[0]._is_not_itself()
            if func is Tensor.__setitem__ and isinstance(args[0], cls) and args[0]._knows_as_nowhere(args[1]):
                return None
            return func(*args, **(kwargs or {}))

    def _is_not_itself(self) -> Tensor:
        if self._version != self._version_without_nan:
            return self.ne(self)
        mask = torch.zeros(self.shape, dtype=torch.bool)
        self._nowhere = mask, mask._version
        return mask

    def _knows_as_nowhere(self, mask: Any) -> bool:
        return self._nowhere is not None and mask is self._nowhere[0] and mask._version == self._nowhere[1]

    def __deepcopy__(self, memo: dict) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def without_nan(log_probs: Tensor) -> Tensor:
    """The log-probabilities of a step as the loop is to get them; as they are where nothing is gained, or NaN is found.

    Args:
        log_probs: any shape.
    """
    if type(log_probs) is not Tensor or log_probs.device.type != "cpu" or log_probs.numel() < MIN_SCORES:
        return log_probs
    if torch.is_inference_mode_enabled() or log_probs.is_inference():
        return log_probs  # has no version to tell whether it was written into
    if not log_probs.dtype.is_floating_point or log_probs.sum().isnan():
        return log_probs
    made = log_probs.as_subclass(LogProbabilities)
    made._version_without_nan = made._version
    return made
