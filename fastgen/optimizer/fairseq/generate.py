"""The hook around `SequenceGenerator._generate`, and those on the `EnsembleModel` methods that its loop calls.

The loop, the search and the scores stay FairSeq's. All reasons against accelerating a call are checked before anything
changes. A call that fails nevertheless is repeated with the original code, from the same random state.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from fastgen import counters, interrupts, patching
from fastgen.decoding import host_memory
from fastgen.decoding.layers import FastLayers
from fastgen.decoding.retrying import RandomState
from fastgen.ops._library import warn_if_missing
from fastgen.optimizer.fairseq.call import ENTRY_POINT, Call, Unsupported, inside_call, of_ensemble
from fastgen.optimizer.fairseq.prefill import Prefill
from fastgen.optimizer.fairseq.scores import without_nan
from fastgen.optimizer.fairseq.support import attentions_of, unsupported

# The most positions that are allocated at first; the cache grows when they are full.
_MAX_FIRST_CAPACITY = 64


@interrupts.guarded
def generate(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `SequenceGenerator._generate(sample, prefix_tokens, constraints, bos_token)`."""

    def original() -> Any:
        """Calls the original code, also from inside an accelerated call."""
        with Call.entered(None):
            return wrapped(*args, **kwargs)

    if not patching.is_active():
        return original()
    bound = patching.bound(wrapped, args, kwargs)
    if bound is None:
        return wrapped(*args, **kwargs)
    arguments = bound.arguments
    found = counters.decided(ENTRY_POINT, _decide, generator, arguments)
    if found is None:
        return original()
    device, random_state = found
    with host_memory.kept(device):
        try:
            with contextlib.ExitStack() as context:
                context.enter_context(Call.entered(_open(generator, arguments)))
                for model in generator.model.models:
                    context.enter_context(FastLayers.of(model))
                result = wrapped(*args, **kwargs)
            counters.count_accelerated(ENTRY_POINT)
            warn_if_missing(device)
            return result
        except (counters.FallbackError, torch.OutOfMemoryError):
            raise  # the original code needs more memory, not less
        except Exception as error:
            interrupts.pass_on(error)
            failure = error
        random_state.restore()
        if isinstance(failure, Unsupported):
            counters.count_fallback(ENTRY_POINT, str(failure))
            return original()
        result = original()  # an error here is the call's own, and is not reported as FastGen's
        counters.count_failure(ENTRY_POINT, failure)
        return result


def _decide(generator: Any, arguments: dict[str, Any]) -> tuple[torch.device, RandomState] | None:
    """Returns the device of a call to accelerate, and its initial random state; otherwise counts the reason, and
    returns None.
    """
    reason = unsupported(generator, arguments.get("bos_token"))
    if reason is not None:
        counters.count_fallback(ENTRY_POINT, reason)
        return None
    device = next(generator.model.parameters()).device
    return device, RandomState(device)


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
        call.prefill = Prefill.of(generator, bos, arguments.get("prefix_tokens"), longest)
    return call


@of_ensemble
def reorder_encoder_out(
    call: Call, wrapped: Any, ensemble: Any, encoder_outs: list[Any] | None, new_order: Tensor
) -> list[Any]:
    """Wrapper of `EnsembleModel.reorder_encoder_out`. Does not reorder: the source's K/V need one row per source."""
    call.begin(new_order.shape[0])
    return encoder_outs if encoder_outs is not None else []


@of_ensemble
def reorder_incremental_state(
    call: Call, wrapped: Any, ensemble: Any, incremental_states: list[Any], new_order: Tensor
) -> None:
    """Wrapper of `EnsembleModel.reorder_incremental_state`."""
    call.reorder(new_order)


@of_ensemble
def forward_decoder(
    call: Call,
    wrapped: Any,
    ensemble: Any,
    tokens: Tensor,
    encoder_outs: Any,
    incremental_states: list[Any],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Wrapper of `EnsembleModel.forward_decoder`."""
    prefill, step = call.prefill, tokens.shape[1] - 1
    if prefill is not None:
        if step == 0:
            with call.prefilling(incremental_states[0]):
                prefill.run(ensemble.single_model, tokens[:: call.per_input], temperature)
        if step == prefill.steps:
            call.prefill = None
        return without_nan(prefill.log_probs(step)), None
    is_first = not call.is_expanded
    if is_first:  # all sequences of a source are still equal: computes one of each
        tokens = tokens[:: call.per_input]
    call.step(tokens)
    log_probs, weights = wrapped(tokens, encoder_outs, incremental_states, temperature)
    if is_first:
        call.expand()
        log_probs = log_probs.repeat_interleave(call.per_input, dim=0)
        weights = weights.repeat_interleave(call.per_input, dim=0) if weights is not None else None
    return without_nan(log_probs), weights


@functools.partial(inside_call, ensemble_of=lambda generator: generator.model)
def prefix_tokens(
    call: Call,
    wrapped: Any,
    generator: Any,
    step: int,
    lprobs: Tensor,
    scores: Tensor,
    tokens: Tensor,
    prefix_tokens: Tensor,
    beam_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Wrapper of `SequenceGenerator._prefix_tokens`. `Prefill.log_probs` already excludes all tokens but the prefix."""
    return NotImplemented if call.prefill is None else (lprobs, tokens, scores)
