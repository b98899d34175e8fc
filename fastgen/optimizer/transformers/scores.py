"""The scores of a step on their way through the library's loop, without the copies that nobody needs.

A step of beam search copies the logits, so that no reference to the model's outputs is left, and adds the running score
of each beam to all of its continuations, of which a few are kept. Here the loop gets tensors that do the first for
nothing and put the second off until the best are taken, where both are one pass (`fastgen.ops.best_candidates`). To
everything else that is done with them they are what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen import patching
from fastgen.decoding.shared import METADATA
from fastgen.ops.best_candidates import best_candidates
from fastgen.optimizer.transformers.call import Call

# Below, a pass over the scores takes less time than what is around it.
MIN_SCORES = 2**16


class StepLogits(torch.Tensor):
    """The logits of a step, [rows, 1, vocabulary], which nobody holds but the loop: its copy of them is none."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__:
                return args[0].as_subclass(Tensor)[args[1]].as_subclass(cls)
            if func is Tensor.to and len(args) == 1 and isinstance(args[0], cls):
                logits = args[0].as_subclass(Tensor)
                same = kwargs.get("dtype") is logits.dtype and kwargs.get("device") == logits.device
                if same and kwargs.keys() == {"copy", "dtype", "device"}:
                    return logits
            return func(*_plain(args), **_plain(kwargs))


class LogProbabilities(torch.Tensor):
    """Log-probabilities after the processors, [rows, vocabulary], to which running scores may have been added.

    Its data are those without the running scores, in the shape of the sum.
    """

    _running: Tensor | None

    @classmethod
    def of(cls, scores: Tensor, running: Tensor | None = None) -> LogProbabilities:
        """
        Args:
            scores: any shape that is [inputs, beams, vocabulary] in order.
            running: [inputs, beams], added to them, or None.
        """
        made = scores.as_subclass(cls)
        made._running = running
        return made

    def plain(self) -> Tensor:
        """The ordinary tensor that this one stands for."""
        scores = self.as_subclass(Tensor)
        if self._running is None:
            return scores
        return (scores.reshape(*self._running.shape, -1) + self._running.unsqueeze(2)).reshape(scores.shape)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **kwargs)
            rule = _RULES.get(func)
            done = rule(*args, **kwargs) if rule is not None and isinstance(args[0] if args else None, cls) else None
            if done is not None:
                return done
            if _writes(func) and isinstance(args[0], cls) and args[0]._running is not None:
                raise RuntimeError(f"{func.__name__} writes into a sum of scores that has not been computed")
            return func(*_plain(args), **_plain(kwargs))


def _writes(func: Callable) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _reshape(scores: LogProbabilities, *shape: Any, **options: Any) -> Any:
    reshaped = scores.as_subclass(Tensor).reshape(*shape, **options)
    return LogProbabilities.of(reshaped, scores._running)


def _add(scores: LogProbabilities, running: Any, **options: Any) -> Any:
    if scores._running is not None or not isinstance(running, Tensor) or running.dtype is not scores.dtype or options:
        return None
    if scores.dim() != 3 or running.shape != (*scores.shape[:2], 1):
        return None
    return LogProbabilities.of(scores.as_subclass(Tensor), running.squeeze(2))


def _topk(scores: LogProbabilities, k: int, *more: Any, **options: Any) -> Any:
    running = scores._running
    if running is None or more or options or scores.dim() != 2 or scores.shape[0] != running.shape[0]:
        return None
    rows = scores.as_subclass(Tensor).reshape(running.numel(), -1)
    return torch.return_types.topk(best_candidates(rows, running, k))


# What is done on the parts; None as a result leaves it to the plain tensor.
_RULES: dict[Any, Callable[..., Any]] = {
    torch.reshape: _reshape,
    Tensor.reshape: _reshape,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    torch.topk: _topk,
    Tensor.topk: _topk,
}


def _plain(value: Any) -> Any:
    if isinstance(value, LogProbabilities):
        return value.plain()
    if isinstance(value, StepLogits):
        return value.as_subclass(Tensor)
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(part) for part in value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value


def _pays(scores: Any) -> bool:
    return (
        type(scores) is Tensor
        and scores.dtype is torch.float32
        and scores.device.type == "cpu"
        and scores.numel() >= MIN_SCORES
        and not torch.is_grad_enabled()
    )


def uncopied(logits: Tensor) -> Tensor:
    """The logits of an accelerated step, as the loop is to get them.

    What is a part of more, such as of a prompt's, is copied: in the scores of the call it would hold all of it.
    """
    is_whole = logits.nbytes == logits.untyped_storage().nbytes()
    return logits.as_subclass(StepLogits) if is_whole and _pays(logits) else logits


def process(wrapped: Any, processors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wrapper of `LogitsProcessorList.__call__`, whose result the running scores are added to in a beam search."""
    scores = wrapped(*args, **kwargs)
    call = Call.current()
    if call is None or not call.takes_best or not patching.is_active() or not _pays(scores):
        return scores
    return LogProbabilities.of(scores)
