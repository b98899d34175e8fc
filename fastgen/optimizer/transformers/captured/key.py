"""What calls must agree on to share a captured step, and what a call begins from."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import releases
from fastgen.decoding.kv.states import States, of_each
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers import cache_layers as states_of_layers
from fastgen.optimizer.transformers.cache import forms_of, layers_of, states_in
from fastgen.optimizer.transformers.cache_layers import LayerForm, SharedLayer
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.capturable import WITHOUT_POSITIONS, class_of
from fastgen.optimizer.transformers.captured.key_positions import most_positions, windows
from fastgen.optimizer.transformers.models import (
    STATES,
    STATES_MASK,
    TOKEN_TYPES,
    axis_of_rows,
    mask_of_source,
    masks_source,
    notes_positions,
    pictures_in_front,
    reads_mask_of_tokens,
    type_of_generated,
)
from fastgen.optimizer.transformers.row_adapters import ACTIVE, Adapters
from fastgen.optimizer.transformers.special_models import DELAYS, PLAIN, Codebooks, without_nothing

# Masks among the inputs of the model.
MASKS = ("attention_mask", "decoder_attention_mask")
# Greedy search and sampling have room for at least this many tokens that end a sequence.
_ENDS = 4
# Inputs of the model that grow by one in every step.
POSITIONS = ("position_ids", "decoder_position_ids")
# If a position has several axes, such as time, height and width, `POSITIONS` holds the first axis, and this input,
# [rows, axes], the offset of each axis from the first. All axes advance together.
AXES = "position_axes"
# On a GPU, lengths of prompts and sources are rounded up to a multiple, numbers of new tokens to a power of two.
_MULTIPLE = 128
_FIRST_NEW, _MAX_FIRST_NEW = 64, 256
# On a CPU, memory is only taken once it is written to, so sizes are the first number times a power of four. The second
# number is added, so that no other size in a model equals them (`fastgen.decoding.program_memory`).
_CACHED_ON_CPU, _NEW_ON_CPU, _SOURCE_ON_CPU = (128, 1), (64, 3), (128, 5)
# Room for new tokens begins with no more than this: a call may ask for any number of tokens and end early.
_MAX_FIRST_NEW_ON_CPU = 1024


class Sizes(NamedTuple):
    """Numbers of positions that there is room for. In a key, 0 stands for any number."""

    prompt: int  # of the sequences, before the new tokens
    cached: int  # K and V of self-attention that the prefill has stored
    new: int  # new tokens
    source: int  # K and V of cross-attention, or the encoder's input

    def fit(self, needed: Sizes) -> bool:
        """Whether there is room for `needed`."""
        return all(have >= want for have, want in zip(self, needed, strict=True))


class DraftKey(NamedTuple):
    """The properties of a draft that are frozen in a captured step."""

    kind: Hashable
    samples: bool  # it draws its tokens, as the model does
    together: bool  # all rows accept the same number of tokens
    records: bool = False  # scores and logits are kept for the caller
    is_rated: bool = False  # the probability of each drafted token is kept
    is_ragged: bool = False  # rows verify different numbers of tokens


@dataclass(frozen=True)
class Key:
    """Everything that is frozen in a captured step: calls with equal keys can share one."""

    batch: int
    per_input: int
    sizes: Sizes
    width: int  # positions that a step stores; with a draft, the most that it verifies
    # The class of the encoder's output (None if the states are passed alone), and the width of the states.
    encoder: tuple[type | None, int] | None
    source_in_front: bool  # self-attention holds K and V of the encoder's output, before those of the sequences
    early_stopping: bool | str | None  # of beam search; None for greedy search and sampling
    samples: bool  # tokens are drawn
    ends: int  # room for this many tokens that end a sequence
    processors: tuple[Hashable, ...] | None  # signatures; None if the host runs the processors
    has_criteria: bool  # the host evaluates stopping criteria besides the search's own
    kept: tuple[str, ...]  # what the call returns of every step: scores, logits
    tensors: tuple[str, ...]  # names of the model's inputs that are in buffers
    constants: tuple[tuple[str, Hashable], ...]  # the model's other inputs, by name
    kv: Hashable  # shapes and dtypes of K and V of each layer
    windows: tuple[int | None, ...]  # the sliding window of each layer; None for a layer that sees everything
    axes: int = 0  # number of axes of a position; 0 if positions are plain numbers
    draft: Any = None  # a `DraftKey` if the step verifies a draft
    slots: bool = False  # inputs come and go while others continue: each row has its own length
    adapters: Adapters = ACTIVE  # adapters that rows may use
    forms: tuple[LayerForm, ...] = ()  # of each layer, if some keep more than K and V, or states
    codebooks: Codebooks = PLAIN  # rows of the search, if they differ from those of the model
    maps_rows: bool = False  # spare rows may verify the draft of another row, whose K and V they share

    @property
    def rows(self) -> int:
        return self.batch * self.per_input

    @property
    def rows_of_model(self) -> int:
        return self.codebooks.rows(self.rows)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder, so that `attention_mask` masks the source."""
        return self.encoder is not None and self.encoder[0] is not None

    @property
    def waits_for_host(self) -> bool:
        """Whether the host works in each step: processors, criteria, or keeping what the call returns."""
        return self.processors is None or self.has_criteria or bool(self.kept)

    def is_sequences_mask(self, name: str) -> bool:
        """Whether an input is a mask of the sequences, not of the source."""
        return name == ("decoder_attention_mask" if self.is_encoder_decoder else "attention_mask")

    def lengths(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns all lengths in positions that tensors of a step with buffers of these sizes may have."""
        prompt, cached, new, source = sizes
        suffix = new + self.width - 1
        return prompt, cached, new, source, suffix, prompt + new, cached + new, cached + suffix, new + 2

    @property
    def has_own_lengths(self) -> bool:
        """Whether the model computes positions from each row's length, so that a row must not pass its limit."""
        is_each = self.slots if self.draft is None else not self.draft.together
        return is_each and {*POSITIONS}.isdisjoint(self.tensors)


def rounded_sizes(needed: Sizes, may_pad: bool, on_gpu: bool, at_once: bool = False) -> Sizes:
    """Returns sizes that calls of similar lengths share.

    Args:
        may_pad: the prompt may be preceded by padding; otherwise its length is exact.
        at_once: make room for all new tokens at once, not only for the first ones.
    """
    prompt, cached, new, source = needed
    if not at_once:
        new = min(new, _MAX_FIRST_NEW if on_gpu else _MAX_FIRST_NEW_ON_CPU)
    if on_gpu:
        new = max(power_of_two(new), _FIRST_NEW)
        if may_pad:
            prompt = cached = round_up(max(prompt, cached))
        return Sizes(prompt, cached, new, round_up(source))
    new = _power_of_four(new, *_NEW_ON_CPU)
    if may_pad:
        prompt = cached = _power_of_four(max(prompt, cached), *_CACHED_ON_CPU)
    return Sizes(prompt, cached, new, _power_of_four(source, *_SOURCE_ON_CPU) if source else 0)


def more_new(sizes: Sizes, on_gpu: bool) -> Sizes:
    """Returns these sizes with room for more new tokens."""
    return sizes._replace(new=2 * sizes.new if on_gpu else _power_of_four(sizes.new, *_NEW_ON_CPU))


def round_up(size: int, multiple: int = _MULTIPLE) -> int:
    return -(-size // multiple) * multiple


def _power_of_four(size: int, first: int, more: int) -> int:
    """Returns `first` times the least power of four that makes it at least `size`, plus `more`.

    For a size that this function has returned, the result is the next larger one.
    """
    found = first
    while found < size:
        found *= 4
    return found + more


# ---- what a call begins from


@dataclass
class Prompt:
    """What a step begins from: the result of the prefill, one row per input."""

    tokens: Tensor  # [inputs, N], int64
    new_tokens: int  # the most to generate
    cached: int  # positions of self-attention that the prefill has stored
    # K and V of each layer, [inputs, heads, cached, dim]; with a sliding window maybe only the last of these positions.
    own: list[tuple[Tensor, Tensor]]
    cross: list[tuple[Tensor, Tensor]]  # [inputs, heads, encoder positions, dim]; empty without cross-attention
    span: tuple[Tensor, Tensor]  # [inputs] starts and ends of the positions that count
    cross_span: tuple[Tensor, Tensor] | None
    # The model's inputs for the first step, [inputs, ...], by name; `DELAYS` has those of all positions.
    tensors: dict[str, Tensor]
    # [inputs * per_input, vocabulary]: logits of the prompt's last position; with codebooks, of each copy of an input.
    logits: Tensor
    eos: tuple[int, ...] = ()  # tokens that end a sequence
    states: list[States] = field(default_factory=list)  # of each layer that has states, [inputs, ...]
    forms: tuple[LayerForm, ...] = ()  # as in the key

    @property
    def inputs(self) -> int:
        return self.tokens.shape[0]

    @property
    def bytes_per_position(self) -> tuple[int, int]:
        """Bytes of K and V for one row, in all layers of self-attention, and in all layers of cross-attention."""
        own, cross = (
            sum(part.shape[1] * part.shape[3] * part.itemsize for pair in pairs for part in pair)
            for pairs in (self.own, self.cross)
        )
        return own, cross

    @property
    def bytes_of_states(self) -> int:
        """Bytes of the states of all layers for one row."""
        return sum(state[0].nbytes for each in self.states for state in each.values())

    @property
    def sizes(self) -> Sizes:
        """The sizes that the prompt needs if the source has no padding."""
        return Sizes(self.tokens.shape[1], self.cached, self.new_tokens, self.cross[0][0].shape[2] if self.cross else 0)

    def only(self, number: int, per_input: int, new_tokens: int, first: int) -> Prompt:
        """Returns the prompt of one input, which may generate `new_tokens`, without its `first` positions."""
        one, rows = slice(number, number + 1), slice(number * per_input, (number + 1) * per_input)
        tensors = {name: tensor[one] for name, tensor in self.tensors.items()}
        cross, cross_span, own_mask = self.cross, self.cross_span, "attention_mask"
        if cross_span is not None:  # the source is padded, too
            source, own_mask = slice(*(int(bound[number]) for bound in cross_span)), "decoder_attention_mask"
            cross = [(keys[one, :, source], values[one, :, source]) for keys, values in cross]
            length = torch.tensor([source.stop - source.start])
            cross_span = torch.zeros_like(length), length
            if "attention_mask" in tensors:
                tensors["attention_mask"] = tensors["attention_mask"][:, source]
        if own_mask in tensors:
            tensors[own_mask] = tensors[own_mask][:, first:]
        own = [(k[one, :, self._left(k, first) :], v[one, :, self._left(v, first) :]) for k, v in self.own]
        return replace(
            self,
            tokens=self.tokens[one, first:],
            new_tokens=new_tokens,
            cached=self.cached - first,
            own=own,
            cross=cross,
            span=(self.span[0][one] - first, self.span[1][one] - first),
            cross_span=cross_span,
            tensors=tensors,
            logits=self.logits[rows],
            states=[of_each(each, lambda state: state[one]) for each in self.states],
        )

    def _left(self, layer: Tensor, first: int) -> int:
        """Returns how many of the first positions a layer has stored; with a sliding window it may lack some."""
        return max(first - (self.cached - layer.shape[2]), 0)


def room_for_ends(eos: tuple[int, ...]) -> int:
    """Returns the number of end tokens that greedy search and sampling have room for: more than there are."""
    return power_of_two(max(len(eos), _ENDS)) if eos else 0


def prefilled(
    call: Call, input_ids: Tensor, per_input: int, model_kwargs: dict[str, Any], limit: int, eos: tuple[int, ...]
) -> tuple[Prompt, list[int | None]]:
    """Returns the prompt of a call after its prefill, and the sliding windows of its layers.

    Args:
        input_ids: [inputs * per_input, length].
        model_kwargs: the model's inputs, as the library's loop gets them.
        limit: the maximum length of the sequences.
        eos: tokens that end a sequence.

    Raises:
        CannotBeCaptured: no captured step can begin from it.
    """
    assert call.store is not None, "the prefill was accelerated"
    model, config, tokens = call.model, call.model.config, input_ids[::per_input]
    length, books = tokens.shape[1], Codebooks.of(model, model_kwargs)
    inputs = books.rows(len(tokens))  # of the model
    if books != PLAIN and eos:
        raise CannotBeCaptured("codebooks that end for themselves")
    (own, cross), with_states = layers_of(call.store.cache), states_in(call.store.cache)
    forms = forms_of(call.store.cache)
    if not forms:  # a decoder may have fewer layers than its configuration says: MBart's counts the encoder's
        own, cross = _without_last_unused(own), None if cross is None else _without_last_unused(cross)
    is_filled = all(layer.kv.length for layer in own) and all(map(states_of_layers.have_begun, with_states))
    if not (is_filled and (own or with_states)):
        raise CannotBeCaptured("a layer of the cache that the model does not use")
    own_kv = [layer.kv.prompt() for layer in own]
    cached = own[0].kv.length if own else length
    given = {
        name: value.movedim(axis_of_rows(name, value), 0)[::per_input]
        for name, value in model_kwargs.items()
        if isinstance(value, Tensor) and name not in releases.read_in_prefill()
    }
    for name in POSITIONS if class_of(model) in WITHOUT_POSITIONS else ():
        given.pop(name, None)
    masks = _masks_of_steps(model, given) if own else {}  # without attention, only the prefill reads masks
    own_name = "decoder_attention_mask" if config.is_encoder_decoder else "attention_mask"
    own_mask, cross_kv, cross_span = masks.get(own_name), [], None
    if cross:
        cross_kv = [layer.kv.prompt() for layer in cross]
        if books.copies > 1 and "attention_mask" in masks:
            masks["attention_mask"] = without_nothing(masks["attention_mask"], cross_kv)
        mask = _mask_of_source(model, inputs, masks, model_kwargs)
        cross_span = _span(mask, inputs, cross_kv[0][0].shape[2], tokens.device)
    elif cross is not None and model_kwargs.get("encoder_outputs") is not None:
        # Self-attention holds the source before the decoder's prompt.
        source = masks.setdefault("attention_mask", tokens.new_ones(inputs, cached - length + 1))
        own_mask = torch.cat([source, source.new_ones(inputs, length - 1)], dim=1)
    in_front = pictures_in_front(model)
    if in_front:
        if cached - length != in_front:
            raise CannotBeCaptured("a mask that the model widens by pictures that there are not")
        own_mask = masks.get(own_name, torch.ones_like(tokens))
        own_mask = masks[own_name] = torch.cat([own_mask.new_ones(inputs, in_front), own_mask], dim=1)
    embedded = model_kwargs.get("inputs_embeds")  # these replace the tokens, which may be the last ones only, or none
    read = length if embedded is None or config.is_encoder_decoder else embedded.shape[1]
    if books != PLAIN and not cross and STATES in model_kwargs:  # these are in front of the tokens
        read += model_kwargs[STATES].shape[1]
    if cached != (read if own_mask is None else own_mask.shape[1]):
        raise CannotBeCaptured("a prompt of which the cache has more or less than the tokens")
    starts, ends = span = _span(own_mask, inputs, cached, tokens.device)
    # These models raise an error when they have no position left, which a captured step cannot.
    follows, most = getattr(config, "target_follows_source", False), most_positions(model)
    exceeds_table = most is not None and cached + limit - length - 1 > most
    if exceeds_table or (follows and int((ends - starts).max()) + limit - length > config.max_position_embeddings):
        raise CannotBeCaptured("more positions than the model has")
    if books != PLAIN:
        following = {name: given[name] for name in DELAYS if name in given}
    else:
        following = _next_inputs(model, tokens, {**given, **masks}, ends - starts, own_name, read)
    prompt = Prompt(
        tokens=tokens,
        new_tokens=limit - length,
        cached=cached,
        own=own_kv,
        cross=cross_kv,
        span=span,
        cross_span=cross_span,
        tensors=masks | following,
        logits=call.prefilled.logits[:, -1],
        eos=eos,
        states=[layer.prompt_states() for layer in with_states],
        forms=forms,
    )
    return prompt, windows(model, [layer.window for layer in own])


def _without_last_unused(layers: list[SharedLayer]) -> list[SharedLayer]:
    count = max((number for number, layer in enumerate(layers, 1) if layer.kv.length), default=0)
    return layers[:count]


def _mask_of_source(model: Any, inputs: int, masks: dict[str, Tensor], model_kwargs: dict[str, Any]) -> Tensor | None:
    """Returns which positions of the source the steps attend to, [inputs, positions]; None for all. If `masks` has no
    mask of the source afterwards, attention uses the span of the returned one.
    """
    if not model.config.is_encoder_decoder:
        mask = model_kwargs.get(STATES_MASK)
        if mask is not None and not bool(mask.all()):  # the library leaves out a mask of ones
            raise CannotBeCaptured("a mask of the states of an encoder")
        return None
    encoded, mask = model_kwargs.get("encoder_outputs"), masks.get("attention_mask")
    if encoded is not None and hasattr(encoded, "attention_mask"):  # the decoder reads this mask
        masks.pop("attention_mask", None)
        own: Tensor | None = encoded.attention_mask
        return None if own is None else own[:: max(len(own) // inputs, 1)]
    if mask is None or encoded is None:
        return mask
    found = mask_of_source(model, mask, encoded)
    if found is None:
        raise CannotBeCaptured("a mask that is not one number per stored position")
    if found is not mask:
        del masks["attention_mask"]
    return found


def _masks_of_steps(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns those masks among the model's inputs that its steps read."""
    names = MASKS if masks_source(model) else MASKS[1:]
    return {name: given[name] for name in names if name in given}


def _next_inputs(
    model: Any, tokens: Tensor, given: dict[str, Tensor], lengths: Tensor, own_mask: str, read: int
) -> dict[str, Tensor]:
    """Returns the next step's inputs other than masks, and inputs that the model would otherwise ask the host for.

    Args:
        lengths: [inputs] how many of the `read` positions count.
    """
    found = {name: given[name][..., -1:] + 1 for name in POSITIONS if name in given}
    for name in [name for name, positions in found.items() if positions.dim() == 3]:
        each = found[name].squeeze(2)
        found[name], found[AXES] = each[:, :1], each - each[:, :1]
    found |= {name: given[name][:, -1:] for name in TOKEN_TYPES if name in given}
    own_type = type_of_generated(model)
    if own_type is not None and "token_type_ids" in found:
        found["token_type_ids"] = torch.full_like(found["token_type_ids"], own_type)
    if "mm_token_type_ids" in found:
        found["mm_token_type_ids"] = torch.zeros_like(found["mm_token_type_ids"])
    parameters = inspect.signature(model.forward).parameters
    # The library leaves out a mask of ones. With a mask, prompts of all lengths can be preceded by padding. Some models
    # with an encoder make a mask themselves, whose size is a value on the device.
    has_positions, is_encoder_decoder = not found.keys().isdisjoint(POSITIONS), model.config.is_encoder_decoder
    reads_mask = has_positions or is_encoder_decoder or reads_mask_of_tokens(model)
    if reads_mask and own_mask in parameters and own_mask not in given:
        found[own_mask] = tokens.new_ones(len(tokens), read)
    if is_encoder_decoder and "decoder_position_ids" in parameters and "decoder_position_ids" not in found:
        # Otherwise the model might count them from that mask, whose length is the capacity of the buffer.
        if bool((lengths < tokens.shape[1]).any()):
            raise CannotBeCaptured("a padded decoder prompt")
        found["decoder_position_ids"] = torch.full_like(tokens[:, :1], tokens.shape[1])
    if not has_positions and notes_positions(model) and class_of(model) not in WITHOUT_POSITIONS:
        raise CannotBeCaptured("positions that the model counts from what its prefill has noted")
    return found


def _span(mask: Tensor | None, inputs: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns [inputs] starts and ends of what a mask [inputs, length] lets through; it must be contiguous."""
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
