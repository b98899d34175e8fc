"""The hook around `SequenceGenerator._generate`, and those in `EnsembleModel` that its loop goes through.

The loop, the search and the scores stay FairSeq's. Every reason not to accelerate a call is looked at before anything
is changed. A call that fails nevertheless is repeated with the original code, from the same random state.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor

from fastgen import counters, patching
from fastgen.decoding import host_memory
from fastgen.decoding.layers import FastLayers
from fastgen.decoding.randomness import RandomState
from fastgen.optimizer.fairseq.call import ENTRY_POINT, Call, Unsupported
from fastgen.optimizer.fairseq.prefill import Prefill, prefix_to_run
from fastgen.optimizer.fairseq.scores import without_nan
from fastgen.optimizer.fairseq.support import attentions_of, unsupported

# Allocated at first for the positions to come, at the most; more when that is full.
_MAX_FIRST_CAPACITY = 64


def generate(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `SequenceGenerator._generate(sample, prefix_tokens, constraints, bos_token)`."""
    if not patching.is_active():
        return _original(wrapped, args, kwargs)
    try:
        arguments = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    except TypeError:
        return wrapped(*args, **kwargs)  # which raises it
    reason = unsupported(generator, arguments.get("bos_token"))
    if reason is not None:
        counters.count_fallback(ENTRY_POINT, reason)
        return _original(wrapped, args, kwargs)
    device = next(generator.model.parameters()).device
    with host_memory.kept(device):
        return _accelerated(wrapped, generator, args, kwargs, arguments, RandomState(device))


def _accelerated(
    wrapped: Any,
    generator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: dict[str, Any],
    random_state: RandomState,
) -> Any:
    """The call, with the original code should it fail. What it takes of memory is free when this returns."""
    try:
        with contextlib.ExitStack() as context:
            context.enter_context(Call.entered(_open(generator, arguments)))
            for model in generator.model.models:
                context.enter_context(FastLayers.of(model))
            result = wrapped(*args, **kwargs)
        counters.count_accelerated(ENTRY_POINT)
        return result
    except Unsupported as declined:
        random_state.restore()
        counters.count_fallback(ENTRY_POINT, str(declined))
        return _original(wrapped, args, kwargs)
    except (counters.FallbackError, torch.OutOfMemoryError):
        raise  # the original code needs more memory, not less
    except Exception as error:
        failure = error
    random_state.restore()
    return _repeat(wrapped, args, kwargs, failure)


def _original(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with the original code, also when it is made from inside an accelerated one."""
    with Call.entered(None):
        return wrapped(*args, **kwargs)


def _repeat(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], failure: Exception) -> Any:
    """The call with the original code, after an accelerated call that failed.

    Raises:
        FallbackError: in strict mode, from `failure`.
        Exception: what the original code raises; then the call itself was at fault, and nothing is reported.
    """
    result = _original(wrapped, args, kwargs)
    counters.count_failure(ENTRY_POINT, failure, stacklevel=5)
    return result


def _open(generator: Any, arguments: dict[str, Any]) -> Call:
    sample = arguments["sample"]["net_input"]
    source = next((sample[name] for name in ("src_tokens", "source", "features") if name in sample), None)
    longest = generator.max_len - 1
    if source is not None and not generator.match_source_len:
        longest = min(int(generator.max_len_a * source.shape[1] + generator.max_len_b), longest)
    initial_capacity = max(min(longest + 1, _MAX_FIRST_CAPACITY), 1)
    call = Call(generator.model, generator.beam_size, generator.pad, attentions_of(generator.model), initial_capacity)
    if arguments.get("constraints") is None and not generator.match_source_len:
        bos = arguments.get("bos_token")
        bos = generator.eos if bos is None else int(bos)
        prefix = prefix_to_run(generator, bos, arguments.get("prefix_tokens"), longest)
        call.prefill = Prefill(prefix, call.per_input) if prefix is not None else None
    return call


def reorder_encoder_out(wrapped: Any, ensemble: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `EnsembleModel.reorder_encoder_out(encoder_outs, new_order)`.

    The loop repeats the encoder output for the beams, and then reorders it in every step. It is needed once, for the
    K/V of the source, with one row per source.
    """
    call = Call.current(ensemble)
    return wrapped(*args, **kwargs) if call is None else _keep_encoder_out(call, *args, **kwargs)


def _keep_encoder_out(call: Call, encoder_outs: list[Any] | None, new_order: Tensor) -> list[Any]:
    if call.beams is None:
        call.begin(new_order.shape[0])
    return encoder_outs if encoder_outs is not None else []


def reorder_incremental_state(wrapped: Any, ensemble: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `EnsembleModel.reorder_incremental_state(incremental_states, new_order)`."""
    call = Call.current(ensemble)
    return wrapped(*args, **kwargs) if call is None else _reorder(call, *args, **kwargs)


def _reorder(call: Call, incremental_states: list[Any], new_order: Tensor) -> None:
    call.reorder(new_order)


def forward_decoder(wrapped: Any, ensemble: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `EnsembleModel.forward_decoder(tokens, encoder_outs, incremental_states, temperature)`."""
    call = Call.current(ensemble)
    if call is None:
        return wrapped(*args, **kwargs)
    log_probs, weights = _decode(call, wrapped, *args, **kwargs)
    return without_nan(log_probs), weights


def _decode(
    call: Call,
    wrapped: Any,
    tokens: Tensor,
    encoder_outs: Any,
    incremental_states: list[Any],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    prefill, step = call.prefill, tokens.shape[1] - 1
    if prefill is None:
        if not call.is_expanded:
            return _decode_first(call, wrapped, tokens, encoder_outs, incremental_states, temperature)
        call.step(tokens)
        return wrapped(tokens, encoder_outs, incremental_states, temperature)
    if step == 0:
        with call.prefilling(incremental_states[0]):
            prefill.run(call.ensemble.single_model, tokens[:: call.per_input], temperature)
    if step == prefill.steps:
        call.prefill = None
    return prefill.log_probs(step), None


def _decode_first(
    call: Call, wrapped: Any, tokens: Tensor, encoder_outs: Any, incremental_states: list[Any], temperature: float
) -> tuple[Tensor, Tensor | None]:
    """The step in which all sequences of a source are the same yet: once per source."""
    tokens = tokens[:: call.per_input]
    call.step(tokens)
    found = wrapped(tokens, encoder_outs, incremental_states, temperature)
    call.expand()
    log_probs, weights = (part if part is None else part.repeat_interleave(call.per_input, dim=0) for part in found)
    return log_probs, weights


def prefix_tokens(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `SequenceGenerator._prefix_tokens(step, lprobs, scores, tokens, prefix_tokens, beam_size)`."""
    call = Call.current(generator.model)
    if call is None or call.prefill is None:
        return wrapped(*args, **kwargs)
    return _already_forced(*args, **kwargs)


def _already_forced(
    step: int, lprobs: Tensor, scores: Tensor, tokens: Tensor, prefix_tokens: Tensor, beam_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`Prefill.log_probs` has ruled out all but the prefix."""
    return lprobs, tokens, scores
