"""The buffers of a captured step inside the library's own cache classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from fastgen.decoding.captured.kv import StaticKV
from fastgen.decoding.shared import CannotBeCaptured


class StepLayer(CacheLayerMixin):
    """One layer of a `Cache` of fixed capacity, as the library's `StaticLayer` is one: its length is on the device."""

    is_compileable = True
    is_sliding = False
    is_croppable = False
    is_initialized = True

    def __init__(self, kv: StaticKV, seen: Tensor | int) -> None:
        """
        Args:
            seen: positions in front of those of the step: of self-attention on the device.
        """
        # `keys` and `values`, which the base class sets, are computed here: do not let it.
        self.kv = kv
        self._seen = seen

    @property
    def keys(self) -> Tensor:
        return self.kv.read()[0]

    @property
    def values(self) -> Tensor:
        return self.kv.read()[1]

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing to prepare: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.kv.has_suffix:
            raise CannotBeCaptured("the model computes the keys of the encoder's output in every step")
        if key_states.shape[2] != self.kv.width:
            raise CannotBeCaptured(f"the model stores {key_states.shape[2]} positions in a step")
        return self.kv.write(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do: the next step writes over what this one has stored besides its first position."""
        if self.kv.has_suffix and -tokens_to_remove != self.kv.width - 1:
            raise CannotBeCaptured("the model crops its cache")

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.kv.length, 0

    def get_seq_length(self) -> Tensor | int:
        return self._seen

    def get_max_length(self) -> int:
        return self.kv.length

    get_max_cache_shape = get_max_length  # the name up to transformers 5.x


def cache_of(own: list[StaticKV], cross: list[StaticKV], seen: Tensor) -> Cache:
    """A cache with these layers.

    Args:
        own: of self-attention.
        cross: of cross-attention; empty for a model without.
        seen: one int64: positions in front of those of the step.
    """
    self_attention = _with_layers([StepLayer(kv, seen) for kv in own])
    if not cross:
        return self_attention
    return EncoderDecoderCache(self_attention, _with_layers([StepLayer(kv, kv.prefix_capacity) for kv in cross]))


def _with_layers(layers: list[StepLayer]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = layers, None
    return cache
