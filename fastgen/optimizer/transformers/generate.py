"""The entry points: the hook around `GenerationMixin.generate`, the hook around the decoding loop, for models whose own
`generate` calls it, and `fastgen.decode`, which needs no patch.

Each opens a `Call`, and repeats it with the original code if FastGen's part fails.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

from fastgen import counters, interrupts, memory, patching, releases
from fastgen.counters import FallbackError
from fastgen.decoding import host_memory
from fastgen.decoding.captured import recording
from fastgen.decoding.retrying import RandomState
from fastgen.optimizer.transformers import logits, loop, loop_hooks, models, user_code
from fastgen.optimizer.transformers.call import ENTRY_POINT, Call, fall_back
from fastgen.optimizer.transformers.entering import claimed, elsewhere
from fastgen.optimizer.transformers.prefill import mode_of_loop, prefill
from fastgen.optimizer.transformers.speculation.assisted import OPTIONS, Request, taken_over
from fastgen.releases import Usual

# Methods of the model that a decoding loop calls.
_HOOKED = {
    "_prefill": prefill,
    "prepare_inputs_for_generation": loop_hooks.prepare_inputs,
    "_update_model_kwargs_for_generation": loop_hooks.update_kwargs,
    "_check_early_stop_heuristic": loop_hooks.early_stop,
}
# The key under which a `generate`'s local variables also hold its code.
_CODE = "(code)"


@interrupts.guarded
@recording.outside()
def generate(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin.generate`."""
    original = wrapped
    if releases.has_former_names(kwargs):
        wrapped = patching.on_behalf(wrapped)
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    if kwargs.get("custom_generate") is decode:  # the patched loop runs anyway
        kwargs = {name: value for name, value in kwargs.items() if name != "custom_generate"}
    bound = patching.bound(original, args, kwargs)
    if bound is None:
        return wrapped(*args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    as_ever = partial(_attempted, model, partial(_decide, model, arguments), wrapped, partial(wrapped, *args, **kwargs))
    run = elsewhere()
    return as_ever() if run is None else run(model, arguments, as_ever)


def sample(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `GenerationMixin._sample`: runs the loop of a call, or one that a model's own `generate` begins."""
    is_begun = Call.current(model) is not None or not patching.stands_for("GenerationMixin.generate")
    given = {} if is_begun or not patching.is_active() else _given_to_generate(model)
    if not given or _is_librarys(given):
        return loop.decode(wrapped, model, args, kwargs)
    return _sample_of(given, wrapped, model, args, kwargs)


@interrupts.guarded
def _sample_of(given: dict[str, Any], wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a loop that a `generate` with these local variables has begun."""
    arguments = dict(inspect.signature(wrapped).bind(*args, **kwargs).arguments)
    arguments |= arguments.pop("model_kwargs", {})

    def run(**arguments: Any) -> Any:
        return loop.decode(wrapped, model, (), arguments)

    decide = partial(_decide_loop, model, arguments, given, is_of_own_generate=True)
    return _attempted(model, decide, run, partial(wrapped, *args, **kwargs))


@interrupts.guarded
def decode(
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """FastGen's decoding loop, for `model.generate(..., custom_generate=fastgen.decode)`: it needs no patch.

    `generate` calls it with the prepared arguments, for greedy search and sampling, with or without beams. It works
    even if FastGen is disabled by `fastgen.disable()` or FASTGEN_DISABLE=1; inside `fastgen.disabled()` the library's
    own loop runs.

    Args:
        model: a Transformers model.
        input_ids: int64 [sequences, length], `num_beams` or `num_return_sequences` rows for each input.
        logits_processor: the call's logits processors, including the library's own.
        stopping_criteria: the call's stopping criteria, including the library's own.
        generation_config: the generation config that the options of the call yield.
        streamer: by default the one given to `generate`.
        synced_gpus: by default the value given to `generate`.
        **model_kwargs: the model's inputs, including the KV cache and the encoder's output.

    Returns:
        What the library's loop returns: a LongTensor [sequences, length] or a ModelOutput.

    Raises:
        FallbackError: in strict mode, if the library's loop would run.
        ValueError: the library has no loop for such a call.
    """
    given = _given_to_generate(model)
    arguments = {
        "input_ids": input_ids,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": given.get("streamer") if streamer is None else streamer,
        "synced_gpus": bool(synced_gpus or given.get("synced_gpus")),
        **model_kwargs,
    }
    original = _librarys_loop(model, arguments, given)
    if patching.is_suspended():
        return original()
    with _with_hooks(model, arguments) as (with_hooks, arguments):
        decide = partial(_decide_loop, model, arguments, given)
        return _attempted(model, decide, partial(_run_loop, model, with_hooks), original)


class _Processors(LogitsProcessorList):
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits.process(super().__call__, self, args, kwargs)


class _Criteria(StoppingCriteriaList):
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loop_hooks.stopping_criteria(super().__call__, self, args, kwargs)


@contextlib.contextmanager
def _with_hooks(model: Any, arguments: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields replacements, with hooks, of the model and the arguments of a decoding loop for the length of this block.

    Yields the originals if the library's classes have the hooks. Otherwise, hooks go into objects of this call, which
    no other call sees. They are the hooks that `patches` puts into classes, except those of single processors and of
    the encoder.
    """
    if patching.is_active():
        yield model, arguments
        return
    lists = {"logits_processor": _Processors, "stopping_criteria": _Criteria}
    with patching.in_place(f"GenerationMixin.{name}" for name in _HOOKED):
        yield (
            loop_hooks.HookedModel(model, _HOOKED),
            {**arguments, **{name: kind(arguments[name]) for name, kind in lists.items()}},
        )


def _given_to_generate(model: Any) -> dict[str, Any]:
    """Returns the local variables, and the code, of the `generate` that calls the loop, the library's or the model's
    own: it does not pass on the streamer, an assistant, or the cache that it was given. Returns {} if another caller
    calls the loop.
    """
    known = [inspect.unwrap(vars(kind)["generate"]) for kind in type(model).__mro__ if "generate" in vars(kind)]
    codes, frame = [getattr(each, "__code__", None) for each in known], sys._getframe(1)
    while frame.f_back is not None and frame.f_code not in codes:
        frame = frame.f_back
    found = {**frame.f_locals, _CODE: frame.f_code} if frame.f_code in codes else {}
    return found if found.get("self") is model else {}


def _is_librarys(given: dict[str, Any]) -> bool:
    """Whether these local variables, as from `_given_to_generate`, are those of the library's `generate`."""
    return given.get(_CODE) is inspect.unwrap(GenerationMixin.generate).__code__


def _librarys_loop(model: Any, arguments: dict[str, Any], given: dict[str, Any]) -> Callable[[], Any]:
    """Returns the call of the library's own loop.

    Raises ValueError if there is none, or if it does not take these arguments, which `generate` checks only without
    `decode`.
    """
    config, assistant = arguments["generation_config"], given.get("assistant_model")
    mode = mode_of_loop(config, assistant)
    of_loop = {"streamer": arguments["streamer"], "assistant_model": assistant}
    model._validate_generation_mode(mode, config, {name: x for name, x in of_loop.items() if x is not None})
    name = GENERATION_MODES_MAPPING[mode]
    if not hasattr(model, name):
        raise ValueError(f"fastgen.decode has no loop for {mode.value}: leave out custom_generate")
    if mode.value == "assisted_generation":
        arguments = {**arguments, "assistant_model": assistant, "inputs_tensor": given.get("inputs_tensor")}
    return partial(getattr(model, name), **arguments)


def _run_loop(model: Any, with_hooks: Any, **arguments: Any) -> Any:
    """Runs the loop of a call without the library's own drafting; on FastGen if that is active."""
    name = "_beam_search" if arguments["generation_config"].num_beams > 1 else "_sample"
    function = inspect.getattr_static(type(model), name)
    own = patching.original_of(function) or function
    return loop.decode(own.__get__(with_hooks), model, (), arguments)


def _decide_loop(
    model: Any, arguments: dict[str, Any], given: dict[str, Any], is_of_own_generate: bool = False
) -> _Attempt | None:
    """Returns the call of a loop to accelerate; None, after counting the reason, if the library's loop runs."""
    of_draft = {"inputs": given.get("inputs_tensor"), "assistant_model": given.get("assistant_model")}
    asked = {name: value for name, value in arguments.items() if name in (*user_code.ARGUMENTS, "generation_config")}
    draft, plain = taken_over(model, {**asked, **of_draft})
    config = plain["generation_config"]
    reason = _unsupported(model, {**plain, "synced_gpus": arguments.get("synced_gpus")})
    reason = reason or _length_unsupported(config, arguments["stopping_criteria"])
    if reason is not None:
        fall_back(model, reason)
        return None
    # The library's `generate` makes a cache if it gets none. Another caller may continue with the cache that it passes.
    cache_is_the_users = releases.has_own_cache(given["kwargs"] if _is_librarys(given) else arguments)
    if is_of_own_generate and None in (config.num_beams, config.num_return_sequences):  # that sets no defaults
        config = copy.copy(config)
        config.num_beams, config.num_return_sequences = config.num_beams or 1, config.num_return_sequences or 1
    entering = None if is_of_own_generate else claimed()  # slots have one row of tokens per input
    call = Call(model, not config.output_logits, cache_is_the_users, entering=entering, draft=draft)
    call.is_of_own_generate = is_of_own_generate
    return _Attempt(call, {**arguments, "generation_config": config})


def _length_unsupported(config: Any, criteria: Any) -> str | None:
    """Returns why it is unknown how long a loop runs at most; None if its config says so, as after `generate`."""
    lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
    if config.max_length is None or not lengths or min(lengths) > config.max_length:
        return "a decoding loop that may run beyond the max_length of its config"
    return None


def _attempted(
    model: Any, decide: Callable[[], _Attempt | None], wrapped: Callable[..., Any], original: Callable[[], Any]
) -> Any:
    """Runs the call that `decide` returns.

    Args:
        decide: examines the call without changing anything; returns None if it falls back to the original code.
        wrapped: runs a call with given arguments; on the original code while FastGen is suspended.
        original: runs the call on the original code.
    """
    attempt, failed = None, None
    try:
        attempt = decide()
    except FallbackError:
        raise
    except Exception as failure:  # nothing has been changed yet
        interrupts.pass_on(failure)
        failed = failure
    if attempt is None:
        with patching.suspended():  # an assistant's own calls are part of this one
            result = original()
        if failed is not None:
            _report(model, failed)
        return result
    with host_memory.kept(model.device):
        result = _accelerated(wrapped, attempt)
    if attempt.call.draft is not None:
        releases.keep_past_of(result)
    return result


def _decide(model: Any, arguments: dict[str, Any]) -> _Attempt | None:
    """Returns the call to accelerate; None, after counting the reason, if it falls back to the original code."""
    draft, arguments = taken_over(model, arguments)
    reason = _unsupported(model, arguments)
    if reason is not None:
        fall_back(model, reason)
        return None
    scores_are_private = not (arguments.get("logits_processor") or Request(model, arguments).option("output_logits"))
    call = Call(model, scores_are_private, releases.has_own_cache(arguments), entering=claimed(), draft=draft)
    return _Attempt(call, arguments)


def _report(model: Any, failure: Exception) -> None:
    """Reports that an accelerated call failed and was repeated with the original code; FallbackError in strict mode."""
    reason = releases.note_failure(model, failure)
    if reason is None:
        counters.count_failure(ENTRY_POINT, failure)
    else:
        counters.count_fallback(ENTRY_POINT, reason)


def _accelerated(wrapped: Any, attempt: _Attempt) -> Any:
    """Runs the call, with the original code if it fails. The memory that it takes is free when this returns."""
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
    """Returns why this call is not accelerated, as far as can be told before it starts; None if it may be."""
    option = Request(model, arguments).option
    # With several beams, the library warns that it does not draft, and runs a plain search.
    if (option("num_beams") or 1) <= 1 and any(map(option, OPTIONS)):
        return Usual("assisted decoding")
    if option("custom_generate"):
        return Usual("a custom decoding loop")
    if option("synced_gpus"):
        return Usual("a model sharded over processes")
    if option("cache_implementation") == "paged":
        return Usual("continuous batching")
    return models.unsupported(model)


class _Attempt:
    """An accelerated call, and what is needed to repeat it with the original code."""

    def __init__(self, call: Call, arguments: dict[str, Any]) -> None:
        self.call = call
        self._original = arguments
        self._random_state = RandomState(call.model.device)
        # Not the streamer's: its output cannot be taken back, and is skipped in the repetition instead.
        given = [arguments.get(name) for name in user_code.ARGUMENTS if name != "streamer"]
        parts = [part for value in given for part in (value if isinstance(value, (list, tuple)) else [value])]
        self._user_state = user_code.SavedState(part for part in parts if part is not None)
        # `generate` repeats encoder outputs in place, and adds to them.
        encoded = arguments.get(releases.ENCODED)
        outputs = [arguments.get("encoder_outputs"), encoded, *(encoded.values() if isinstance(encoded, dict) else ())]
        self._encoded = [(each, dict(each)) for each in outputs if isinstance(each, dict)]
        self.arguments = dict(arguments)
        self._streamer = None
        if arguments.get("streamer") is not None:
            self._streamer = self.arguments["streamer"] = user_code.Streamer(arguments["streamer"], call.users_errors)

    def may_be_ours(self, error: Exception) -> bool:
        """Whether `error`, which ended an accelerated call, may not occur in the original code."""
        if not (self.call.has_intervened or self.call.has_failed):
            return False
        if isinstance(error, FallbackError) or self.call.users_errors.caused(error):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            # The original code needs more memory, not less, but does not keep the captured steps of other calls.
            return memory.free_captured_steps()
        return True

    def repeat(self, wrapped: Any, failure: Exception) -> Any:
        """Runs the call with the original code, from the same state. Streamed tokens are not streamed again.

        Raises:
            FallbackError: in strict mode, from `failure`.
            Exception: what the original code raises; the call itself was then at fault, and nothing is reported.
        """
        self._random_state.restore()
        self._user_state.restore()
        arguments = releases.with_current_names(self._original)
        for outputs, before in self._encoded:
            for name in outputs.keys() - before.keys():
                del outputs[name]
            for name, value in before.items():
                outputs[name] = value
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
