"""Puts FastGen's KV caches, and those of captured steps, into the library's own cache objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from fastgen import releases
from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import Beams
from fastgen.decoding.kv.states import FixedStates, States
from fastgen.optimizer.transformers.cache_layers import (
    LayerForm,
    SharedHybridLayer,
    SharedLayer,
    SharedStates,
    StepCache,
    StepHybridLayer,
    StepLayer,
    StepStates,
    empty_layer,
    has_kv,
    has_states,
    is_empty,
    of_layer,
    window_of,
)
from fastgen.optimizer.transformers.index_layers import SharedIndexedLayer, StepIndexedLayer, has_index


class ExchangedLayers:
    """Puts `SharedLayer`s into a cache for the duration of one `generate` call, and restores the library's layers after
    it.

    Only `layers` is replaced, so nothing is lost if the call is given up half-way.

    Args:
        cache: a cache that `unsupported` accepts.
        per_input: sequences per input. A cache that holds something has one row per sequence, equal for all sequences
            of an input.
        initial_capacity: the least number of positions that will be generated.
    """

    def __init__(self, cache: Cache, per_input: int, initial_capacity: int) -> None:
        self.cache = cache
        self._saved = [(part, part.layers, part.layer_class_to_replicate) for part in _parts(cache)]
        self._has_source = _layers_with_source(cache)
        shared = [
            [self._shared(layer, per_input, initial_capacity) for layer in layers] for _, layers, _ in self._saved
        ]
        # Nothing can fail from here on: the cache is changed as a whole or not at all.
        for (part, _, replicate), layers in zip(self._saved, shared, strict=True):
            part.layers = [*layers]
            if replicate is not None:
                make = partial(SharedLayer, initial_capacity)
                part.layer_class_to_replicate = make  # type: ignore[assignment]  # the library only calls it

    @staticmethod
    def _shared(layer: Any, per_input: int, initial_capacity: int) -> Any:
        """Returns FastGen's replacement of a library layer; a layer that keeps nothing is returned unchanged."""
        if is_empty(layer):
            return layer
        shared: SharedLayer
        if has_index(layer):
            shared = SharedIndexedLayer(layer, per_input, initial_capacity)
        elif not has_states(layer):
            shared = SharedLayer(initial_capacity, window=window_of(layer))
        elif has_kv(layer):
            shared = SharedHybridLayer(layer, per_input, initial_capacity)
        else:
            return SharedStates(layer, per_input)
        if layer.get_seq_length():
            shared.update(layer.keys[::per_input].contiguous(), layer.values[::per_input].contiguous())
            shared.kv.dropped = layer.get_seq_length() - layer.keys.shape[2]  # beyond the sliding window
        return shared

    def begin_with(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Stores K and V of the first positions in the layers of self-attention, before the prompt is stored."""
        part = _parts(self.cache)[0]
        for number, kv in enumerate(layers):
            if number == len(part.layers):
                assert part.layer_class_to_replicate is not None, "a layer for each of the model's"
                part.layers.append(part.layer_class_to_replicate())
            layer = part.layers[number]
            assert isinstance(layer, SharedLayer), "the store is in the cache"
            layer.update(*kv)

    def expand(self, beams: Beams) -> None:
        """Ends the prefill: from now on every input has `beams.per_input` rows."""
        self._beams = beams
        if any(part.layer_class_to_replicate is not None and not part.layers for part in _parts(self.cache)):
            # Nothing was stored, so there is nothing to share; layers created later would not know the beams.
            raise RuntimeError("the model did not fill the cache in its first forward pass")
        for layer in self._layers():
            layer.expand(beams)

    def _layers(self) -> Iterator[SharedLayer | SharedStates]:
        return (layer for part in _parts(self.cache) for layer in _shared_layers(part.layers))

    def keep(self, inputs: torch.Tensor, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Continues with these inputs of the batch, [n] in ascending order."""
        for layer in self._layers():
            layer.keep(inputs, translate)
        self._beams.keep(inputs)

    def release(self) -> None:
        """Frees what is stored, because the captured step has taken it over."""
        for layer in self._layers():
            layer.release()

    def hold(
        self,
        own: list[tuple[torch.Tensor, torch.Tensor]],
        cross: list[tuple[torch.Tensor, torch.Tensor]],
        states: list[States],
    ) -> None:
        """Takes over what the captured step stored for self- and cross-attention, for whoever gets the cache."""
        for part, stored in zip(_parts(self.cache), (own, cross), strict=False):
            for kv_layer, kv in zip(_with_kv(part.layers), stored, strict=False):
                kv_layer.kv.hold(*kv)
        for layer, kept in zip(_with_states(_parts(self.cache)[0].layers), states, strict=True):
            layer.hold_states(kept)

    def restore(self) -> None:
        """Restores the library's layers to what they were before the call."""
        for part, layers, replicate in self._saved:
            part.layers, part.layer_class_to_replicate = layers, replicate
        if isinstance(self.cache, EncoderDecoderCache):
            self.cache.is_updated = self._has_source

    def hand_over(self) -> None:
        """Restores the library's layers and fills them with what was stored: the user gets the cache."""
        shared: list[list[Any]] = [[*part.layers] for part, _, _ in self._saved]
        has_source = _layers_with_source(self.cache)
        self.restore()
        if isinstance(self.cache, EncoderDecoderCache):
            self.cache.is_updated = has_source
        for (_, layers, replicate), filled in zip(self._saved, shared, strict=True):
            for index, layer in enumerate(filled):
                if replicate is not None and index == len(layers):
                    layers.append(replicate())
                if layer is not layers[index]:
                    layer.hand_over(layers[index])


def _shared_layers(layers: Sequence[Any]) -> list[SharedLayer | SharedStates]:
    """Returns FastGen's layers in a cache, or in a part of one, without the layers that keep nothing."""
    own = [layer for layer in layers if not is_empty(layer)]
    shared = [layer for layer in own if isinstance(layer, (SharedLayer, SharedStates))]
    assert len(shared) == len(own), "somebody else has put layers into the cache"
    return shared


def _with_kv(layers: Sequence[Any]) -> list[SharedLayer]:
    """Returns what FastGen's layers keep for each position: K and V, and keys of an indexer behind them."""
    with_kv = [layer for layer in _shared_layers(layers) if isinstance(layer, SharedLayer)]
    return [store for layer in with_kv for store in layer.stores]


def _with_states(layers: Sequence[Any]) -> list[SharedStates]:
    return [layer for layer in _shared_layers(layers) if isinstance(layer, SharedStates)]


def _windows(cache: Cache) -> list[int]:
    """Returns the sliding windows of the layers that have one."""
    found = (window_of(layer) for part in _parts(cache) for layer in part.layers)
    return [window for window in found if window is not None]


def _layers_with_source(cache: Cache) -> dict[int, bool]:
    """Returns whether each layer has K and V of the encoder's output, as the library records it."""
    return dict(cache.is_updated) if isinstance(cache, EncoderDecoderCache) else {}


def _parts(cache: Cache) -> list[Cache]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def with_source(cache: Cache, config: Any) -> Cache:
    """Pairs a self-attention cache with one for K and V of an encoder's output; returns other caches unchanged."""
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if type(cache) is DynamicCache else cache


def empty_for(config: Any) -> Cache:
    """Returns an empty cache for self-attention and cross-attention of a decoder of this configuration."""
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def layers_in(cache: Cache) -> list[list[Any]]:
    """Returns the layers of each part of a cache: of self-attention, and of cross-attention if there is any."""
    return [part.layers for part in _parts(cache)]


def layers_of(cache: Cache) -> tuple[list[SharedLayer], list[SharedLayer] | None]:
    """Returns FastGen's layers of self-attention, and of cross-attention if there is any, in a cache."""
    own, *cross = map(_with_kv, layers_in(cache))
    return own, cross[0] if cross else None


def states_in(cache: Cache) -> list[SharedStates]:
    """Returns FastGen's layers with states in a cache."""
    return _with_states(_parts(cache)[0].layers)


def forms_of(cache: Cache) -> tuple[LayerForm, ...]:
    """Returns what each self-attention layer keeps after the prefill; () if none keeps more than K and V."""
    found = tuple(map(LayerForm.of, _parts(cache)[0].layers))
    return found if any(form.states or form.is_sparse for form in found) else ()


def reads_too_much(cache: Any, per_input: int, prompt: int, to_generate: int) -> bool:
    """Whether steps on FastGen's layers read so much more than a sliding window that the library's layers are better.

    The library's layers never read more than the window. One sequence per input shares nothing that would make up for
    reading more; with several, sharing does not make up for a suffix longer than the window. A captured step reads no
    more than the window, either.

    Args:
        per_input: sequences per input.
        prompt, to_generate: positions of the prompt, and the most positions after it.
    """
    shortest = min(_windows(cache), default=None)
    if shortest is None or prompt + to_generate <= shortest:
        return False
    return per_input == 1 or to_generate > shortest


def has_windows(cache: Any) -> bool:
    """Whether layers of a cache know a sliding window. Those of a cache made without a model's config do not."""
    return type(cache) in (DynamicCache, EncoderDecoderCache) and bool(_windows(cache))


def unsupported(cache: Any, per_input: int, positions: int, needs_window: str | None) -> str | None:
    """Returns why FastGen's layers cannot replace the layers of `cache`; None if they can.

    Args:
        per_input: sequences per input.
        positions: positions of the prompt, and the most after it, together.
        needs_window: why the cache must drop what lies beyond a sliding window; None if the model masks it.
    """
    if type(cache) not in (DynamicCache, EncoderDecoderCache):
        return f"the cache is a {type(cache).__name__}"
    for part in _parts(cache):
        if type(part) is not DynamicCache:
            return f"the cache is a {type(part).__name__}"
        if part.offloading:
            return "the cache is offloaded"
        if part.layer_class_to_replicate not in (None, DynamicLayer):
            return f"the cache makes layers of type {part.layer_class_to_replicate.__name__}"
        if not _may_hold_nothing(part.layers):
            return "the cache has layers that hold nothing between others"
        for layer in part.layers:
            if not _is_known(layer):
                return f"the cache has layers of type {type(layer).__name__}"
            if releases.records_past(layer):
                return "the cache records its past states"
            window = window_of(layer)
            if window is not None and positions > window and needs_window is not None:
                return needs_window
            if not all(rows_agree(stored, per_input) for stored in _stored(layer)):
                return "the cache passed in differs between the sequences of an input"
    return None


def _may_hold_nothing(layers: Sequence[Any]) -> bool:
    """Whether layers that hold nothing are only where they may be: among layers with states, and at the end, where
    layers read the K and V of other layers.
    """
    count = sum(map(is_empty, layers))
    return not any(map(is_empty, layers[: len(layers) - count])) or any(map(has_states, layers))


def _is_known(layer: Any) -> bool:
    if has_index(layer):
        return layer.indexer_position_ids is None
    is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    return is_plain or has_states(layer) or is_empty(layer)


def _stored(layer: Any) -> list[torch.Tensor]:
    """Returns the tensors that a library layer stores."""
    found = list(of_layer(layer).values())
    if has_index(layer) and layer.is_indexer_initialized:
        found.append(layer.indexer_keys)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or layer.get_seq_length() == 0:
        return found
    return [*found, keys, values]


def rows_agree(tensor: torch.Tensor, per_input: int) -> bool:
    """Whether the rows of `tensor`, `per_input` per input, are equal for every input. NaN counts as equal to NaN."""
    if tensor.shape[0] % per_input:
        return False
    rows = tensor.unflatten(0, (-1, per_input))
    others, first = rows[:, 1:], rows[:, :1].expand_as(rows[:, 1:])
    if per_input == 1 or torch.equal(others, first):
        return True
    return tensor.is_floating_point() and bool(((others == first) | (others.isnan() & first.isnan())).all())


def cache_of(
    own: Sequence[FixedKV],
    cross: Sequence[FixedKV],
    cache_length: torch.Tensor | int,
    of_rows: Callable[[], torch.Tensor] | None = None,
    forms: Sequence[LayerForm] = (),
    states: Sequence[FixedStates] = (),
) -> Cache:
    """Returns a cache with layers of self-attention and, if there are any, of cross-attention.

    Args:
        cache_length: as for `StepLayer`. Masks are made for the longest row, whose length this is.
        of_rows: returns the length of each row, from which positions are computed; None to use `cache_length`.
        forms: what each self-attention layer keeps, if some keep more than K and V, or `states` instead.
    """
    given = cache_length if of_rows is None else of_rows
    cache: Cache = StepCache(_step_layers(own, states, forms or [LayerForm(True)] * len(own), given))
    if cross:
        of_source = StepCache([StepLayer(kv, partial(getattr, kv, "prefix_capacity")) for kv in cross])
        cache = EncoderDecoderCache(cache, of_source)
    if of_rows is not None:
        setattr(cache, releases.QUERY_OFFSET, lambda layer_idx=0: cache_length)
    return cache


def _step_layers(
    own: Sequence[FixedKV],
    states: Sequence[FixedStates],
    forms: Sequence[LayerForm],
    cache_length: torch.Tensor | int | Callable[[], torch.Tensor | int],
) -> list[Any]:
    kvs, fixed, layers = iter(own), iter(states), list[Any]()
    for form in forms:
        if form.is_sparse:
            layers.append(StepIndexedLayer(next(kvs), next(kvs) if form.has_index else None, cache_length))
        elif form.has_kv:
            kv = next(kvs)
            layers.append(
                StepHybridLayer(kv, next(fixed), cache_length) if form.states else StepLayer(kv, cache_length)
            )
        else:
            layers.append(StepStates(next(fixed)) if form.states else empty_layer())
    return layers
