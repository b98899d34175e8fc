"""The hook around `GenerationMixin._prefill`: the prompt runs once per input, whatever the number of sequences.

It undoes the library's repetition for the prefill, and repeats the logits instead. Everything that could prevent
acceleration is checked before anything is changed. Images and audio are encoded once for each input, too.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from fastgen import patching, releases
from fastgen.decoding import layer_forms
from fastgen.decoding.kv.rows import Beams
from fastgen.optimizer.transformers import cache as caches
from fastgen.optimizer.transformers.buckets import prefill_in_groups
from fastgen.optimizer.transformers.cache import ExchangedLayers
from fastgen.optimizer.transformers.call import BEYOND_WINDOW, Call, NotAccelerated
from fastgen.optimizer.transformers.loop_hooks import BatchCompaction, may_leave
from fastgen.optimizer.transformers.models import (
    TOKEN_TYPES,
    axis_of_hidden_rows,
    axis_of_rows,
    hands_on_more,
    parts_that_decode,
    reads_states,
    takes_more_than_text,
    text_config,
)
from fastgen.releases import Usual

_NOT_WITH_BEAMS = ("prompt_lookup_num_tokens", "assistant_early_exit", "dola_layers", *releases.ASSISTANCE)
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# Types of model arguments that have no rows.
_NOT_PER_ROW = (bool, int, float, str)
# With beams, the library passes on an assistant, and ignores it.
_WITHOUT_ROWS = (*releases.CACHE_NAMES, "assistant_model")
# The largest initial capacity for positions to come; it grows when full.
_MAX_FIRST_CAPACITY = 256
_ENDLESS = 2**31
# Outputs of the prefill that the decoding loops read, with one row per sequence.
_PER_SEQUENCE_OUTPUTS = "attentions cross_attentions decoder_attentions hidden_states decoder_hidden_states".split()


def prefill(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)`."""
    call = Call.current(model)
    if call is not None and call.prefilled is not None:  # made for a captured step that does not run
        outputs, call.prefilled = call.prefilled, None
        return outputs
    # A call prefills once. Another prefill inside it belongs to a call that is not accelerated: for example, one made
    # by a criterion under `fastgen.disabled()`.
    if call is None or call.accelerated or call.declined or not patching.is_active():
        return wrapped(*args, **kwargs)
    with call.decides():
        bound = inspect.signature(_prefill).bind(call, wrapped, *args, **kwargs)
    return _prefill(*bound.args, **bound.kwargs)


