"""What encoders have made of pictures, once for each input: the library repeats it for each sequence of an input."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# Inputs of a model that hold pictures or sounds themselves, of which an input may have several.
_RAW = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches", "input_features")
# With so many axes they have the rows in front, and then the pictures of each.
_WITH_ROWS = 5


def may_be_several(name: str, value: Any) -> bool:
    """Whether an input holds pictures one after the other, of which nobody knows whose they are.

    The library repeats each of them for itself, so that the sequences of an input with two of them get either the first
    one twice, or the second one.
    """
    return name in _RAW and isinstance(value, Tensor) and value.dim() < _WITH_ROWS


def once(model: Any, ids: Tensor, encoded: dict[str, Any], per_input: int) -> dict[str, Any] | None:
    """The outputs of the encoders by what they have read ("image", "video"), without repetitions.

    Args:
        ids: [inputs, length], the prompts.
        encoded: of `per_input` sequences each, as `GenerationMixin._expand_multimodal_outputs` makes them.

    Returns:
        None where they are not what that method makes of what would be returned.
    """
    found = {kind: _once(model.config, kind, ids, outputs, per_input) for kind, outputs in encoded.items()}
    if any(outputs is None for outputs in found.values()):
        return None
    again = model._expand_multimodal_outputs(ids, {kind: copy.copy(each) for kind, each in found.items()}, per_input)
    same = all(_are_same(again[kind].pooler_output, outputs.pooler_output) for kind, outputs in encoded.items())
    return found if same else None


def _once(config: Any, kind: str, ids: Tensor, outputs: Any, per_input: int) -> Any:
    token, parts = getattr(config, f"{kind}_token_id", None), getattr(outputs, "pooler_output", None)
    if token is None or parts is None:
        return None
    kept = list(_places_of_first([len(part) for part in parts], (ids == token).sum(dim=1).tolist(), per_input))
    found = copy.copy(outputs)
    found.pooler_output = parts[torch.tensor(kept)] if isinstance(parts, Tensor) else [parts[place] for place in kept]
    features = getattr(outputs, "deepstack_features", None)
    if features is not None and isinstance(features[0], list) and len(features[0]) == len(parts):
        found.deepstack_features = [[each[place] for place in kept] for each in features]
    return found


def _places_of_first(lengths: list[int], wanted: list[int], per_input: int) -> Iterator[int]:
    """Where the pictures of the first sequence of each input are.

    Args:
        lengths: of all pictures, in tokens.
        wanted: tokens of each input that stand for pictures.
    """
    ends, place = list(accumulate(lengths, initial=0)), 0
    for tokens in wanted:
        first = place
        while place < len(lengths) and ends[place] - ends[first] < tokens:
            yield place
            place += 1
        place += (per_input - 1) * (place - first)


def _are_same(these: Any, those: Any) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))
