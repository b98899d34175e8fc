"""The decoding loops with a captured step: the hooks around `GenerationMixin._beam_search` and `_sample`.

They serve GPUs, and the CPU except for the calls that `_check_on_cpu` excludes. A call that is not supported, or whose
first steps turn out not to be capturable, continues with the library's loop, from the prefill that has been made.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import ModelOutput

from fastgen import counters, patching, releases, settings
from fastgen.decoding import library_code
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.interrupts import undoing
from fastgen.ops import gpu as operators
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers import user_code
from fastgen.optimizer.transformers.cache import has_windows
from fastgen.optimizer.transformers.call import Call, DoesNotPay, Unexpected
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding
from fastgen.optimizer.transformers.captured.key import MASKS, POSITIONS
from fastgen.optimizer.transformers.loop_hooks import HookedModel
from fastgen.optimizer.transformers.models import (
    STATES,
    STATES_MASK,
    TOKEN_TYPES,
    axis_of_rows,
    has_captured_steps,
    has_growing_frequencies,
    may_begin_again,
    reads_states,
    text_config,
    unread_inputs,
)
from fastgen.optimizer.transformers.prefill import has_no_rows, prefill
from fastgen.optimizer.transformers.special_models import DELAYS, PLAIN, Codebooks
from fastgen.optimizer.transformers.speculation.decoding import ENTRY_POINT as SPECULATION
from fastgen.optimizer.transformers.speculation.decoding import SpeculativeDecoding
from fastgen.optimizer.transformers.speculation.drafts import Draft, draft_for

ENTRY_POINT = counters.CAPTURED_STEP

# A call of fewer steps ends before a capture has paid.
MIN_STEPS = 8

# Beyond this many rows, hooks save more than a captured step if rows times the size of the weights exceed the second
# value: with hooks, finished inputs leave the batch.
_MOST_ROWS_ON_CPU, _MAX_WORK_ON_CPU = 64, 2**24
# Outputs that captured steps do not keep.
_NOT_KEPT = ("output_attentions", "output_hidden_states")


@contextlib.contextmanager
def _without_gradients() -> Iterator[None]:
    with undoing(partial(torch._C._set_grad_enabled, torch.is_grad_enabled())), torch.no_grad():
        yield


def _behind_prefill(loop: Any, call: Call) -> Any:
    """Binds the library's loop to a model with a hooked `_prefill` if the call's prefill has been made: another thread
    may remove the hooks meanwhile. A loop that somebody has put around the library's gets the model itself.
    """
    if call.prefilled is None or type(loop) is not MethodType or not library_code.is_own(loop.__func__):
        return loop
    return loop.__func__.__get__(HookedModel(loop.__self__, {"_prefill": prefill}))


def decode(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin._beam_search` and `_sample`."""
    call = Call.current(model)
    if call is None or call.declined or call.accelerated or not patching.is_active():
        return wrapped(*args, **kwargs)
    with call.decides():
        arguments = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        model_kwargs = arguments.pop("model_kwargs", {})
        call.runs_user_code = user_code.wrap(arguments, call.users_errors)
        call.scores_are_private &= not call.runs_user_code
        criteria = arguments["stopping_criteria"]
        call.cache_is_dropped = any(user_code.says(each, "releases_cache") for each in criteria)
    if settings.current().captured_step == "never" or model.device.type not in ("cpu", "cuda"):
        return wrapped(**arguments, **model_kwargs)
    try:
        return _captured(call, wrapped, arguments, model_kwargs)
    except CannotBeCaptured as found:
        # The library's loop does not run inside this handler: its exceptions would show this one as their context, and
        # this one holds what has been tried.
        reason, is_unexpected = str(found), isinstance(found, Unexpected)
        note = found.note if isinstance(found, DoesNotPay) else None
    counters.count_not_used(ENTRY_POINT, reason)
    call.is_to_be_captured = False
    call.hand_back()
    result = _behind_prefill(wrapped, call)(**arguments, **model_kwargs)
    if note is not None:
        sequences = result if isinstance(result, Tensor) else result.sequences
        note(sequences.shape[1] - arguments["input_ids"].shape[1])
    if is_unexpected and call.accelerated:
        releases.note(model, reason, what="generate has no captured steps")
    return result


