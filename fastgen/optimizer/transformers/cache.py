"""FastGen's K/V store inside the library's own cache object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from fastgen.decoding.beams import Beams
from fastgen.decoding.kv import LayerKV

DynamicSlidingWindowLayer = getattr(cache_utils, "DynamicSlidingWindowLayer", None)


class SharedLayer(CacheLayerMixin):
    """One layer of a `Cache`, backed by a `LayerKV`.

    A sliding-window layer drops what lies behind the window from the prefix only. It may hold more than the window, and
    the masks that models build from `get_mask_sizes` leave that out; `unsupported` sees to it that they do.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, initial_capacity: int, window: int | None = None) -> None:
        # `keys` and `values`, which the base class sets, are computed here: do not let it.
        self.kv = LayerKV(initial_capacity, window)
        self.is_sliding = window is not None
        self.window = window
        # From a reorder of all rows, which is what the library passes, to one of those that are in the store.
        self.translate: Callable[[torch.Tensor], torch.Tensor] = lambda index: index

    @property
    def is_initialized(self) -> bool:
        return self.kv.length > 0

    @property
    def keys(self) -> torch.Tensor | None:
        return self.kv.read()[0] if self.kv.length else None

    @property
    def values(self) -> torch.Tensor | None:
        return self.kv.read()[1] if self.kv.length else None

    def lazy_initialization(self, key_states: torch.Tensor, *args: Any) -> None:
        """Nothing to prepare: the store takes its shape from the first K/V."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.extend(key_states, value_states)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # An int up to transformers 5.x; earlier releases passed the positions of the queries.
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.kv.stored + length, self.kv.dropped

    def get_seq_length(self) -> int:
        return self.kv.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name up to transformers 5.x

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.kv.reorder(self.translate(beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last positions, whose number is given as a negative one: releases agree on that meaning only."""
        if tokens_to_remove >= 0:
            raise ValueError("a length to crop the cache to is not supported")
        self.kv.crop(-tokens_to_remove)


