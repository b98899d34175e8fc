"""Describes how a call of `generate` enters slots: it runs up to its decoding loop.

Its prompt may begin with a prefix whose K and V are known, and is prefilled in chunks while others wait. If a model has
its own `generate`, which calls the library's, the inner call may run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen import patching, releases
from fastgen.decoding.kv import Pair
from fastgen.decoding.prompt_caches import Sources
from fastgen.optimizer.transformers.buckets import Prefill, reads_tokens_alone
from fastgen.optimizer.transformers.cache import ExchangedLayers


@dataclass
class Entering:
    """A call whose inputs enter slots.

    Attributes:
        take: receives the call, a `Decoding`, after its prefill. Raises CannotBeCaptured if the call must run as usual.
        find: returns K and V of the prompt's first positions, layer by layer, [1, heads, positions, dim], or an empty
            sequence; None if none are known.
        chunk: tokens of all rows together in a chunk of the prefill; None for no chunks.
        between: called between two chunks.
        sources: encoder outputs that may be reused; None to encode all sources.
        may_know: whether anything kept of the model may be used, and anything kept, in its state in the call.
    """

    take: Callable[[Any], None]
    find: Callable[[], Sequence[Pair]] | None = None
    chunk: int | None = None
    between: Callable[[], object] = lambda: None
    sources: Sources | None = None
    may_know: Callable[[Any], bool] = lambda model: True
    _is_claimed: bool = False
    _beginning: Sequence[Pair] = ()

    def serves(self, model: Any, ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> bool:
        """Whether `prefill` differs from the library's prefill, and the model allows that."""
        if self.find is not None and self.may_know(model):
            self._beginning = self.find()
        is_long = self.chunk is not None and ids.numel() > self.chunk
        asks = (is_long or bool(self._beginning)) and config.prefill_chunk_size is None
        return asks and reads_tokens_alone(model, ids, model_kwargs)

    def sources_of(self, model: Any) -> Sources | None:
        """Returns the encoder outputs kept for the model in its present state; None if none may be used."""
        return self.sources if self.sources is not None and self.may_know(model) else None

    def prefill(self, store: ExchangedLayers, run: Prefill, ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Returns what the library's `_prefill` returns, which continues after the positions in the cache."""
        store.begin_with(self._beginning)
        rows, length = ids.shape
        step = length if self.chunk is None else max(self.chunk // rows, 1)
        cache = releases.cache_in(model_kwargs)
        columns = {name: value for name, value in model_kwargs.items() if isinstance(value, Tensor)}
        # The library omits a mask of ones. It is needed for the length of the prompt, whose beginning is in the cache.
        columns.setdefault("attention_mask", torch.ones_like(ids))
        for end in range(cache.get_seq_length() + step, length, step):
            part = {name: value[:, :end] for name, value in columns.items()}
            if releases.cache_in(run(ids[:, :end], {**model_kwargs, **part})) is not cache:
                break  # the caller sees this from the last pass, too
            self.between()
        return run(ids, {**model_kwargs, **columns})


_current: ContextVar[Entering | None] = ContextVar("fastgen_entering", default=None)


def entering(how: Entering) -> AbstractContextManager[None]:
    """A context in which calls of `generate` end after their prefill."""
    return patching.held(_current, how)


def claimed() -> Entering | None:
    """Returns how the call that begins enters slots; None for calls inside it, which user code makes."""
    how = _current.get()
    if how is None or how._is_claimed:
        return None
    how._is_claimed = True
    return how


# Runs a call of the library's `generate`: takes the model, the arguments by name, and a function that makes the call
# here.
Elsewhere = Callable[[Any, dict[str, Any], Callable[[], Any]], Any]
_elsewhere: ContextVar[Elsewhere | None] = ContextVar("fastgen_elsewhere", default=None)


def running_elsewhere(how: Elsewhere | None) -> AbstractContextManager[None]:
    """A context in which `how` runs calls of the library's `generate`; with None, they run as usual."""
    return patching.held(_elsewhere, how)


def elsewhere() -> Elsewhere | None:
    """Returns the function that runs a call of the library's `generate` beginning here; None if it runs as usual."""
    return _elsewhere.get()
