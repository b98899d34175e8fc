"""The layers that replace the library's in its cache objects: in a call with hooks, and in a captured step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticCache

from fastgen import releases
from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.rows import Beams, rows_of
from fastgen.decoding.kv.states import FixedStates, Name, States, of_each
from fastgen.decoding.kv.view import CannotBeCaptured

# ---- layers that keep states besides, or instead of, K and V
#
# The library's own code reads the states, and updates them in place. It requires the classes that these derive from.

# Attributes of a library layer that hold states, each by number.
_KINDS = ("conv_states", "recurrent_states")
# Placeholders for releases without such layers, in which the derived classes are never instantiated.
_Linear: Any = cache_utils.LinearAttentionLayer if releases.keeps_states_in_cache() else object
_Both: Any = cache_utils.LinearAttentionAndFullAttentionLayer if releases.keeps_states_in_cache() else ()
# A layer that keeps nothing: in models whose caches count other layers, too, and for layers that read the K and V of
# others.
_Nothing: Any = getattr(cache_utils, "DummyLayer", ())
# Names of layers with states in configurations.
_TYPES = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
# Modules whose models keep all of their state in cache layers: equivalence tests run them.
_IN_CACHE = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 "
        "nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next"
    ).split()
)


class LayerForm(NamedTuple):
    """What a layer keeps in the self-attention cache."""

    has_kv: bool
    states: tuple[tuple[Name, torch.Size, torch.dtype], ...] = ()  # shapes without the rows
    is_sparse: bool = False  # attention reads some positions only
    has_index: bool = False  # it keeps the keys by which they are chosen; another layer's choice is read otherwise

    @staticmethod
    def of(layer: Any) -> LayerForm:
        """Returns what a layer of FastGen's keeps after the prefill."""
        states = tuple((name, state.shape[1:], state.dtype) for name, state in of_layer(layer).items())
        sparse = (getattr(layer, name, False) for name in ("is_sparse", "has_index"))
        return LayerForm(isinstance(layer, SharedLayer), states, *sparse)


def states_are_known(model: Any) -> bool:
    """Whether a model is known to keep states besides K and V, all of them in cache layers."""
    return releases.keeps_states_in_cache() and type(model).forward.__module__ in _IN_CACHE


def states_are_unknown(model: Any) -> bool:
    """Whether a model keeps state besides K and V that may be elsewhere."""
    return getattr(model, "_is_stateful", False) and not states_are_known(model)


def states_are_kept(model: Any, text_config: Any) -> bool:
    """Whether a model keeps states besides K and V, so that it cannot return to earlier positions."""
    types = getattr(text_config, "layer_types", None) or ()
    return getattr(model, "_is_stateful", False) or not _TYPES.isdisjoint(types)


def has_states(layer: Any) -> bool:
    """Whether this is a library layer with states that FastGen supports."""
    return _Linear is not object and type(layer) in (_Linear, _Both)


def has_kv(layer: Any) -> bool:
    """Whether such a layer also has K and V."""
    return isinstance(layer, _Both)


def is_empty(layer: Any) -> bool:
    """Whether a layer never keeps anything."""
    return type(layer) is _Nothing


def empty_layer() -> Any:
    """Returns a layer that keeps nothing."""
    return _Nothing()


def of_layer(layer: Any) -> dict[Name, Tensor]:
    """Returns what a layer keeps besides K and V; {} for one without states."""
    kinds = ((kind, getattr(layer, kind, None) or {}) for kind in _KINDS)
    return {(kind, number): state for kind, states in kinds for number, state in states.items() if state is not None}


def have_begun(layer: Any) -> bool:
    """Whether all states of a layer have been set."""
    return bool(layer.has_previous_state) and all(layer.has_previous_state.values())


def put(layer: Any, states: States) -> None:
    """Copies states into a library layer, as if it had computed them."""
    for (kind, number), state in states.items():
        own = getattr(layer, kind)
        if own[number] is None or own[number].shape != state.shape:
            _initialize(layer, kind, number, state)
        own[number].copy_(state)
    layer.has_previous_state.update({number: True for _, number in states})


def _initialize(layer: Any, kind: str, number: int, state: Tensor) -> None:
    options = {"conv_kernel_size": state.shape[-1]} if kind == "conv_states" else {}
    layer.lazy_initialization(**{kind: state}, state_idx=number, **options)


class SharedStates(_Linear):
    """The states of a layer during a call with hooks. They are its own until the call has succeeded.

    The prefill leaves one row per input.
    """

    def __init__(self, layer: Any, per_input: int) -> None:
        _Linear.__init__(self, layer.number_of_states)
        self._per_input = 1
        self.translate: Callable[[Tensor], Tensor] = lambda index: index
        if have_begun(layer):
            put(self, of_each(of_layer(layer), lambda state: state[::per_input]))

    @property
    def states(self) -> dict[Name, Tensor]:
        return of_layer(self)

    def prompt_states(self) -> dict[Name, Tensor]:
        """Returns the states after the prefill, one row per input."""
        return of_each(self.states, lambda state: state[:: self._per_input])

    def expand(self, beams: Beams) -> None:
        """From now on, each input has `beams.per_input` rows."""
        self._per_input = beams.per_input
        if beams.per_input > 1:
            self.hold_states(of_each(self.states, lambda state: state.repeat_interleave(beams.per_input, dim=0)))

    def keep(self, inputs: Tensor, translate: Callable[[Tensor], Tensor]) -> None:
        """Continues with these inputs only, [n] in ascending order."""
        rows = rows_of(inputs, self._per_input)
        self.hold_states(of_each(self.states, lambda state: state.index_select(0, rows)))
        self.translate = translate

    def release(self) -> None:
        for kind in _KINDS:
            getattr(self, kind).update(dict.fromkeys(range(self.number_of_states)))

    def hold_states(self, states: States) -> None:
        """Replaces the present states by these."""
        for (kind, number), state in states.items():
            getattr(self, kind)[number] = state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._per_input > 1:
            index = self.translate(beam_idx)
            self.hold_states(of_each(self.states, lambda state: state.index_select(0, index)))

    def hand_over(self, layer: Any) -> None:
        """Copies the states into a library layer."""
        put(layer, self.states)


class StepStates(_Linear):
    """The states of a layer in a captured step.

    `check` raises CannotBeCaptured if the model does not write to the buffers.
    """

    def __init__(self, fixed: FixedStates) -> None:
        count = 1 + max(number for _, number in fixed.buffers)
        _Linear.__init__(self, count)
        self._fixed = fixed
        for (kind, number), buffer in fixed.buffers.items():
            getattr(self, kind)[number] = buffer
            getattr(self, f"is_{kind}_initialized")[number] = True
            if kind == "conv_states":
                self.conv_kernel_size[number] = buffer.shape[-1]
                self.dtype, self.device = buffer.dtype, buffer.device
        self.has_previous_state = dict.fromkeys(range(count), True)

    def check(self) -> None:
        """Must be called after each step that runs eagerly or is recorded."""
        own = of_layer(self)
        if own.keys() != self._fixed.buffers.keys() or any(
            state is not self._fixed.buffers[name] for name, state in own.items()
        ):
            raise CannotBeCaptured("the model does not update its states in place")


# ---- layers of K and V


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

    @property
    def stores(self) -> list[SharedLayer]:
        """The layers that keep what this one stores for each position."""
        return [self]

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
