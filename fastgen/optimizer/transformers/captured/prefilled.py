"""What a captured step begins from: what the prefill of a call has left."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers.cache import layers_of
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured.key import MASKS, POSITIONS, Prompt
from fastgen.optimizer.transformers.captured.processors import round_up
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.models import masks_source

# Inputs of the model with a row per sequence that the next step gets as they are.
LAST = ("token_type_ids",)


class Prefilled:
    """The prompt of a call after its prefill, and the sliding windows of its layers.

    Args:
        input_ids: [inputs * per_input, length].
        model_kwargs: the model's inputs, as the library's loop gets them.
        limit: how long the sequences may become.
        eos: tokens that end a sequence.

    Raises:
        CannotBeCaptured: no captured step can begin from it.
    """

    def __init__(
        self,
        call: Call,
        input_ids: Tensor,
        per_input: int,
        model_kwargs: dict[str, Any],
        limit: int,
        eos: tuple[int, ...],
    ) -> None:
        assert call.store is not None, "the prefill was accelerated"
        self._model, self._cache, self._prefilled = call.model, call.store.cache, call.prefilled
        self._input_ids, self._per_input, self._model_kwargs = input_ids, per_input, model_kwargs
        self._limit, self._eos = limit, eos
        # The name of the mask of the sequences themselves.
        self._own_mask = "decoder_attention_mask" if self._model.config.is_encoder_decoder else "attention_mask"
        self.windows: list[int | None] = []
        self.prompt = self._make_prompt()

    def _make_prompt(self) -> Prompt:
        tokens = self._input_ids[:: self._per_input]
        inputs, length = tokens.shape
        own, cross = layers_of(self._cache)
        self.windows = [layer.window for layer in own]
        if not all(layer.kv.length for layer in own):
            raise CannotBeCaptured("a layer of the cache that the model does not use")
        own_kv = [layer.kv.prompt() for layer in own]
        cached = own[0].kv.length
        given = {
            name: value[:: self._per_input] for name, value in self._model_kwargs.items() if isinstance(value, Tensor)
        }
        masks = {name: given[name] for name in MASKS if name in given}
        if not masks_source(self._model):
            masks.pop("attention_mask", None)
        own_mask, cross_kv, cross_span = masks.get(self._own_mask), [], None
        if cross and any(layer.kv.length for layer in cross):
            cross_kv = [layer.kv.prompt() for layer in cross]
            cross_span = _span(masks.get("attention_mask"), inputs, cross_kv[0][0].shape[2], tokens.device)
        elif cross is not None:  # the source has gone through self-attention, in front of the decoder's prompt
            source = masks.setdefault("attention_mask", tokens.new_ones(inputs, cached - length + 1))
            own_mask = torch.cat([source, source.new_ones(inputs, length - 1)], dim=1)
        if cached != (length if own_mask is None else own_mask.shape[1]):
            raise CannotBeCaptured("a prompt of which the cache has more or less than the tokens")
        starts, ends = span = _span(own_mask, inputs, cached, tokens.device)
        new_tokens, config = self._limit - length, self._model.config
        follows = getattr(config, "target_follows_source", False)
        # Such a model says so when it has no position left, which it cannot in a captured step.
        if follows and int((ends - starts).max()) + new_tokens > config.max_position_embeddings:
            raise CannotBeCaptured("more positions than the model has")
        return Prompt(
            tokens=tokens,
            new_tokens=new_tokens,
            cached=cached,
            own=own_kv,
            cross=cross_kv,
            span=span,
            cross_span=cross_span,
            tensors=masks | self._next_inputs(tokens, given, ends - starts),
            logits=self._prefilled.logits[:, -1],
            eos=self._eos,
        )

    def _next_inputs(self, tokens: Tensor, given: dict[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
        """What the next step gets of the inputs besides masks; and what models would ask the host for."""
        found = {name: given[name][:, -1:] + 1 for name in POSITIONS if name in given}
        found |= {name: given[name][:, -1:] for name in LAST if name in given}
        parameters = inspect.signature(self._model.forward).parameters
        if not self._model.config.is_encoder_decoder:
            if not found.keys().isdisjoint(POSITIONS) and self._own_mask in parameters and self._own_mask not in given:
                # The library leaves out a mask of ones. With one, prompts of all lengths can have padding in front.
                found[self._own_mask] = torch.ones_like(tokens)
            return found
        if self._own_mask in parameters and self._own_mask not in given:
            # Some models make a mask of ones, of a size that is on the device.
            found[self._own_mask] = torch.ones_like(tokens)
        if "decoder_position_ids" in parameters and "decoder_position_ids" not in found:
            # They might be counted from that mask otherwise, which has the capacity of the buffer.
            if bool((lengths < tokens.shape[1]).any()):
                raise CannotBeCaptured("a padded decoder prompt")
            found["decoder_position_ids"] = torch.full_like(tokens[:, :1], tokens.shape[1])
        return found


def _span(mask: Tensor | None, inputs: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[inputs] starts and ends of what a mask [inputs, length] lets through, which must be one piece."""
    if mask is None:
        return torch.zeros(inputs, dtype=torch.int64, device=device), torch.full((inputs,), length, device=device)
    if mask.shape != (inputs, length):
        raise CannotBeCaptured("a mask that is not one number per stored position")
    counts = mask != 0
    starts = counts.int().argmax(dim=1)
    ends = starts + counts.sum(dim=1)
    positions = torch.arange(length, device=device)
    if not bool((counts == ((positions >= starts.unsqueeze(1)) & (positions < ends.unsqueeze(1)))).all()):
        raise CannotBeCaptured("a mask with holes")
    if bool((starts == ends).any()):
        raise CannotBeCaptured("an input that is masked altogether")
    return starts, ends


def needed_sizes(model: Any, prompt: Prompt, model_kwargs: dict[str, Any]) -> tuple[Sizes, bool]:
    """What the call needs, and whether its prompt may be put behind padding."""
    length = prompt.tokens.shape[1]
    encoded = model_kwargs.get("encoder_outputs")
    source = 0 if encoded is None else encoded[0].shape[1]
    cached = length
    if encoded is not None and not prompt.cross:  # the source is in front of the prompt
        source = source if length > 1 else round_up(source)
        cached = source + length - 1
    # A prompt may be put behind padding where its mask says so, and its positions are given.
    may_pad = not model.config.is_encoder_decoder and {"attention_mask", "position_ids"} <= prompt.tensors.keys()
    return Sizes(length, cached, prompt.new_tokens, source), may_pad