def _prefill(
    call: Call,
    wrapped: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool = True,
) -> Any:
    declined = None
    try:
        with call.decides():
            per_input = max(generation_config.num_beams, generation_config.num_return_sequences)
            # The library accepts a float, too, even infinity.
            to_generate = max(math.ceil(min(generation_config.max_length - input_ids.shape[1], _ENDLESS)), 1)
            one_row_ids, one_row_kwargs = _one_row_each(call, input_ids, generation_config, model_kwargs, to_generate)
    except NotAccelerated as found:
        (declined,) = found.args  # unchanged, because it may be a `Usual` one
    if declined is not None:
        call.decline(declined)
        dtype = call.model.dtype
        with layer_forms.upcast_products(dtype) if declined is BEYOND_WINDOW else contextlib.nullcontext():
            return wrapped(input_ids, generation_config, model_kwargs, is_first_iteration)

    initial_capacity = min(to_generate, _MAX_FIRST_CAPACITY)
    call.accelerate(generation_config)
    cache = releases.cache_in(one_row_kwargs)
    if reads_states(call.model, one_row_kwargs):
        cache = caches.with_source(cache, call.model.config)
        one_row_kwargs |= releases.with_cache(cache)
    store = call.store = ExchangedLayers(cache, per_input, initial_capacity)

    def run(ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        with layer_forms.upcast_products(call.model.dtype):
            return wrapped(ids, generation_config, kwargs, is_first_iteration)

    how = call.entering
    if how is not None and how.serves(call.model, one_row_ids, generation_config, one_row_kwargs):
        outputs = how.prefill(store, run, one_row_ids, one_row_kwargs)
    else:
        outputs = prefill_in_groups(call, run, one_row_ids, generation_config, one_row_kwargs)
    if releases.cache_in(outputs) is not store.cache:
        # Only known now, and no result has been used: run again, with all rows.
        call.abandon()
        call.decline("the model does not use the cache that it is given")
        return wrapped(input_ids, generation_config, model_kwargs, is_first_iteration)
    batch = one_row_ids.shape[0]
    store.expand(Beams(batch, per_input))
    _repeat_outputs(call.model, outputs, batch, per_input)
    if may_leave(call, generation_config, batch):
        call.compaction = BatchCompaction(store, batch, per_input, searches=generation_config.num_beams > 1)
    return outputs


def mode_of_loop(config: Any, assistant: Any = None) -> Any:
    """Returns the generation mode of a call inside `generate`, which has warned of options that beams ignore."""
    if (config.num_beams or 1) > 1:
        config, assistant = copy.copy(config), None
        for name in _NOT_WITH_BEAMS:
            if getattr(config, name, None) is not None:  # the library takes 0 for a request, too
                setattr(config, name, None)
    return config.get_generation_mode(assistant)


def _one_row_each(
    call: Call, input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any], to_generate: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the tokens and the other arguments of the prefill, with one row per input. Raises NotAccelerated."""
    if call.runs_user_code is None:
        raise NotAccelerated("the decoding loop is not hooked")
    if call.cache_is_the_users and call.runs_user_code:
        raise NotAccelerated(Usual("code of the user's beside a cache of the user's, which it may look into or change"))
    mode = mode_of_loop(config)
    if mode.value not in _MODES:
        raise NotAccelerated(Usual(f"generation mode {mode.value}"))
    if config.is_assistant:
        raise NotAccelerated(Usual("the model assists another one"))
    cache = releases.cache_in(model_kwargs)
    if not model_kwargs.get("use_cache"):
        raise NotAccelerated(Usual("no K/V cache (use_cache=False)"))
    if cache is None and call.is_of_own_generate and call.model.config.is_encoder_decoder:  # its decoder would make one
        cache = caches.empty_for(text_config(call.model.config))
        model_kwargs = {**model_kwargs, **releases.with_cache(cache)}
    if cache is None:
        raise NotAccelerated(releases.why_no_cache())
    per_input = max(config.num_beams, config.num_return_sequences)
    if per_input > 1 and call.is_of_own_generate:
        raise NotAccelerated("several sequences for an input in a decoding loop that the model's own generate begins")
    if per_input > 1 and hands_on_more(call.model):
        raise NotAccelerated(f"{type(call.model).__name__} hands on more than K/V from step to step")
    several = per_input > 1 and takes_more_than_text(call.model)
    own = call.model.config
    some = {name: value for name, value in model_kwargs.items() if name not in _one_in_each(input_ids, model_kwargs)}
    if several and any(may_be_several(own, input_ids, *each) for each in some.items()):
        raise NotAccelerated("pictures that the library repeats one by one")
    one_row_ids = _undo_repeat("input_ids", input_ids, per_input)
    one_row_kwargs = {
        name: _pictures_once(call.model, one_row_ids, value, per_input)
        if name == releases.ENCODED
        else _undo_repeat(name, value, per_input)
        for name, value in model_kwargs.items()
    }
    embedded = model_kwargs.get("inputs_embeds")
    prompt = max(input_ids.shape[1], embedded.shape[1] if embedded is not None else 0)
    reason = caches.unsupported(cache, per_input, prompt + to_generate, _needs_window(call.model, config))
    if reason is not None:
        is_asked_for = call.cache_is_the_users or config.cache_implementation is not None
        raise NotAccelerated(Usual(reason) if is_asked_for else reason)
    call.reads_too_much = caches.reads_too_much(cache, per_input, prompt, to_generate)
    if call.reads_too_much and not call.is_to_be_captured:
        raise NotAccelerated(BEYOND_WINDOW)
    return one_row_ids, one_row_kwargs


def _needs_window(model: Any, config: Any) -> str | None:
    """Returns why the cache must not hold more than a sliding window; None if the model masks what lies beyond it."""
    if config.return_dict_in_generate and config.output_attentions:
        return Usual("the attentions that are returned are as long as the sliding window")
    # In a chunked prefill, the part of the window that a chunk sees also depends on the cache. Otherwise, a model that
    # masks the window imports the library's function for such masks in its module.
    modules = [sys.modules[type(part).forward.__module__] for part in parts_that_decode(model)]
    makes_masks = any(hasattr(module, "create_sliding_window_causal_mask") for module in modules)
    if config.prefill_chunk_size is None and makes_masks:
        return None
    return "the model relies on the cache for its sliding window"


def has_no_rows(name: str, value: Any) -> bool:
    """Whether a model argument does not have one row per sequence."""
    return isinstance(value, _NOT_PER_ROW) or name in _WITHOUT_ROWS or releases.is_tokenizer(value)


def _undo_repeat(name: str, value: Any, per_input: int) -> Any:
    """Returns one row per input of a value that was repeated `per_input` times.

    Checks that the rows of an input are equal, because models may expand inputs in their own way.
    """
    if value is None or has_no_rows(name, value) or per_input == 1:
        return value
    if isinstance(value, torch.Tensor):
        rows = value.movedim(axis_of_rows(name, value), 0) if value.dim() else value
        if value.dim() == 0 or not caches.rows_agree(rows, per_input):
            raise NotAccelerated(f"{name} is not one row per sequence, equal for the sequences of an input")
        return rows[::per_input].movedim(0, axis_of_rows(name, value)).contiguous()
    if isinstance(value, ModelOutput):
        # The library repeats the tensors of the encoder output, not the tuples of hidden states in it.
        fields = {
            key: _undo_repeat(f"{name}.{key}", part, per_input) if isinstance(part, torch.Tensor) else part
            for key, part in value.items()
        }
        return type(value)(**fields)
    if isinstance(value, dict) and not value:
        return value
    raise NotAccelerated(f"{name} is a {type(value).__name__}")


def _pictures_once(model: Any, ids: torch.Tensor, encoded: Any, per_input: int) -> Any:
    """Returns the encoders' outputs for images, for one sequence of each input."""
    if not encoded or per_input == 1:
        return encoded
    found = encoded_once(model, ids, encoded, per_input)
    if found is None:
        raise NotAccelerated("pictures that are not those of each sequence of an input")
    return found


def _repeat_outputs(model: Any, outputs: Any, batch: int, per_input: int) -> None:
    """Gives the outputs of the prefill a row for each sequence, in place."""
    # The loops only read the last position; repeating the logits of the whole prompt would be a waste.
    outputs.logits = _repeat(outputs.logits[:, -1:], batch, per_input)
    for name in _PER_SEQUENCE_OUTPUTS:
        if outputs.get(name) is not None:
            axis = axis_of_hidden_rows(model) if name.endswith("hidden_states") else 0
            outputs[name] = _repeat(outputs[name], batch, per_input, axis)


def _repeat(value: Any, batch: int, per_input: int, axis: int = 0) -> Any:
    """`axis`: which one is rows, of tensors that have four."""
    if per_input == 1 or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_repeat(part, batch, per_input, axis) for part in value)
    axis = axis if value.dim() == 4 else 0
    if value.shape[axis] != batch:
        raise RuntimeError(f"an output of the prefill has {value.shape[axis]} rows for {batch} inputs")
    return value.repeat_interleave(per_input, dim=axis)


