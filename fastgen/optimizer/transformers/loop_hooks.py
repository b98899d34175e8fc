"""Hooks in the library's decoding loops: they let finished inputs leave the batch, and replace the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import wrapt
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from fastgen import patching, releases
from fastgen.optimizer.transformers import scores
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.compaction import BatchCompaction
from fastgen.optimizer.transformers.models import reads_padding

# The methods through which finished inputs leave. A model that overrides them may pass on, or read, anything.
_HOOKED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# The parts of the loops that see all rows. The loops themselves are checked before a call is accelerated.
_SEARCH = (
    "_get_logits_processor",
    "_get_stopping_criteria",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
)


class HookedModel(wrapt.CallableObjectProxy):
    """A model for one of the library's loops: some of its methods have hooks, whatever its class has."""

    def __init__(self, model: Any, hooks: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(model)
        self._self_hooks = hooks

    @property
    def __call__(self) -> Any:  # also one that the user has set on the model
        return self.__wrapped__.__call__

    def __getattr__(self, name: str) -> Any:
        model = self.__wrapped__
        value, hook = getattr(model, name), self._self_hooks.get(name)
        return value if hook is None else lambda *args, **kwargs: hook(value, model, args, kwargs)


def may_leave(call: Call, config: Any, batch: int) -> bool:
    """Whether nothing outside the library's loop sees the rows of finished inputs."""
    kind, librarys = type(call.model), vars(GenerationMixin)
    return (
        batch > 1
        and config.eos_token_id is not None  # otherwise, all inputs end together
        and call.model.device.type == "cpu"  # on other devices, reading which inputs have finished would synchronize
        and reads_padding(call.model, config)
        and not call.runs_user_code
        and not config.return_dict_in_generate
        and not call.cache_is_the_users
        and all(patching.stands_for(f"GenerationMixin.{name}") for name in _HOOKED)
        and all(inspect.getattr_static(kind, name, None) is librarys.get(name) for name in (*_HOOKED, *_SEARCH))
        and not call.rows_depend_on_each_other
    )


def _compaction(call: Call | None) -> BatchCompaction | None:
    return call.compaction if call is not None and patching.is_active() else None


def prepare_inputs(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin.prepare_inputs_for_generation`, which returns the inputs of the next step."""
    if releases.has_former_names(kwargs):  # given by a model's own method, which calls this one
        wrapped = patching.on_behalf(wrapped)
    inputs = wrapped(*args, **kwargs)
    compaction = _compaction(Call.current(model))
    return inputs if compaction is None else compaction.select(inputs)


def update_kwargs(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin._update_model_kwargs_for_generation(outputs, ...)`, called after each step."""
    call = Call.current(model)
    if call is not None and call.accelerated and patching.is_active():
        outputs = kwargs["outputs"] if "outputs" in kwargs else args[0]
        logits = outputs.logits if call.compaction is None else call.compaction.spread(outputs.logits)
        outputs.logits = scores.uncopied(logits)
    return wrapped(*args, **kwargs)


def stopping_criteria(wrapped: Any, criteria: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `StoppingCriteriaList.__call__`."""
    done = wrapped(*args, **kwargs)
    call = Call.current()
    compaction = _compaction(call)
    if call is not None and compaction is not None and not compaction.note_criteria(criteria, done):
        call.compaction = None  # happens in the first step, before anything has left
    return done


def early_stop(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `GenerationMixin._check_early_stop_heuristic`, which ends each step of a beam search."""
    may_improve = wrapped(*args, **kwargs)
    compaction = _compaction(Call.current())
    if compaction is not None and {"is_sent_finished", "beam_scores", "early_stopping"} <= kwargs.keys():
        compaction.note_search(may_improve, kwargs["is_sent_finished"], kwargs["beam_scores"], kwargs["early_stopping"])
    return may_improve