def _captured(call: Call, wrapped: Any, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
    """Runs the call with a captured step; with the library's loop if the prefill turns out not accelerated."""
    model, config = call.model, arguments["generation_config"]
    with call.decides():
        draft = draft_for(call, config)
        _check(call, arguments, model_kwargs)
        if draft is None and call.entering is None:
            _check_without_draft(call, arguments)
    call.is_to_be_captured = True
    given = arguments["input_ids"], config, model_kwargs, not config.is_assistant
    call.prefilled = prefill(model._prefill, model, given, {})
    if not call.accelerated:
        return _behind_prefill(wrapped, call)(**arguments, **model_kwargs)
    # Buffers outlive the call: if made in inference mode, they could not be written to in a call without it.
    # The library's loop without beams sets up a model's experts for decoding; the other setup waits for the device in
    # float32, so that a step with beams could not be captured.
    experts = model._optimize_model_for_decode()
    ready = contextlib.nullcontext() if draft is None else draft.ready()
    with ready, graph.taken(model.device), experts, torch._C._InferenceMode(False), _without_gradients():
        result = _run(call, arguments, model_kwargs, draft)
    call.prefilled = None
    if config.compile_config is not None and config.num_beams == 1:
        # The library's loops without beams would compile the model here, or warn that they do not.
        model._valid_auto_compile_criteria(model_kwargs, config)
    counters.count_accelerated(ENTRY_POINT)
    return _of_the_mode(result) if torch.is_inference_mode_enabled() and call.entering is None else result


def _of_the_mode(result: Any) -> Any:
    """A result in inference mode, where the library's loop makes tensors of inference."""
    if isinstance(result, ModelOutput):
        for name, value in result.items():
            result[name] = _of_the_mode(value)
    if not isinstance(result, Tensor) or result.is_inference():
        return result
    memory = result.untyped_storage(), result.storage_offset(), result.shape, result.stride()
    return torch.empty(0, dtype=result.dtype, device=result.device).set_(*memory)


def _run(call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any], draft: Draft | None) -> Any:
    """Runs the call with a captured step; with one that verifies drafts if something drafts."""
    if draft is not None:
        try:
            result = SpeculativeDecoding(call, arguments, model_kwargs, draft).run()
            counters.count_accelerated(SPECULATION)
            return result
        except CannotBeCaptured as reason:
            counters.count_not_used(SPECULATION, str(reason))
            _check_without_draft(call, arguments)
    how = call.entering
    if how is None:
        return Decoding(call, arguments, model_kwargs).run()
    how.take(EnteringDecoding(call, arguments, model_kwargs))
    return arguments["input_ids"]