# ---- images and audio

# Inputs of a multimodal model that have a row for each sequence.
_PER_SEQUENCE = frozenset(("attention_mask", "position_ids", "inputs_embeds", "labels", *TOKEN_TYPES))
# Kosmos-2.5's pictures, their sizes, and where their embeddings go.
_WITH_PLACES = ("flattened_patches", "image_embeds_position_mask", "width", "height")
_SOUNDS = frozenset(("input_features", "input_features_mask", "feature_attention_mask"))


def may_be_several(config: Any, ids: Tensor, name: str, value: Any) -> bool:
    """Whether an input may hold several images or audio clips one after the other, or their sizes, so that it is
    unknown which input each belongs to.

    The library repeats each one separately, so that the sequences of an input with two of them get either the first one
    twice or the second one twice. If there are as many clips as prompts, and each prompt has a place for one, each has
    one.

    Args:
        ids: [sequences, length], the prompts.
    """
    if name in _PER_SEQUENCE or not isinstance(value, Tensor):
        return False
    token = getattr(config, "audio_token_id", getattr(config, "audio_token_index", None))
    if name not in _SOUNDS or token is None or len(value) != len(ids):
        return True
    return not bool(ids.eq(token).any(dim=1).all())


def _one_in_each(ids: Tensor, model_kwargs: dict[str, Any]) -> frozenset[str]:
    """Returns the inputs of pictures of which each prompt has one: if a mask says so where their embeddings go.

    Args:
        ids: [sequences, length], the prompts.
    """
    places = model_kwargs.get("image_embeds_position_mask")
    if not isinstance(places, Tensor) or places.shape[:1] != ids.shape[:1] or places.dim() != 2:
        return frozenset()
    counts = (places != 0).sum(dim=1)
    is_each = counts.numel() > 0 and bool((counts == counts[0]).all())
    given = {name: model_kwargs.get(name) for name in _WITH_PLACES if is_each}
    return frozenset(name for name, value in given.items() if isinstance(value, Tensor) and len(value) == len(ids))


