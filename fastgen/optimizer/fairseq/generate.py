"""The hook around `SequenceGenerator._generate`, and those on the `EnsembleModel` methods that its loop calls.

The loop, the search and the scores stay FairSeq's. All reasons against accelerating a call are checked before anything
changes. A call that fails nevertheless is repeated with the original code, from the same random state. Sources of
similar length are encoded together (`fastgen.decoding.unpadding`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from fairseq import search, sequence_generator
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor

from fastgen import counters, interrupts, patching
from fastgen.decoding import guards, host_memory, library_code, unpadding
from fastgen.decoding.layers import FastLayers
from fastgen.decoding.retrying import RandomState
from fastgen.models.prophetnet.attention import NgramSelfAttention
from fastgen.models.prophetnet.model import ProphetNetDecoder
from fastgen.ops._library import warn_if_missing
from fastgen.optimizer.fairseq.call import ENTRY_POINT, Call, Prefill, Unsupported, inside_call, of_ensemble

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
        return prefill.log_probs(step), None
    is_first = not call.is_expanded
    if is_first:  # all sequences of a source are still equal: computes one of each
        tokens = tokens[:: call.per_input]
    call.step(tokens)
    log_probs, weights = wrapped(tokens, encoder_outs, incremental_states, temperature)
    if is_first:
        call.expand()
        log_probs = log_probs.repeat_interleave(call.per_input, dim=0)
        weights = weights.repeat_interleave(call.per_input, dim=0) if weights is not None else None
    return log_probs, weights


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


# ---- the encoder

_METHODS = ("forward", "forward_scriptable", "forward_embedding", "forward_torchscript", "forward_non_torchscript")
_INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}


@of_ensemble
def encode(call: Call, wrapped: Any, ensemble: Any, net_input: dict[str, Any]) -> Any:
    """Wrapper of `EnsembleModel.forward_encoder`."""
    if not _can_be_cut(ensemble, net_input):
        return NotImplemented
    tokens, lengths = net_input["src_tokens"], net_input["src_lengths"]
    padding = tokens.eq(ensemble.single_model.encoder.padding_idx)
    in_front = not bool((padding[:, 1:] > padding[:, :-1]).any())
    buckets = unpadding.by_mask(~padding, in_front)
    if not buckets:
        return NotImplemented
    encoded = [wrapped({"src_tokens": tokens[place], "src_lengths": lengths[place[0]]}) for place in buckets]
    return [_merged(padding, buckets, outputs) for outputs in zip(*encoded, strict=True)]


def _merged(padding: Tensor, buckets: list[tuple[Tensor, slice]], outputs: tuple[Any, ...]) -> dict[str, list[Tensor]]:
    """Merges the encoder outputs of all buckets. The omitted positions, which the decoder never reads, are zero."""
    states = [output["encoder_out"][0] for output in outputs]
    whole = states[0].new_zeros(padding.shape[1], padding.shape[0], states[0].shape[2])
    for (rows, positions), state in zip(buckets, states, strict=True):
        whole[positions, rows] = state
    nothing: dict[str, list[Tensor]] = {name: [] for name in outputs[0]}
    return {**nothing, "encoder_out": [whole], "encoder_padding_mask": [padding]}


def _can_be_cut(ensemble: Any, net_input: dict[str, Any]) -> bool:
    """Returns whether the encoders compute the same result for a source without its padding."""
    tokens, lengths = net_input.get("src_tokens"), net_input.get("src_lengths")
    if not (isinstance(tokens, Tensor) and tokens.dim() == 2 and isinstance(lengths, Tensor) and lengths.dim() == 1):
        return False
    # On other devices, reading the lengths would wait for the device.
    if tokens.device.type != "cpu" or lengths.shape[0] != tokens.shape[0] or not _INPUTS.issuperset(net_input):
        return False
    if not ensemble.has_encoder() or not all(_is_plain(model.encoder) for model in ensemble.models):
        return False
    return len({model.encoder.padding_idx for model in ensemble.models}) == 1


def _is_plain(encoder: Any) -> bool:
    """Returns whether it is FairSeq's unmodified Transformer: it may run more than once, and nothing observes it."""
    return (
        isinstance(encoder, TransformerEncoderBase)
        and all(getattr(type(encoder), name) is getattr(TransformerEncoderBase, name) for name in _METHODS)
        and not any(name in vars(encoder) for name in _METHODS)
        and not encoder.return_fc
        # A LayerDropModuleList draws a random number in each pass.
        and type(encoder.layers) is torch.nn.ModuleList
        and all(type(layer).forward is TransformerEncoderLayerBase.forward for layer in encoder.layers)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())
    )


# ---- which generators, ensembles and models are accelerated

