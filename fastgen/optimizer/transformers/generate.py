"""The hook around `GenerationMixin.generate`: opens a call, and repeats it with the original code if it fails."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
import wrapt

from fastgen import counters, patching
from fastgen.decoding import host_memory
from fastgen.decoding.randomness import RandomState
from fastgen.optimizer.transformers.call import ENTRY_POINT, Call
from fastgen.optimizer.transformers.prefill import model_unsupported
from fastgen.optimizer.transformers.state import SavedState

# Arguments of `generate` that are code of the user's. What they raise is theirs, and is passed on.
_USER_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


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
    reason = _unsupported(model, arguments)
    if reason is not None:
        counters.count_fallback(ENTRY_POINT, reason)
        with patching.suspended():  # an assistant's own calls are part of this one
            return wrapped(*args, **kwargs)
    with host_memory.kept(model.device):
        return _accelerated(wrapped, model, arguments)


def _accelerated(wrapped: Any, model: Any, arguments: dict[str, Any]) -> Any:
    """The call, with the original code should it fail. What it takes of memory is free when this returns."""
    attempt = _Attempt(model, arguments)
    cache_is_the_users = arguments.get("past_key_values") is not None
    runs_user_code = any(True for _ in _user_objects(arguments))
    with Call(model, _scores_are_private(model, arguments), cache_is_the_users, runs_user_code) as call:
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
    """Why this call is not accelerated, as far as can be told before it starts; None when it may be."""
    for name, what in (
        ("assistant_model", "assisted decoding"),
        ("prompt_lookup_num_tokens", "assisted decoding"),
        ("custom_generate", "a custom decoding loop"),
        ("synced_gpus", "a model sharded over processes"),
    ):
        if _option(model, arguments, name):
            return what
    if _option(model, arguments, "cache_implementation") == "paged":
        return "continuous batching"
    return model_unsupported(model) or _modules_unsupported(model)


def _modules_unsupported(model: Any) -> str | None:
    """Why a part of the model keeps it from being accelerated, or None.

    Dropout draws for every row of a batch, and a hook sees every row of it: neither may meet a smaller one than usual.
    The library's own hooks (which record attentions and hidden states) and those of accelerate are fine.
    """
    for module in model.modules():
        if module.training:
            return "the model, or a part of it, is in training mode"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not getattr(hook, "__module__", "").startswith(("transformers.", "accelerate.", "torch.")):
                return "forward hooks are registered on the model"
    return None


def _scores_are_private(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether processors may change the scores in place: nobody outside the library's loop can have kept them."""
    return not (arguments.get("logits_processor") or _option(model, arguments, "output_logits"))


def _option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """An argument of the call, or what stands for it in the generation config given or in the model's own."""
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


class _Attempt:
    """An accelerated call, and all that is needed to do it over with the original code."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self._original = arguments
        self._random_state = RandomState(model.device)
        # Not the streamer's: what it was fed cannot be taken back, and is left out the second time instead.
        self._user_state = SavedState(_user_objects({**arguments, "streamer": None}))
        # `generate` repeats the tensors of a given encoder output in place.
        encoder_outputs = arguments.get("encoder_outputs")
        self._encoder_outputs = dict(encoder_outputs) if isinstance(encoder_outputs, dict) else None
        self.arguments = dict(arguments)
        self._streamer = None
        if arguments.get("streamer") is not None:
            self._streamer = self.arguments["streamer"] = _Streamer(arguments["streamer"])

    def may_be_ours(self, error: Exception) -> bool:
        """Whether the original code might not have raised `error`, which ended an accelerated call."""
        if isinstance(error, counters.FallbackError):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            # The original code needs more memory, not less; but it does not keep the steps of other calls.
            return _drop_captured_steps()
        return not _raised_by(error, list(_user_objects(self._original)))

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
            counters.count_left_out(ENTRY_POINT, "out of memory: captured steps were kept")
        else:
            counters.count_failure(ENTRY_POINT, failure, stacklevel=5)
        return result


class _Streamer(wrapt.ObjectProxy):
    """A streamer that, after `rewind`, leaves out as many `put`s as were made before, and the end if it came."""

    def __init__(self, streamer: Any) -> None:
        super().__init__(streamer)
        self._self_done = 0
        self._self_skip = 0
        self._self_has_ended = False

    def put(self, value: Any) -> None:
        if self._self_skip:
            self._self_skip -= 1
            return
        self.__wrapped__.put(value)
        self._self_done += 1

    def end(self) -> None:
        if not self._self_has_ended:
            self.__wrapped__.end()
            self._self_has_ended = True

    def rewind(self) -> None:
        self._self_skip = self._self_done


def _drop_captured_steps() -> bool:
    """Frees what earlier calls have left for later ones; False if there was nothing."""
    steps = sys.modules.get("fastgen.optimizer.transformers.captured.kept")
    return steps is not None and steps.drop_all()


def _user_objects(arguments: dict[str, Any]) -> Iterator[Any]:
    """The processors, criteria, functions and streamers that the user passed."""
    for name in _USER_CODE:
        given = arguments.get(name)
        for part in given if isinstance(given, (list, tuple)) else [given]:
            if part is not None:
                yield part


def _raised_by(error: Exception, suspects: list[Any]) -> bool:
    """Whether code of one of the objects is on the stack of `error`."""
    codes, objects = set(), set()
    for part in suspects:
        objects.add(id(part))
        function = getattr(part, "__func__", part)
        if hasattr(function, "__code__"):
            codes.add(function.__code__)
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in codes or id(frame.f_locals.get("self")) in objects:
            return True
        traceback = traceback.tb_next
    return False
