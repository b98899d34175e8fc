"""The hook around `GenerationMixin.generate`: opens a call, and repeats it with the original code if it fails."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from fastgen import caches, counters, interrupts, patching, releases
from fastgen.counters import FallbackError
from fastgen.decoding import host_memory
from fastgen.decoding.randomness import RandomState
from fastgen.optimizer.transformers import models, user_code
from fastgen.optimizer.transformers.call import ENTRY_POINT, Call, fall_back
from fastgen.optimizer.transformers.speculation import assisted
from fastgen.releases import Usual


@interrupts.guarded
def generate(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `GenerationMixin.generate`."""
    original = wrapped
    if releases.has_former_names(kwargs):
        wrapped = patching.on_behalf(wrapped)
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    bound = patching.bound(original, args, kwargs)
    if bound is None:
        return wrapped(*args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    attempt, failed = None, None
    try:
        attempt = _decide(model, arguments)
    except FallbackError:
        raise
    except Exception as failure:  # nothing has been changed yet
        interrupts.pass_on(failure)
        failed = failure
    if attempt is None:
        with patching.suspended():  # an assistant's own calls are part of this one
            result = wrapped(*args, **kwargs)
        if failed is not None:
            _report(model, failed)
        return result
    with host_memory.kept(model.device):
        return _accelerated(wrapped, attempt)


def _decide(model: Any, arguments: dict[str, Any]) -> _Attempt | None:
    """The call to be accelerated; None, and the reason is counted, if it goes to the original code."""
    draft, arguments = assisted.taken_over(model, arguments)
    reason = _unsupported(model, arguments)
    if reason is not None:
        fall_back(model, reason)
        return None
    scores_are_private = not (arguments.get("logits_processor") or _option(model, arguments, "output_logits"))
    call = Call(model, scores_are_private, releases.has_own_cache(arguments), draft=draft)
    return _Attempt(call, arguments)


def _report(model: Any, failure: Exception) -> None:
    """An accelerated call has failed, and was repeated with the original code. Raises FallbackError in strict mode."""
    reason = releases.note_failure(model, failure)
    if reason is None:
        counters.count_failure(ENTRY_POINT, failure)
    else:
        counters.count_fallback(ENTRY_POINT, reason)


def _accelerated(wrapped: Any, attempt: _Attempt) -> Any:
    """The call, with the original code should it fail. What it takes of memory is free when this returns."""
    call = attempt.call
    with ExitStack() as context:
        try:
            context.enter_context(call)
            result = wrapped(**attempt.arguments)
            call.finish()
            return result
        except BaseException as error:
            if not (isinstance(error, Exception) and attempt.may_be_ours(error)):
                call.break_off()
                raise
            interrupt = interrupts.behind(error)
            if interrupt is not None:
                call.break_off()
                raise interrupt from None
            call.abandon()
            failure = error
    return attempt.repeat(wrapped, failure)


def _unsupported(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why this call is not accelerated, as far as can be told before it starts."""
    # With several beams the library warns that it does not draft, and searches as without.
    has_beams = (_option(model, arguments, "num_beams") or 1) > 1
    if not has_beams and any(_option(model, arguments, name) for name in assisted.OPTIONS):
        return Usual("assisted decoding")
    for name, what in (
        ("custom_generate", "a custom decoding loop"),
        ("synced_gpus", "a model sharded over processes"),
    ):
        if _option(model, arguments, name):
            return Usual(what)
    if _option(model, arguments, "cache_implementation") == "paged":
        return Usual("continuous batching")
    return models.unsupported(model)


def _option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """An argument of the call, or what stands for it in the generation config given or in the model's own."""
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


class _Attempt:
    """An accelerated call, and all that is needed to do it over with the original code."""

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        self.call = call
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
        if not (self.call.has_intervened or self.call.has_failed):
            return False
        if isinstance(error, FallbackError) or self.call.users_errors.caused(error):
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
        arguments = releases.with_current_names(self._original)
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
            _report(self.call.model, failure)
        return result
