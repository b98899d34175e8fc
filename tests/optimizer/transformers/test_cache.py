"""The cache of a captured step, as models of the library see it."""

from __future__ import annotations

import torch
from transformers import StaticCache
from transformers.cache_utils import EncoderDecoderCache

from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import StepState
from fastgen.optimizer.transformers.cache import cache_of

PREFIX, CAPACITY = 5, 8


def kv(has_suffix: bool) -> FixedKV:
    state = StepState(2, 1, CAPACITY, torch.device("cpu"))
    return FixedKV(*torch.randn(2, 2, 3, 1, 4), state, PREFIX, has_suffix)


def test_models_take_it_for_a_static_cache() -> None:
    """BLOOM of Transformers up to 5.17 asks for that class, and makes its mask as wide as the capacity."""
    seen = torch.tensor(PREFIX)
    cache = cache_of([kv(True), kv(True)], [], seen)
    assert isinstance(cache, StaticCache) and cache.is_compileable
    assert len(cache.layers) == 2 and cache.layers[0].get_max_cache_shape() == PREFIX + CAPACITY
    both = cache_of([kv(True)], [kv(False)], seen)
    assert isinstance(both, EncoderDecoderCache)
    assert all(isinstance(part, StaticCache) for part in (both.self_attention_cache, both.cross_attention_cache))
