"""One call of `SequenceGenerator._generate` while it runs: its K/V, and what the hooks know of each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastgen import counters
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.rows import Beams, rows_of
from fastgen.optimizer.fairseq.prefill import Prefill
from fastgen.patching import Wrapper, held

ENTRY_POINT = counters.OF_FAIRSEQ

# FairSeq's name for one model's state between steps: {module and key: ...}.
State = dict[str, Any]

_KEY = "fastgen_kv"


class Unsupported(Exception):
    """This call is not supported after all; the message says why. It is repeated with the original code."""


@dataclass(eq=False)
class Call:
    """State of one `_generate` call, found by the inner hooks through a context variable: threads do not meet.

    Attributes:
        ensemble: the ensemble that generates.
        per_input: sequences per source.
        pad: the token that stands for none.
        attentions: `id` of each attention module whose K/V are kept here.
        initial_capacity: positions to allocate for at first.
        is_expanded: whether each sequence has a row of its own. Before, there is one for all sequences of a source.
        prefill: the tokens that every sequence of a source begins with, when they are run at once.
        prefilled: where the K/V of these tokens go while they run.
    """

    _active: ClassVar[ContextVar[Call | None]] = ContextVar("fastgen_fairseq_call", default=None)

    ensemble: Any
    per_input: int
    pad: int
    attentions: set[int]
    initial_capacity: int
    prefill: Prefill | None = None
    is_expanded: bool = False
    prefilled: State | None = None
    _beams: Beams | None = None
    _layers: list[GrowingKV] = field(default_factory=list)
    _masks: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    _tokens: Tensor | None = None
    _has_padding: bool = False
    _own_mask: Tensor | None = None

    @classmethod
    def entered(cls, call: Call | None) -> AbstractContextManager[None]:
        """Inside this block `call` is the current one; None for a call of the original code."""
        return held(cls._active, call)

    @property
    def beams(self) -> Beams:
        """The sources that are left, and the beam ancestry of their sequences. Raises Unsupported before any step."""
        if self._beams is None:
            raise Unsupported("attention of a decoder before its first step")
        return self._beams

    def begin(self, rows: int) -> None:
        """The loop begins, with so many rows; further calls change nothing."""
        if self._beams is None:
            self._beams = Beams(rows // self.per_input, self.per_input)

    def expand(self) -> None:
        """From now on each sequence has a row of its own."""
        self.is_expanded = True
        # Not made anew: sources that end at the first step are gone by then.
        self._change_masks(lambda mask: mask.repeat_interleave(self.per_input, dim=0))
        for layer in self._layers:
            layer.expand(self.beams)

    # ---- K/V

    def state(self, module: Any, incremental_state: State | None) -> State | None:
        """Where `module` has its K/V, or None when this call does not keep them."""
        if id(module) not in self.attentions:
            return None
        return incremental_state if incremental_state is not None else self.prefilled

    def extend(self, module: Any, state: State, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of self-attention, with those of the new positions, [rows, heads, positions, dim]."""
        layer, is_new = self.layer(module, state)
        if is_new and self.is_expanded:
            layer.expand(self.beams)
        return layer.extend(keys, values)

    def layer(self, module: Any, state: State) -> tuple[GrowingKV, bool]:
        """The K/V of one attention module, and whether there are none yet."""
        # A model that is in an ensemble twice has two states.
        found = module.get_incremental_state(state, _KEY)
        if found is not None:
            return found["kv"], False
        layer = GrowingKV(self.initial_capacity)
        self._layers.append(layer)
        module.set_incremental_state(state, _KEY, {"kv": layer})
        return layer, True

    @contextlib.contextmanager
    def prefilling(self, state: State) -> Iterator[None]:
        """Inside this block a pass over whole sequences, one for each source, puts their K/V into `state`."""
        self.prefilled = state
        try:
            yield
        finally:
            self.prefilled = None
        self.expand()

    def step(self, tokens: Tensor) -> None:
        """A step begins, with the tokens of all sequences so far, [rows, length]."""
        self._tokens, self._own_mask = tokens, None

    def own_mask(self, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores of self-attention, [rows, 1, 1, length], or None before there has been padding.

        Only sequences that have no score any more contain padding; `padding` says which of the new tokens are.
        """
        self._has_padding |= padding is not None
        if self._has_padding and self._own_mask is None:
            tokens = self._tokens
            assert tokens is not None, "outside of a step, the prefix has a mask of its own"
            mask = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
            self._own_mask = mask.masked_fill_(tokens.eq(self.pad), float("-inf"))[:, None, None, :]
        return self._own_mask

    def source_mask(self, padding: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores for a mask of the sources' padding, [sources, S]: [rows, 1, 1, S], or None."""
        # All layers pass the same tensor in all steps, because the encoder output is never reordered. The first is
        # the one before the call is expanded: until then rows are sources.
        if id(padding) not in self._masks:
            hidden, mask = padding.bool(), None
            if bool(hidden.any()):
                if bool(hidden.all(dim=1).any()):
                    # What attention over nothing gives is not the same in all implementations.
                    raise Unsupported("a source that is nothing but padding")
                mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
            self._masks[id(padding)] = padding, mask
        return self._masks[id(padding)][1]

    # ---- between two steps

    def reorder(self, index: Tensor) -> None:
        """Row r continues row `index[r]`. The sources of which no row goes on are finished."""
        sources = index.view(-1, self.per_input)[:, 0] // self.per_input
        left = sources.shape[0]
        if left < self.beams.batch:
            for layer in self._layers:
                layer.keep(sources)
            self.beams.keep(sources)
            rows = rows_of(sources, self.per_input)
            self._change_masks(lambda mask: mask[rows])
            if self.prefill is not None:
                self.prefill.keep(sources)
            gone = sources - torch.arange(left, device=index.device)
            index = index - gone.repeat_interleave(self.per_input) * self.per_input
        for layer in self._layers:
            layer.reorder(index)

    def _change_masks(self, change: Callable[[Tensor], Tensor]) -> None:
        for key, (padding, mask) in self._masks.items():
            self._masks[key] = padding, change(mask) if mask is not None else None


def inside_call(function: Callable[..., Any], ensemble_of: Callable[[Any], Any] | None = None) -> Wrapper:
    """A wrapper that goes to `function(call, wrapped, instance, ...)`, with the target's own parameters behind these.

    Outside of a call, and of its ensemble, the original code runs; also where `function` returns NotImplemented.
    """

    @functools.wraps(function)
    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call._active.get()  # the innermost one of this thread
        result = NotImplemented
        if call is not None and (ensemble_of is None or ensemble_of(instance) is call.ensemble):
            result = function(call, wrapped, instance, *args, **kwargs)
        return wrapped(*args, **kwargs) if result is NotImplemented else result

    return wrapper


of_ensemble = functools.partial(inside_call, ensemble_of=lambda ensemble: ensemble)
"""`inside_call` for the methods of `EnsembleModel`."""
