"""The hooks of a decoding loop without patches: in the objects of one call, where no other call meets them.

They are those that `patches` puts into the library's classes, but for those of single processors and of the encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import wrapt
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from fastgen import patching
from fastgen.optimizer.transformers import loop_hooks, scores
from fastgen.optimizer.transformers.prefill import prefill

_METHODS = {
    "_prefill": prefill,
    "prepare_inputs_for_generation": loop_hooks.prepare_inputs,
    "_update_model_kwargs_for_generation": loop_hooks.update_kwargs,
    "_check_early_stop_heuristic": loop_hooks.early_stop,
}


class Model(wrapt.CallableObjectProxy):
    """The model, for the library's loop to call: its methods that a loop calls have hooks."""

    def __getattr__(self, name: str) -> Any:
        model = self.__wrapped__
        value, hook = getattr(model, name), _METHODS.get(name)
        return value if hook is None else lambda *args, **kwargs: hook(value, model, args, kwargs)


class Processors(LogitsProcessorList):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return scores.process(super().__call__, self, args, kwargs)


class Criteria(StoppingCriteriaList):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return loop_hooks.stopping_criteria(super().__call__, self, args, kwargs)


@contextlib.contextmanager
def hooked(model: Any, arguments: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What stands for the model and the arguments of a decoding loop inside this block, with hooks.

    That is themselves where the library's classes have the hooks.
    """
    if patching.is_active():
        yield model, arguments
        return
    lists = {"logits_processor": Processors, "stopping_criteria": Criteria}
    with patching.in_place(f"GenerationMixin.{name}" for name in _METHODS):
        yield Model(model), {**arguments, **{name: kind(arguments[name]) for name, kind in lists.items()}}
