"""How a call of `generate` runs that is made to let its inputs enter slots: up to its decoding loop.

Its prompt may begin with positions whose K and V are known, and is prefilled in chunks where others wait meanwhile.
Where a model has a `generate` of its own, that calls the library's, the inner call may be run elsewhere.
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
from fastgen.decoding.kv.cache import Pair
from fastgen.decoding.sources import Sources
from fastgen.optimizer.transformers.buckets import Prefill, reads_tokens_alone
from fastgen.optimizer.transformers.cache import ExchangedLayers


@dataclass
class Entering:
    """A call whose inputs enter slots.

    Attributes:
        take: gets the call behind its prefill, a `Decoding`. It raises CannotBeCaptured for one that is to run as ever.
        find: gives K and V of the first positions of a prompt, layer by layer, [1, heads, positions, dim], which may be
            none; None where none are known.
        chunk: tokens of a prefill at a time, of all rows together; None for all.
        between: is called between two chunks.
        sources: that have been encoded; None if all are to be.
        may_know: whether something may be known of the model, as it is in the call, or be kept of it.
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
        """Whether there is something to do besides the library's prefill, and the model allows it."""
        if self.find is not None and self.may_know(model):
            self._beginning = self.find()
        is_long = self.chunk is not None and ids.numel() > self.chunk
        asks = (is_long or bool(self._beginning)) and config.prefill_chunk_size is None
        return asks and reads_tokens_alone(model, ids, model_kwargs)

    def sources_of(self, model: Any) -> Sources | None:
        """Those of a model as it is; None where there is to be none."""
        return self.sources if self.sources is not None and self.may_know(model) else None

    def prefill(self, store: ExchangedLayers, run: Prefill, ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """What the library's `_prefill` gives, which goes on behind what the cache holds."""
        store.begin_with(self._beginning)
        rows, length = ids.shape
        step = length if self.chunk is None else max(self.chunk // rows, 1)
        cache = releases.cache_in(model_kwargs)
        columns = {name: value for name, value in model_kwargs.items() if isinstance(value, Tensor)}
        # The library leaves a mask of ones out. It says how long the prompt is, of which the cache has the beginning.
        columns.setdefault("attention_mask", torch.ones_like(ids))
        for end in range(cache.get_seq_length() + step, length, step):
            part = {name: value[:, :end] for name, value in columns.items()}
            if releases.cache_in(run(ids[:, :end], {**model_kwargs, **part})) is not cache:
                break  # the last pass tells the caller, too
            self.between()
        return run(ids, {**model_kwargs, **columns})


_current: ContextVar[Entering | None] = ContextVar("fastgen_entering", default=None)


def entering(how: Entering) -> AbstractContextManager[None]:
    """In this context, calls of `generate` end behind their prefill."""
    return patching.held(_current, how)


def claimed() -> Entering | None:
    """How the call that begins enters slots; None for others inside of the first one, made by code of the user's."""
    how = _current.get()
    if how is None or how._is_claimed:
        return None
    how._is_claimed = True
    return how


# Runs a call of the library's `generate`: gets the model, the arguments by name, and what makes the call here.
Elsewhere = Callable[[Any, dict[str, Any], Callable[[], Any]], Any]
_elsewhere: ContextVar[Elsewhere | None] = ContextVar("fastgen_elsewhere", default=None)


def running_elsewhere(how: Elsewhere | None) -> AbstractContextManager[None]:
    """In this context, `how` gives what calls of the library's `generate` return; None: they run as ever."""
    return patching.held(_elsewhere, how)


def elsewhere() -> Elsewhere | None:
    """Who runs a call of the library's `generate` that begins here; None where it runs as ever."""
    return _elsewhere.get()