# The supported decoders, and their self-attention.
_KINDS = {TransformerDecoderBase: MultiheadAttention, ProphetNetDecoder: NgramSelfAttention}
_DECODER_METHODS = (
    "forward",
    "extract_features",
    "extract_features_scriptable",
    "reorder_incremental_state",
    "reorder_incremental_state_scripting",
)
# The functions that must be hooked; a release of FairSeq in which one could not be is not accelerated.
_HOOKED = (
    (MultiheadAttention, "forward"),
    (NgramSelfAttention, "extend"),
    (sequence_generator.EnsembleModel, "forward_decoder"),
    (sequence_generator.EnsembleModel, "reorder_encoder_out"),
    (sequence_generator.EnsembleModel, "reorder_incremental_state"),
    (sequence_generator.SequenceGenerator, "_prefix_tokens"),
)
_ENSEMBLE_METHODS = ("forward_encoder", "forward_decoder", "reorder_encoder_out", "reorder_incremental_state")


def unsupported(generator: Any, bos_token: Any) -> str | None:
    """Returns why a generator is not accelerated, or None if it is."""
    unusual = guards.unusual()
    if unusual is not None:
        return unusual
    for owner, name in _HOOKED:
        if patching.original_of(vars(owner).get(name)) is None:
            return f"{owner.__name__}.{name} is not hooked"
    ensemble = generator.model
    if type(ensemble) not in (sequence_generator.EnsembleModel, sequence_generator.EnsembleModelWithAlignment):
        return f"the ensemble is a {type(ensemble).__name__}"
    replaced = [name for name in _ENSEMBLE_METHODS if name in vars(ensemble)]
    if replaced:
        return f"{replaced[0]} has been replaced on this ensemble"
    if type(generator.search).__module__ != search.__name__:
        return f"{type(generator.search).__name__} is not one of the library's searches"
    if isinstance(bos_token, torch.Tensor) and bos_token.numel() > 1:
        return "each sequence begins with a token of its own"
    if bos_token is not None and bos_token == generator.pad:
        return "sequences that begin with padding"
    if torch.is_grad_enabled():
        return "gradients are recorded"
    devices = {parameter.device for parameter in ensemble.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        return f"the parameters are on {', '.join(sorted(map(str, devices))) or 'no device'}"
    return next(filter(None, (_model_unsupported(model, generator) for model in ensemble.models)), None)


def attentions_of(ensemble: Any) -> set[int]:
    """Returns the `id` of every attention module in the decoders."""
    return {id(attention) for model in ensemble.models for attention in _attentions(model.decoder)}


def _attentions(decoder: Any) -> Iterator[Any]:
    for layer in decoder.layers.children():
        yield layer.self_attn
        if layer.encoder_attn is not None:
            yield layer.encoder_attn


def _model_unsupported(model: Any, generator: Any) -> str | None:
    if isinstance(model, torch.jit.ScriptModule):
        return "a scripted model"
    decoder = getattr(model, "decoder", None)
    kind = next((kind for kind in _KINDS if isinstance(decoder, kind)), None)
    if decoder is None or kind is None:
        return f"{type(decoder if decoder is not None else model).__name__} is not a Transformer decoder"
    for name in _DECODER_METHODS:
        if getattr(type(decoder), name, None) is not getattr(kind, name, None) or name in vars(decoder):
            return f"{type(decoder).__name__} has a {name} of its own"
    if decoder.padding_idx != generator.pad:
        return "the decoder pads with another token than the dictionary"
    layers = (_layer_unsupported(layer, _KINDS[kind], generator.beam_size) for layer in decoder.layers.children())
    return next(filter(None, layers), None) or _modules_unsupported(model)


def _layer_unsupported(layer: Any, self_attention: type, beam_size: int) -> str | None:
    if getattr(type(layer), "forward", None) is not TransformerDecoderLayerBase.forward or "forward" in vars(layer):
        return f"{type(layer).__name__} has a forward pass of its own"
    if getattr(layer, "cross_self_attention", False):
        return "self-attention over the source"
    attentions: tuple[tuple[Any, type[Any]], ...] = (
        (layer.self_attn, self_attention),
        (layer.encoder_attn, MultiheadAttention),
    )
    for attention, expected in attentions:
        if attention is None:
            continue
        if type(attention) is not expected or {"forward", "extend"} & vars(attention).keys():
            return f"attention of type {type(attention).__name__}"
        if expected is MultiheadAttention and (
            attention.use_xformers or attention.bias_k is not None or attention.add_zero_attn or attention.onnx_trace
        ):
            return "attention with xformers, additional keys or in an ONNX trace"
    if (self_attention is MultiheadAttention and not layer.self_attn.self_attention) or (
        layer.encoder_attn is not None and not layer.encoder_attn.encoder_decoder_attention
    ):
        return "attention of another kind than self-attention and attention to the source"
    if layer.encoder_attn is not None and beam_size % layer.encoder_attn.beam_size != 0:
        return "the model has been set to another beam size since the generator was made"
    return None


def _modules_unsupported(model: Any) -> str | None:
    ours = {id(attention) for attention in _attentions(model.decoder)} | {id(model.decoder)}
    for module in model.modules():
        if library_code.is_in_training(module):
            return "the model, or a part of it, is in training mode"
        if isinstance(module, FairseqDropout) and module.apply_during_inference and module.p > 0:
            return "dropout is retained"
    for module in model.decoder.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "forward hooks are registered on the decoder"
        if hasattr(module, "reorder_incremental_state") and id(module) not in ours:
            return f"{type(module).__name__} keeps state other than K/V"
    return None
