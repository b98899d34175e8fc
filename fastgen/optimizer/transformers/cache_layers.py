"""The layers that replace the library's in its cache objects: in a call with hooks, and in a captured step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticCache

from fastgen import releases
from fastgen.decoding.kv.fixed import FixedKV, FixedStates
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.rows import Beams
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers.states import SharedStates, StepStates


class KVCacheLayer(releases.CacheLayerNames, CacheLayerMixin):
    """A layer of a `Cache` whose K and V are in FastGen's `kv`."""

    def __init__(self, kv: GrowingKV | FixedKV) -> None:
        # Does not call the base class, which would set `keys` and `values`: these are properties here.
        self.kv = kv

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # the library only reads it
        return self.kv.read()[0] if self.kv.length else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # the library only reads it
        return self.kv.read()[1] if self.kv.length else None

    def lazy_initialization(self, *args: Any) -> None:
        pass


class SharedLayer(KVCacheLayer):
    """A layer backed by a `GrowingKV`.

    A sliding-window layer drops positions beyond the window from the prefix only. It may therefore hold more than the
    window; the masks that models build from `get_mask_sizes` exclude the rest, which `unsupported` makes sure of.
    """

    is_compileable = False
    kv: GrowingKV

    def __init__(self, initial_capacity: int, window: int | None = None) -> None:
        super().__init__(GrowingKV(initial_capacity, window))
        self.is_sliding = window is not None
        self.window = window
        # Maps a reorder of all rows, which the library passes, to one of the rows that are stored.
        self.translate: Callable[[torch.Tensor], torch.Tensor] = lambda index: index

    @property
    def is_initialized(self) -> bool:
        return self.kv.length > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.extend(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kv.cached + query_length, self.kv.dropped

    def get_seq_length(self) -> int:
        return self.kv.length

    def capacity(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.kv.reorder(self.translate(beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last positions. Takes their number as a negative one, which means this in all releases."""
        if tokens_to_remove >= 0:
            raise ValueError("a length to crop the cache to is not supported")
        self.kv.crop(-tokens_to_remove)

    def expand(self, beams: Beams) -> None:
        self.kv.expand(beams)

    def keep(self, inputs: torch.Tensor, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.kv.keep(inputs)
        self.translate = translate

    def release(self) -> None:
        self.kv.release()

    def hand_over(self, layer: Any) -> None:
        """Copies what this layer has stored into a library layer."""
        assert isinstance(layer, DynamicLayer), "what `unsupported` lets through"
        if self.kv.length:
            _fill(layer, self.kv)


class SharedHybridLayer(SharedStates, SharedLayer):
    """A layer backed by a `GrowingKV` that has states, too."""

    def __init__(self, layer: Any, per_input: int, initial_capacity: int) -> None:
        SharedLayer.__init__(self, initial_capacity)
        SharedStates.__init__(self, layer, per_input)

    def expand(self, beams: Beams) -> None:
        SharedStates.expand(self, beams)
        SharedLayer.expand(self, beams)

    def keep(self, inputs: torch.Tensor, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        SharedLayer.keep(self, inputs, translate)
        SharedStates.keep(self, inputs, translate)

    def release(self) -> None:
        SharedStates.release(self)
        SharedLayer.release(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        SharedStates.reorder_cache(self, beam_idx)
        SharedLayer.reorder_cache(self, beam_idx)

    def hand_over(self, layer: Any) -> None:
        SharedStates.hand_over(self, layer)
        SharedLayer.hand_over(self, layer)


class StepLayer(KVCacheLayer):
    """A layer backed by a `FixedKV`. `cache_length`: positions before those of the step; for self-attention on the
    device.

    If it is a function, every step calls it.
    """

    is_compileable = True
    is_sliding = False
    is_initialized = True
    kv: FixedKV

    def __init__(self, kv: FixedKV, cache_length: torch.Tensor | int | Callable[[], torch.Tensor | int]) -> None:
        super().__init__(kv)
        self._cache_length = cache_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.kv.has_suffix:
            raise CannotBeCaptured("the model computes the keys of the encoder's output in every step")
        if key_states.shape[2] != self.kv.width:
            raise CannotBeCaptured(f"the model stores {key_states.shape[2]} positions in a step")
        return self.kv.write(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        """Does nothing: the next step overwrites what this one has stored after its first position."""
        if self.kv.has_suffix and -tokens_to_remove != self.kv.width - 1:
            raise CannotBeCaptured("the model crops its cache")

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.kv.length, 0

    def get_seq_length(self) -> torch.Tensor | int:  # type: ignore[override]  # as of the library's static layer
        return self._cache_length() if callable(self._cache_length) else self._cache_length

    def capacity(self) -> int:
        return self.kv.length


class StepHybridLayer(StepStates, StepLayer):
    """A layer backed by a `FixedKV` that has states, too."""

    def __init__(
        self, kv: FixedKV, states: FixedStates, cache_length: torch.Tensor | int | Callable[[], torch.Tensor | int]
    ) -> None:
        StepLayer.__init__(self, kv, cache_length)
        StepStates.__init__(self, states)


class StepCache(StaticCache):
    """A cache of `StepLayer`s. It derives from the static cache because some models of some releases require that
    class.

    Up to 5.17, BLOOM builds its own two-dimensional mask for a static cache only, and cannot use the library's mask,
    which has four dimensions.

    Attributes:
        drops_last: the last positions can be dropped, as UniLM does. Not every release's static cache can do that.
    """

    drops_last = True

    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=[*layers])  # StaticCache's own would make other layers


def window_of(layer: Any) -> int | None:
    """Returns the sliding window of a library layer; None if it has none."""
    return layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None


def _fill(layer: DynamicLayer, kv: GrowingKV) -> None:
    keys, values = kv.materialize()
    window = window_of(layer)
    if layer.get_seq_length():
        seen = slice(None if window is None else 1 - window, None)
        layer.keys, layer.values = keys[:, :, seen], values[:, :, seen]
    else:
        layer.update(keys, values)
    if window is not None:
        layer.cumulative_length = kv.length
