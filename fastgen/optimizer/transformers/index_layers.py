"""The layers that replace the library's of sparse attention, whose indexer chooses the positions that attention reads.

The library's layer keeps a key of the indexer for each position, besides K and V. Here another KV cache has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import Beams
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers.cache_layers import SharedLayer, StepLayer

# A placeholder for releases without this layer: no layer is an instance of it.
_Indexed: Any = getattr(cache_utils, "DynamicIndexedLayer", ())


def has_index(layer: Any) -> bool:
    """Whether this is a library layer that may keep keys of an indexer."""
    return type(layer) is _Indexed


class SharedIndexedLayer(SharedLayer):
    """A layer backed by a `GrowingKV`, and by another one for the keys of its indexer.

    Attributes:
        index: has these keys, [rows, 1, positions, dim].
        has_index: whether there are any: the layer may read the choice of another layer.
    """

    is_sparse = True

    def __init__(self, layer: Any, per_input: int, initial_capacity: int) -> None:
        super().__init__(initial_capacity)
        self.index, self.has_index = SharedLayer(initial_capacity), False
        if layer.is_indexer_initialized:
            self.update_indexer(layer.indexer_keys[::per_input])

    @property
    def stores(self) -> list[SharedLayer]:
        return [self, self.index] if self.has_index else [self]

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Adds keys of positions, [rows, any, dim], and returns all of them."""
        self.has_index = True
        return _keys_of_index(self.index.kv.extend(*_as_kv(keys)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.index.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.has_index:
            self.index.crop(tokens_to_remove)

    def expand(self, beams: Beams) -> None:
        super().expand(beams)
        self.index.expand(beams)

    def keep(self, inputs: torch.Tensor, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().keep(inputs, translate)
        self.index.keep(inputs, translate)

    def release(self) -> None:
        super().release()
        self.index.release()

    def hand_over(self, layer: Any) -> None:
        super().hand_over(layer)
        if self.has_index:
            layer.is_indexer_initialized = False  # its keys are a part of these
            layer.update_indexer(self.index.kv.materialize()[0].squeeze(1))


class StepIndexedLayer(StepLayer):
    """A layer backed by a `FixedKV`, whose attention reads some positions only.

    Attributes:
        index: has the keys by which they are chosen; None if it reads the choice of another layer.
        chooses: whether a hook has its indexer choose among stored positions (`special_models.choose_positions`).
    """

    def __init__(
        self,
        kv: FixedKV,
        index: FixedKV | None,
        cache_length: torch.Tensor | int | Callable[[], torch.Tensor | int],
    ) -> None:
        super().__init__(kv, cache_length)
        self.index, self.chooses = index, False
        kv.always_read_masks()

    def update_indexer(self, keys: Tensor) -> Tensor:
        if self.index is None or keys.shape[1] != self.index.width:
            raise CannotBeCaptured("the model stores other keys of an indexer than its prefill")
        if not self.chooses:
            raise CannotBeCaptured("an indexer that FastGen has no hook for")
        return _keys_of_index(self.index.write(*_as_kv(keys)))


def _as_kv(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys of an indexer, [rows, positions, dim], as K and V of one head. V is not read, and has one column."""
    return keys.unsqueeze(1), keys[..., :1].unsqueeze(1)


def _keys_of_index(stored: tuple[Tensor, Tensor]) -> Tensor:
    """Undoes `_as_kv`."""
    rows, _, length, dim = stored[0].shape
    return stored[0].reshape(rows, length, dim)
