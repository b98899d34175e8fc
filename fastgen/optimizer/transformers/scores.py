"""The scores of a step in the library's loop, without unneeded copies.

A step of beam search copies the logits, and adds the running score of each beam to all of its continuations. Here, the
loop gets tensors that skip the copy and defer the addition until the best candidates are taken, where both are one pass
(`fastgen.ops.search_step`). For all other operations they act as the tensors that they represent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastgen import patching
from fastgen.decoding.kv.view import METADATA
from fastgen.ops.search_step import MIN_SCORES, best_candidates
from fastgen.optimizer.transformers.call import Call


class _Scores(torch.Tensor):
    """A tensor with rules for some operations. For others, and if a rule returns None, the plain tensor is used."""

    _rules: ClassVar[dict[Any, Callable[..., Any]]]
    _running: Tensor | None = None

    def plain(self) -> Tensor:
        """Returns the ordinary tensor that this one represents."""
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
            if args and isinstance(args[0], cls):
                rule = cls._rules.get(func)
                done = rule(*args, **kwargs) if rule is not None else None
                if done is not None:
                    return done
                if args[0]._running is not None and _writes(func):
                    raise RuntimeError(f"{func.__name__} writes into a sum of scores that has not been computed")
            args, kwargs = tree_map_only(_Scores, _Scores.plain, (args, kwargs))
            return func(*args, **kwargs)


def _writes(func: Callable) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


class StepLogits(_Scores):
    """The logits of a step, [rows, 1, vocabulary]. Only the loop refers to them, so a copy is the tensor itself."""

    def _select(self, index: Any) -> Any:
        return self.as_subclass(Tensor)[index].as_subclass(StepLogits)

    def _copy(self, *args: Any, **options: Any) -> Any:
        is_copy = not args and options == {"copy": True, "dtype": self.dtype, "device": self.device}
        return self.as_subclass(Tensor) if is_copy else None

    _rules: ClassVar = {Tensor.__getitem__: _select, Tensor.to: _copy}


class LogProbabilities(_Scores):
    """Log-probabilities after the processors, [rows, vocabulary], to which running scores may have been added.

    Its data does not include the running scores, but has the shape of the sum.
    """

    @classmethod
    def of(cls, scores: Tensor, running: Tensor | None = None) -> LogProbabilities:
        """Wraps scores in the order [inputs, beams, vocabulary], of any shape, and addends [inputs, beams]."""
        made = scores.as_subclass(cls)
        made._running = running
        return made

    def _reshape(self, *shape: Any, **options: Any) -> Any:
        return LogProbabilities.of(self.as_subclass(Tensor).reshape(*shape, **options), self._running)

    def _add(self, running: Any, **options: Any) -> Any:
        if self._running is not None or not isinstance(running, Tensor) or running.dtype is not self.dtype or options:
            return None
        if self.dim() != 3 or running.shape != (*self.shape[:2], 1):
            return None
        return LogProbabilities.of(self.as_subclass(Tensor), running.squeeze(2))

    def _topk(self, k: int, *more: Any, **options: Any) -> Any:
        running = self._running
        if running is None or more or options or self.dim() != 2 or self.shape[0] != running.shape[0]:
            return None
        rows = self.as_subclass(Tensor).reshape(running.numel(), -1)
        return torch.return_types.topk(best_candidates(rows, running, k))

    _rules: ClassVar = {
        torch.reshape: _reshape,
        Tensor.reshape: _reshape,
        torch.add: _add,
        Tensor.add: _add,
        Tensor.__add__: _add,
        torch.topk: _topk,
        Tensor.topk: _topk,
    }


def _pays(scores: Any) -> bool:
    return (
        type(scores) is Tensor
        and scores.dtype is torch.float32
        and scores.device.type == "cpu"
        and scores.numel() >= MIN_SCORES
        and not torch.is_grad_enabled()
    )


def uncopied(logits: Tensor) -> Tensor:
    """Returns the logits of an accelerated step for the loop.

    A part of a larger tensor, such as a prompt's logits, is copied: otherwise the call's scores would keep all of it
    alive.
    """
    is_whole = logits.nbytes == logits.untyped_storage().nbytes()
    return logits.as_subclass(StepLogits) if is_whole and _pays(logits) else logits


def process(wrapped: Any, processors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `LogitsProcessorList.__call__`, to whose result a beam search adds the running scores."""
    scores = wrapped(*args, **kwargs)
    call = Call.current()
    if call is None or not call.takes_best or not patching.is_active() or not _pays(scores):
        return scores
    return LogProbabilities.of(scores)
