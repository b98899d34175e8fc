"""Encodes sources of similar length together (`fastgen.decoding.unpadding`)."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor

from fastgen.decoding import unpadding
from fastgen.optimizer.fairseq.call import Call, of_ensemble

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
