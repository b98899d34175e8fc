"""Encodes images and audio once for each input, where the library repeats them for each sequence of an input."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer.transformers.models import TOKEN_TYPES

# Inputs of a multimodal model that have a row for each sequence.
_PER_SEQUENCE = frozenset(("attention_mask", "position_ids", "inputs_embeds", "labels", *TOKEN_TYPES))
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


def once(model: Any, ids: Tensor, encoded: dict[str, Any], per_input: int) -> dict[str, Any] | None:
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