class StoreInCache:
    """Puts `SharedLayer`s into a cache for the length of one `generate` call, and the library's own layers back.

    The cache object stays the one the library or the user made. Only `layers` is exchanged, so nothing is lost when the
    call is given up half-way: `restore` puts everything back as it was.
    """

    def __init__(self, cache: Cache, per_input: int, initial_capacity: int) -> None:
        """
        Args:
            cache: as accepted by `unsupported`.
            per_input: sequences per input. A cache that holds something has one row per sequence, equal among the
                sequences of an input.
            initial_capacity: positions that will be generated, at least.
        """
        self.cache = cache
        self._beams: Beams | None = None
        self._saved = [(part, part.layers, part.layer_class_to_replicate) for part in _parts(cache)]
        shared = [
            [self._shared(layer, per_input, initial_capacity) for layer in layers] for _, layers, _ in self._saved
        ]
        # From here on nothing can fail: the cache is changed whole or not at all.
        for (part, _, replicate), layers in zip(self._saved, shared, strict=True):
            part.layers = layers
            part.layer_class_to_replicate = partial(SharedLayer, initial_capacity) if replicate is not None else None

    @staticmethod
    def _shared(layer: Any, per_input: int, initial_capacity: int) -> SharedLayer:
        shared = SharedLayer(initial_capacity, window=_window(layer))
        if layer.get_seq_length():
            shared.update(layer.keys[::per_input].contiguous(), layer.values[::per_input].contiguous())
        return shared

    def expand(self, beams: Beams) -> None:
        """The prompt is stored: from now on every input has `beams.per_input` rows."""
        self._beams = beams
        for part in _parts(self.cache):
            for layer in part.layers:
                layer.kv.expand(beams)
            if part.layer_class_to_replicate is not None and not part.layers:
                # Nothing was stored, so there is nothing to share; a later layer would not know of the beams.
                raise RuntimeError("the model did not fill the cache in its first forward pass")

    def keep(self, inputs: torch.Tensor, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Goes on with the given inputs of those that are there, [n] in ascending order.

        Args:
            translate: makes a reorder of the rows that are left from what the library passes to `reorder_cache`.
        """
        if self._beams is None:
            raise RuntimeError("inputs can leave only after the beams are expanded")
        for part in _parts(self.cache):
            for layer in part.layers:
                layer.kv.keep(inputs)
                layer.translate = translate
        self._beams.keep(inputs)

    def release(self) -> None:
        """What is stored is not needed any more: the captured step has it."""
        for part in _parts(self.cache):
            for layer in part.layers:
                layer.kv.release()

    def hold(self, *stored: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Has what the captured step has stored, for who takes the cache over: of self- and of cross-attention."""
        for part, layers in zip(_parts(self.cache), stored, strict=False):
            for layer, kv in zip(part.layers, layers, strict=False):
                layer.kv.hold(*kv)

    def restore(self) -> None:
        """The library's own layers again, as they were before the call."""
        for part, layers, replicate in self._saved:
            part.layers, part.layer_class_to_replicate = layers, replicate

    def hand_over(self) -> None:
        """The library's own layers again, filled with what was stored: the cache goes to the user."""
        shared = [part.layers for part, _, _ in self._saved]
        self.restore()
        for (_, layers, replicate), filled in zip(self._saved, shared, strict=True):
            for index, layer in enumerate(filled):
                if index == len(layers):
                    layers.append(replicate())
                if layer.kv.length:
                    _fill(layers[index], layer.kv)


def _fill(layer: DynamicLayer, kv: LayerKV) -> None:
    keys, values = kv.materialize()
    if layer.get_seq_length():
        layer.keys, layer.values = keys, values
    else:
        layer.update(keys, values)
    if _window(layer) is not None:
        layer.cumulative_length = kv.length


def _window(layer: Any) -> int | None:
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None


def _parts(cache: Cache) -> list[DynamicCache]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def layers_of(cache: Cache) -> tuple[list[SharedLayer], list[SharedLayer] | None]:
    """The layers of self-attention, and of cross-attention if there is any, of a cache with a store in it."""
    own, *cross = [part.layers for part in _parts(cache)]
    return own, cross[0] if cross else None


def unsupported(cache: Any, per_input: int, prompt: int, to_generate: int, needs_window: str | None) -> str | None:
    """Why FastGen's store cannot take the place of the layers of `cache`, or None when it can.

    Args:
        per_input: sequences per input.
        prompt, to_generate: positions of the prompt, and at the most behind it.
        needs_window: why the cache must drop what lies behind a sliding window; None where the model masks that.
    """
    if type(cache) not in (DynamicCache, EncoderDecoderCache):
        return f"the cache is a {type(cache).__name__}"
    for part in _parts(cache):
        if type(part) is not DynamicCache:
            return f"the cache contains a {type(part).__name__}"
        if part.offloading:
            return "the cache is offloaded"
        if part.layer_class_to_replicate not in (None, DynamicLayer):
            return f"the cache makes layers of type {part.layer_class_to_replicate.__name__}"
        for layer in part.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return f"the cache has layers of type {type(layer).__name__}"
            if getattr(layer, "record_past", False):
                return "the cache records its past states"
            window = _window(layer)
            if window is not None and prompt + to_generate > window:
                if needs_window is not None:
                    return needs_window
                # The original never reads more than the window. With one sequence there is nothing to share that would
                # make up for reading more, and with several, not for a suffix that is longer than the window.
                if per_input == 1 or to_generate > window:
                    return "more positions than the sliding window"
            if layer.get_seq_length() == 0:
                continue
            if type(layer) is DynamicSlidingWindowLayer:
                return "the cache passed in has a sliding window"
            if not (rows_agree(layer.keys, per_input) and rows_agree(layer.values, per_input)):
                return "the cache passed in differs between the sequences of an input"
    return None


def rows_agree(tensor: torch.Tensor, per_input: int) -> bool:
    """Whether the rows of `tensor`, `per_input` per input, are the same for every input."""
    if tensor.shape[0] % per_input:
        return False
    rows = tensor.unflatten(0, (-1, per_input))
    return per_input == 1 or bool((rows[:, 1:] == rows[:, :1]).all())
