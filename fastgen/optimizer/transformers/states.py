"""FastGen's versions of the library's cache layers that keep states besides, or instead of, K and V.

The library's own code reads the states, and updates them in place. It requires the classes that these derive from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils

from fastgen import releases
from fastgen.decoding.kv.fixed import FixedStates, Name, States, of_each
from fastgen.decoding.kv.rows import Beams, rows_of
from fastgen.decoding.kv.view import CannotBeCaptured

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
    states: tuple[tuple[Name, torch.Size, torch.dtype], ...]  # shapes without the rows

    @staticmethod
    def of(has_kv: bool, states: States) -> LayerForm:
        return LayerForm(has_kv, tuple((name, state.shape[1:], state.dtype) for name, state in states.items()))


def are_known(model: Any) -> bool:
    """Whether a model is known to keep states besides K and V, all of them in cache layers."""
    return releases.keeps_states_in_cache() and type(model).forward.__module__ in _IN_CACHE


def are_unknown(model: Any) -> bool:
    """Whether a model keeps state besides K and V that may be elsewhere."""
    return getattr(model, "_is_stateful", False) and not are_known(model)


def are_kept(model: Any, text_config: Any) -> bool:
    """Whether a model keeps states besides K and V, so that it cannot return to earlier positions."""
    types = getattr(text_config, "layer_types", None) or ()
    return getattr(model, "_is_stateful", False) or not _TYPES.isdisjoint(types)


def is_layer(layer: Any) -> bool:
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
