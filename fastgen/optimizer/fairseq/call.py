"""One call of `SequenceGenerator._generate` while it runs: its K/V, and what the hooks know of each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.beams import Beams, rows_of
from fastgen.decoding.kv import LayerKV
from fastgen.optimizer.fairseq.prefill import Prefill

ENTRY_POINT = "fairseq.generate"

# FairSeq's name for one model's state between steps: {module and key: ...}.
State = dict[str, Any]

_KEY = "fastgen_kv"


class Unsupported(Exception):
    """This call is not supported after all; the message says why. It is repeated with the original code."""


class Call:
    """State of one `_generate` call, found by the inner hooks through a context variable: threads do not meet.

    Attributes:
        ensemble: the ensemble that generates.
        per_input: sequences per source.
        beams: the sources that are left, and what their sequences descend from; known when the loop repeats the encoder
            output for the beams, which happens before the first step.
        prefill: the tokens that every sequence of a source begins with, when they are run at once.
    """

    _active: ContextVar[Call | None] = ContextVar("fastgen_fairseq_call", default=None)

    def __init__(self, ensemble: Any, per_input: int, pad: int, attentions: set[int], initial_capacity: int) -> None:
        """
        Args:
            pad: the token that stands for none.
            attentions: `id` of each attention module whose K/V are kept here.
            initial_capacity: positions to allocate for at first.
        """
        self.ensemble = ensemble
        self.per_input = per_input
        self.beams: Beams | None = None
        self.prefill: Prefill | None = None
        self._pad = pad
        self._attentions = attentions
        self._initial_capacity = initial_capacity
        self._layers: list[LayerKV] = []
        self._masks: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._prefilled: State | None = None
        self._expanded = False
        self._tokens: Tensor | None = None
        self._has_padding = False
        self._own_mask: Tensor | None = None

    @classmethod
    def current(cls, ensemble: Any = None) -> Call | None:
        """The innermost call that runs in this thread; with an ensemble, only if it is one of that ensemble."""
        call = cls._active.get()
        return call if call is not None and ensemble in (None, call.ensemble) else None

    @classmethod
    @contextlib.contextmanager
    def entered(cls, call: Call | None) -> Iterator[None]:
        """Inside this block `call` is the current one; None for a call of the original code."""
        token = cls._active.set(call)
        try:
            yield
        finally:
            cls._active.reset(token)

    def begin(self, rows: int) -> None:
        """The sources are encoded, and the loop goes on with so many sequences."""
        self.beams = Beams(rows // self.per_input, self.per_input)

    @property
    def is_expanded(self) -> bool:
        """Whether each sequence has a row of its own. Before, there is one for all sequences of a source."""
        return self._expanded

    def expand(self) -> None:
        """From now on each sequence has a row of its own."""
        self._expanded = True
        # Not made anew: sources that end at the first step are gone by then.
        self._masks = {
            key: (padding, mask.repeat_interleave(self.per_input, dim=0) if mask is not None else None)
            for key, (padding, mask) in self._masks.items()
        }
        for layer in self._layers:
            layer.expand(self.beams)

    # ---- K/V

    def state(self, module: Any, incremental_state: State | None) -> State | None:
        """Where `module` has its K/V, or None when this call does not keep them."""
        if id(module) not in self._attentions:
            return None
        return incremental_state if incremental_state is not None else self._prefilled

    @property
    def is_prefilling(self) -> bool:
        return self._prefilled is not None

    def extend(self, module: Any, state: State, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of self-attention, with those of the new positions, [rows, heads, positions, dim]."""
        layer, is_new = self.layer(module, state)
        if is_new and self.is_expanded:
            layer.expand(self.beams)
        return layer.extend(keys, values)

    def layer(self, module: Any, state: State) -> tuple[LayerKV, bool]:
        """The K/V of one attention module, and whether there are none yet."""
        # A model that is in an ensemble twice has two states.
        found = module.get_incremental_state(state, _KEY)
        if found is not None:
            return found["kv"], False
        layer = LayerKV(self._initial_capacity)
        self._layers.append(layer)
        module.set_incremental_state(state, _KEY, {"kv": layer})
        return layer, True

    @contextlib.contextmanager
    def prefilling(self, state: State) -> Iterator[None]:
        """Inside this block a pass over whole sequences, one for each source, puts their K/V into `state`."""
        self._prefilled = state
        try:
            yield
        finally:
            self._prefilled = None
        self.expand()

    def step(self, tokens: Tensor) -> None:
        """A step begins, with the tokens of all sequences so far, [rows, length]."""
        self._tokens, self._own_mask = tokens, None

    def own_mask(self, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores of self-attention when `padding` says which of the new tokens are padding.

        Only sequences that have no score any more contain padding.

        Returns:
            [rows, 1, 1, length], or None as long as there has not been any.
        """
        self._has_padding |= padding is not None
        if self._has_padding and self._own_mask is None:
            mask = torch.zeros(self._tokens.shape, dtype=dtype, device=self._tokens.device)
            self._own_mask = mask.masked_fill_(self._tokens.eq(self._pad), float("-inf"))[:, None, None, :]
        return self._own_mask

    def source_mask(self, padding: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores for a mask of the sources' padding, [sources, S].

        Returns:
            [rows, 1, 1, S], or None when there is no padding. Rows are sources until the call has expanded them.
        """
        # All layers pass the same tensor in all steps, because the encoder output is never reordered. The first is
        # the one before the call branches.
        if id(padding) not in self._masks:
            self._masks[id(padding)] = padding, self._make_mask(padding.bool(), dtype)
        return self._masks[id(padding)][1]

    def _make_mask(self, padding: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not bool(padding.any()):
            return None
        if bool(padding.all(dim=1).any()):
            # What attention over nothing gives is not the same in all implementations.
            raise Unsupported("a source that is nothing but padding")
        mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
        return mask.masked_fill_(padding, float("-inf"))[:, None, None, :]

    # ---- between two steps

    def reorder(self, index: Tensor) -> None:
        """Row r continues row `index[r]`. The sources of which no row goes on are finished."""
        sources = index.view(-1, self.per_input)[:, 0] // self.per_input
        left = sources.shape[0]
        if left < self.beams.batch:
            self._keep(sources)
            gone = sources - torch.arange(left, device=index.device)
            index = index - gone.repeat_interleave(self.per_input) * self.per_input
        for layer in self._layers:
            layer.reorder(index)

    def _keep(self, sources: Tensor) -> None:
        for layer in self._layers:
            layer.keep(sources)
        self.beams.keep(sources)
        rows = rows_of(sources, self.per_input)
        self._masks = {
            key: (padding, mask[rows] if mask is not None else None) for key, (padding, mask) in self._masks.items()
        }
        if self.prefill is not None:
            self.prefill.keep(sources)
