"""Decides which generators, ensembles and models can be accelerated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fairseq import search, sequence_generator
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase

from fastgen import patching
from fastgen.decoding import guards, library_code
from fastgen.models.prophetnet.attention import NgramSelfAttention
from fastgen.models.prophetnet.model import ProphetNetDecoder

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