def encoded_once(model: Any, ids: Tensor, encoded: dict[str, Any], per_input: int) -> dict[str, Any] | None:
    """Returns the outputs of encoders, by input kind ("image", "video"), without repetitions.

    Args:
        ids: [inputs, length], the prompts.
        encoded: outputs for `per_input` sequences each, made by `GenerationMixin._expand_multimodal_outputs`.

    Returns:
        None if that method would not make `encoded` from the result.
    """
    if not ids.numel():  # the prompt is embeddings, in which images cannot be located
        return None
    found = {kind: _once(model.config, kind, ids, outputs, per_input) for kind, outputs in encoded.items()}
    if any(outputs is None for outputs in found.values()):
        return None
    again = model._expand_multimodal_outputs(ids, {kind: copy.copy(each) for kind, each in found.items()}, per_input)
    same = all(
        _are_same(getattr(again[kind], name, None), getattr(outputs, name, None))
        for kind, outputs in encoded.items()
        for name in ("pooler_output", "deepstack_features")
    )
    return found if same else None


def _once(config: Any, kind: str, ids: Tensor, outputs: Any, per_input: int) -> Any:
    token, parts = getattr(config, f"{kind}_token_id", None), getattr(outputs, "pooler_output", None)
    if token is None or parts is None:
        return None
    kept = list(_places_of_first([len(part) for part in parts], (ids == token).sum(dim=1).tolist(), per_input))
    found = copy.copy(outputs)
    found.pooler_output = parts[torch.tensor(kept)] if isinstance(parts, Tensor) else [parts[place] for place in kept]
    features = getattr(outputs, "deepstack_features", None)
    if features is not None:
        if not all(isinstance(each, list) and len(each) == len(parts) for each in features):
            return None  # the library may not have repeated them
        found.deepstack_features = [[each[place] for place in kept] for each in features]
    return found


def _places_of_first(lengths: list[int], wanted: list[int], per_input: int) -> Iterator[int]:
    """Yields the indices of the images that belong to the first sequence of each input.

    Args:
        lengths: length of each image, in tokens.
        wanted: number of image tokens of each input.
    """
    ends, place = list(accumulate(lengths, initial=0)), 0
    for tokens in wanted:
        first = place
        while place < len(lengths) and ends[place] - ends[first] < tokens:
            yield place
            place += 1
        place += (per_input - 1) * (place - first)


def _are_same(these: Any, those: Any) -> bool:
    if isinstance(these, Tensor) and isinstance(those, Tensor):
        return torch.equal(these, those)
    if these is None or those is None:
        return these is those
    return len(these) == len(those) and all(map(_are_same, these, those))
