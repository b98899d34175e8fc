"""The hook around `GenerationMixin.generate`: opens a call, and repeats it with the original code if it fails."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fastgen import caches, counters, patching
from fastgen.decoding import host_memory
from fastgen.decoding.randomness import RandomState
from fastgen.optimizer.transformers import models, user_code
from fastgen.optimizer.transformers.call import ENTRY_POINT, Call
from fastgen.optimizer.transformers.speculation import assisted
from fastgen.optimizer.transformers.speculation.drafts import Draft


def generate(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `GenerationMixin.generate`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    try:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
    except TypeError:
        return wrapped(*args, **kwargs)  # which raises it
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    draft, arguments = assisted.taken_over(model, arguments)
    reason = _unsupported(model, arguments)
    if reason is not None:
        counters.count_fallback(ENTRY_POINT, reason)
        with patching.suspended():  # an assistant's own calls are part of this one
            return wrapped(*args, **kwargs)
    with host_memory.kept(model.device):
        return _accelerated(wrapped, model, arguments, draft)


def _accelerated(wrapped: Any, model: Any, arguments: dict[str, Any], draft: Draft | None) -> Any:
    """The call, with the original code should it fail. What it takes of memory is free when this returns."""
    scores_are_private = not (arguments.get("logits_processor") or _option(model, arguments, "output_logits"))
    call = Call(model, scores_are_private, arguments.get("past_key_values") is not None, draft=draft)
    attempt = _Attempt(call, arguments)
    with call:
        try:
            result = wrapped(**attempt.arguments)
            call.finish()
            return result
        except BaseException as error:
            if not (isinstance(error, Exception) and call.has_intervened and attempt.may_be_ours(error)):
                call.break_off()
                raise
            call.abandon()
            failure = error
    return attempt.repeat(wrapped, failure)


def _unsupported(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why this call is not accelerated, as far as can be told before it starts."""
    # With several beams the library warns that it does not draft, and searches as without.
    has_beams = (_option(model, arguments, "num_beams") or 1) > 1
    if not has_beams and any(_option(model, arguments, name) for name in assisted.OPTIONS):
        return "assisted decoding"
    for name, what in (
        ("custom_generate", "a custom decoding loop"),
        ("synced_gpus", "a model sharded over processes"),
    ):
        if _option(model, arguments, name):
            return what
    if _option(model, arguments, "cache_implementation") == "paged":
        return "continuous batching"
    return models.unsupported(model)


def _option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """An argument of the call, or what stands for it in the generation config given or in the model's own."""
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


class _Attempt:
    """An accelerated call, and all that is needed to do it over with the original code."""

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        self._call = call
        self._original = arguments
        self._random_state = RandomState(call.model.device)
        # Not the streamer's: what it was fed cannot be taken back, and is left out the second time instead.
        self._user_state = user_code.SavedState(user_code.passed_to({**arguments, "streamer": None}))
        # `generate` repeats the tensors of a given encoder output in place.
        encoder_outputs = arguments.get("encoder_outputs")
        self._encoder_outputs = dict(encoder_outputs) if isinstance(encoder_outputs, dict) else None
        self.arguments = dict(arguments)
        self._streamer = None
        if arguments.get("streamer") is not None:
            self._streamer = self.arguments["streamer"] = user_code.Streamer(arguments["streamer"], call.users_errors)

    def may_be_ours(self, error: Exception) -> bool:
        """Whether the original code might not have raised `error`, which ended an accelerated call."""
        if isinstance(error, counters.FallbackError) or self._call.users_errors.caused(error):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            # The original code needs more memory, not less; but it does not keep the steps of other calls.
            return caches.free_captured_steps()
        return True

    def repeat(self, wrapped: Any, failure: Exception) -> Any:
        """The call with the original code, from the same state. What was streamed is not streamed again.

        Raises:
            FallbackError: in strict mode, from `failure`.
            Exception: what the original code raises; then the call itself was at fault, and nothing is reported.
        """
        self._random_state.restore()
        self._user_state.restore()
        arguments = dict(self._original)
        if self._encoder_outputs is not None:
            for name, value in self._encoder_outputs.items():
                arguments["encoder_outputs"][name] = value
        if self._streamer is not None:
            self._streamer.rewind()
            arguments["streamer"] = self._streamer
        with patching.suspended():
            result = wrapped(**arguments)
        if isinstance(failure, torch.OutOfMemoryError):
            counters.count_fallback(ENTRY_POINT, "out of memory: captured steps were kept")
        else:
            counters.count_failure(ENTRY_POINT, failure, stacklevel=5)
        return result