def _check(call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
    """Raises `CannotBeCaptured` if it is known before the prefill that a captured step does not serve the call."""
    config, criteria = arguments["generation_config"], arguments["stopping_criteria"]
    _check_model(call.model)
    for name in _NOT_KEPT if config.return_dict_in_generate else ():
        if getattr(config, name):
            raise CannotBeCaptured(name)
    if call.cache_is_the_users:
        _check_users_cache(call, config, releases.cache_in(model_kwargs))
    if arguments.get("streamer") is not None and call.entering is None:
        _check_streamer(arguments)
    if config.num_beams < 1:
        raise CannotBeCaptured("no beams")  # the library's loop raises the proper error
    if config.num_beams > 1 and config._eos_token_tensor is not None and not len(config._eos_token_tensor):
        raise CannotBeCaptured("a list of no end tokens")  # it may be indexed at 0
    _check_weights(call.model)
    if call.model.device.type == "cpu":
        _check_on_cpu(call.model, arguments["input_ids"])
    for criterion in criteria:
        # If a criterion has this attribute, the library pads the sequences that any criterion has ended.
        if hasattr(criterion, "eos_token_id") and type(criterion) is not EosTokenCriteria:
            raise CannotBeCaptured(f"the stopping criterion {criterion.__class__.__name__}")
    if not isinstance(config.max_length, int):
        raise CannotBeCaptured("a max_length that is no integer")
    if may_begin_again(call.model, arguments["input_ids"].shape[1], config.max_length):
        raise CannotBeCaptured("frequencies of positions that change where the sequence gets long")
    if config.low_memory:
        raise CannotBeCaptured("low_memory")  # the library's beam search warns that it is gone
    lengths = [x.max_length for x in criteria if type(x) is MaxLengthCriteria]
    if min(lengths, default=config.max_length + 1) > config.max_length:
        raise CannotBeCaptured("a criterion for a larger length than max_length")
    rows, length = arguments["input_ids"].shape
    if config.max_length - length < MIN_STEPS and call.entering is None:
        raise CannotBeCaptured("only a few tokens to generate")
    _check_inputs(call.model, rows, model_kwargs)


def _check_model(model: Any) -> None:
    """Raises `CannotBeCaptured` for a model that no captured step serves."""
    unavailable = graph.unavailable(model.device)
    if unavailable is not None:
        raise CannotBeCaptured(unavailable)
    if len(set((getattr(model, "hf_device_map", None) or {"": 0}).values())) > 1:
        raise CannotBeCaptured("the model is on several devices")
    if not has_captured_steps(model):
        raise Unexpected("a model that the library does not run with a static cache")
    if has_growing_frequencies(model):
        raise CannotBeCaptured("frequencies of positions that depend on the longest sequence so far")
    if torch.is_autocast_enabled(model.device.type):
        # It keeps copies of weights only until it ends; a graph would go on reading them.
        raise CannotBeCaptured("autocast")
    if model.dtype not in operators.KERNEL_TYPES:
        raise CannotBeCaptured(f"a model in {model.dtype}")


def _check_inputs(model: Any, rows: int, model_kwargs: dict[str, Any]) -> None:
    """Raises `CannotBeCaptured` for model inputs whose value in each step is unknown."""
    ignored, books = releases.read_in_prefill().union(unread_inputs(model)), Codebooks.of(model, model_kwargs)
    for name, value in model_kwargs.items():
        if name in ignored:
            continue
        if books != PLAIN:
            _check_of_codebooks(name, value, rows if name in DELAYS else books.rows(rows))
            continue
        is_of_states = name in (STATES, STATES_MASK) and reads_states(model, model_kwargs)
        if not (is_of_states or _is_known(name, value)):
            raise Unexpected(f"the model's input {name}")
        given = value[0] if isinstance(value, ModelOutput) else value
        if isinstance(given, Tensor) and given.shape[axis_of_rows(name, given)] != rows:
            raise CannotBeCaptured(f"the model's input {name} is not one row for each sequence")  # the model repeats it


def _check_of_codebooks(name: str, value: Any, rows: int) -> None:
    """Raises `CannotBeCaptured` if an input of a model with codebooks is unknown, or does not have this many rows."""
    given = value[0] if name == "encoder_outputs" and isinstance(value, ModelOutput) else value
    if value is None or has_no_rows(name, value):
        return
    if name not in (*DELAYS, "attention_mask", "encoder_outputs", STATES) or not isinstance(given, Tensor):
        raise Unexpected(f"the model's input {name}")
    if len(given) != rows:
        raise CannotBeCaptured(f"the model's input {name} is not one row for each input")


def _check_users_cache(call: Call, config: Any, cache: Any) -> None:
    """Raises `CannotBeCaptured` for a cache passed in if it is unknown what a step reads from it."""
    if call.entering is not None:
        raise CannotBeCaptured("a cache that is passed in")
    window = getattr(text_config(call.model.config), "sliding_window", None)
    if window is not None and config.max_length > window and not has_windows(cache):  # only masks apply the window
        raise CannotBeCaptured("a cache that is passed in without the model's sliding window")


def _check_streamer(arguments: dict[str, Any]) -> None:
    """Raises `CannotBeCaptured` if the library's loop streams a token before the user's criteria see it."""
    if user_code.has_own(arguments["stopping_criteria"]) and not releases.streams_behind_criteria():
        raise CannotBeCaptured("a streamer that comes before criteria")


def _check_without_draft(call: Call, arguments: dict[str, Any]) -> None:
    """Raises `CannotBeCaptured` for calls that captured steps serve only with drafts."""
    is_streamed = arguments.get("streamer") is not None
    if is_streamed and arguments["generation_config"].do_sample and not graph.is_recorded(call.model.device):
        raise CannotBeCaptured("a streamer of samples")  # if a capture fails, the library's loop draws others


def _check_weights(model: Any) -> None:
    """Raises `CannotBeCaptured` if the copies of weights that a step multiplies by are freed after the call."""
    now = settings.current()
    if now.weight_dtype == "fp32" or now.packed_weights == "keep":
        return
    if model.device.type == "cpu" or choose.unavailable(now.weight_dtype, model.device) is None:
        graph_cache.drop(model)
        raise CannotBeCaptured('copies of weights that are not kept (packed_weights="keep")')


def _check_on_cpu(model: Any, tokens: Tensor) -> None:
    """Raises `CannotBeCaptured` if the library's loop is faster on the CPU."""
    rows = tokens.shape[0]
    if rows > _MOST_ROWS_ON_CPU and rows * _size_of_weights(model) > _MAX_WORK_ON_CPU:
        raise CannotBeCaptured(f"more than {_MOST_ROWS_ON_CPU} sequences in a model with large weights, on the CPU")


def _size_of_weights(model: Any) -> float:
    """Returns the mean size of the weight matrices, weighted by size, so that small ones hardly count."""
    sizes = [weight.numel() for weight in model.parameters() if weight.dim() == 2]
    return sum(size * size for size in sizes) / max(sum(sizes), 1)


def _is_known(name: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        if name == "inputs_embeds":  # of the prompt
            return value.dim() == 3
        return name in (*MASKS, *POSITIONS, *TOKEN_TYPES) and value.dim() == axis_of_rows(name, value) + 2
    if isinstance(value, ModelOutput):
        return name == "encoder_outputs" and isinstance(value[0], Tensor) and value[0].dim() == 3
    return value is None or has_no_rows(name, value)
