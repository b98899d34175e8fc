"""The state of a running `SequenceGenerator._generate` call: its KV cache, its prefix, and what its hooks share."""

from __future__ import annotations

import contextlib
import functools
import math
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
from fastgen.patching import Wrapper, held

ENTRY_POINT = counters.OF_FAIRSEQ

# FairSeq's type of a model's state between steps: {module and key: ...}.
State = dict[str, Any]

_KEY = "fastgen_kv"


class Unsupported(Exception):
    """This call turns out to be unsupported; the message says why. The original code repeats it."""


@dataclass(eq=False)
class Call:
    """State of one `_generate` call. The inner hooks find it through a context variable, so that threads are
    independent.

    Attributes:
        ensemble: the ensemble that generates.
        per_input: sequences per source.
        pad: the padding token.
        attentions: `id` of each attention module whose K/V are stored here.
        initial_capacity: positions to allocate at first.
        is_expanded: whether each sequence has a row of its own. Before, all sequences of a source share one.
        prefill: the common first tokens of every source's sequences, if one pass computes them.
        prefilled: the state that stores the K/V of these tokens during that pass.
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
        """Makes `call` the current one inside this block; None for a call of the original code."""
        return held(cls._active, call)

    @property
    def beams(self) -> Beams:
        """The remaining sources, and the beam ancestry of their sequences. Raises Unsupported before any step."""
        if self._beams is None:
            raise Unsupported("attention of a decoder before its first step")
        return self._beams

    def begin(self, rows: int) -> None:
        """Begins the loop with this many rows; further calls change nothing."""
        if self._beams is None:
            self._beams = Beams(rows // self.per_input, self.per_input)

    def expand(self) -> None:
        """Gives each sequence a row of its own."""
        self.is_expanded = True
        # Expands the masks instead of rebuilding them: sources that ended at the first step are gone by then.
        self._change_masks(lambda mask: mask.repeat_interleave(self.per_input, dim=0))
        for layer in self._layers:
            layer.expand(self.beams)

    # ---- K/V

    def state(self, module: Any, incremental_state: State | None) -> State | None:
        """Returns the state that holds the K/V of `module`, or None if this call does not store them."""
        if id(module) not in self.attentions:
            return None
        return incremental_state if incremental_state is not None else self.prefilled

    def extend(self, module: Any, state: State, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new K and V of self-attention, and returns all, [rows, heads, positions, dim]."""
        layer, is_new = self.layer(module, state)
        if is_new and self.is_expanded:
            layer.expand(self.beams)
        return layer.extend(keys, values)

    def layer(self, module: Any, state: State) -> tuple[GrowingKV, bool]:
        """Returns the KV cache of an attention module, and whether it is new."""
        # A model that occurs twice in an ensemble has two states.
        found = module.get_incremental_state(state, _KEY)
        if found is not None:
            return found["kv"], False
        layer = GrowingKV(self.initial_capacity)
        self._layers.append(layer)
        module.set_incremental_state(state, _KEY, {"kv": layer})
        return layer, True

    @contextlib.contextmanager
    def prefilling(self, state: State) -> Iterator[None]:
        """Makes a pass over whole sequences, one for each source, store its K/V in `state` inside this block."""
        self.prefilled = state
        try:
            yield
        finally:
            self.prefilled = None
        self.expand()

    def step(self, tokens: Tensor) -> None:
        """Begins a step with the tokens of all sequences so far, [rows, length]."""
        self._tokens, self._own_mask = tokens, None

    def own_mask(self, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask of self-attention, [rows, 1, 1, length], or None while there has been no padding.

        Only sequences that have no score any more contain padding; `padding` marks it among the new tokens.
        """
        self._has_padding |= padding is not None
        if self._has_padding and self._own_mask is None:
            tokens = self._tokens
            assert tokens is not None, "outside of a step, the prefix has a mask of its own"
            mask = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
            self._own_mask = mask.masked_fill_(tokens.eq(self.pad), float("-inf"))[:, None, None, :]
        return self._own_mask

    def source_mask(self, padding: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask for the sources' padding [sources, S]: [rows, 1, 1, S], or None without padding."""
        # All layers pass the same tensor in all steps, because the encoder output is never reordered. The first one
        # comes before the call is expanded, while rows are sources.
        if id(padding) not in self._masks:
            hidden, mask = padding.bool(), None
            if bool(hidden.any()):
                if bool(hidden.all(dim=1).any()):
                    # Implementations differ in the result of attention over nothing.
                    raise Unsupported("a source that is nothing but padding")
                mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
            self._masks[id(padding)] = padding, mask
        return self._masks[id(padding)][1]

    # ---- between two steps

    def reorder(self, index: Tensor) -> None:
        """Makes row r continue row `index[r]`. Sources without a continuing row are finished."""
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
    """Makes a wrapper that calls `function(call, wrapped, instance, ...)`, followed by the target's own parameters.

    The original code runs outside of a call, for another ensemble, and if `function` returns NotImplemented.
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


# ---- a language model's prefix, computed in one pass, once per source
#
# FairSeq forces the prefix: it takes a step for each token, and excludes every other token. The loop still takes these
# steps, because the search and the scores belong to it, but one pass over the prefix supplies the model's results.

# The most logits that are computed at a time.
_CHUNK = 2**24


class Prefill:
    """The first tokens of every source, [sources, P], all of them known."""

    def __init__(self, prefix: Tensor, per_input: int) -> None:
        self.prefix = prefix
        self.steps = prefix.shape[1]  # the loop's steps in which the prefix decides
        self._per_input = per_input
        # Log-probabilities, set by `run`: of each token of the prefix, [sources, P], and of all tokens after it,
        # [sources, V].
        self._of_prefix = self._behind = torch.empty(prefix.shape[0], 0)

    @classmethod
    def of(cls, generator: Any, bos: int, prefix: Tensor | None, max_len: int) -> Prefill | None:
        """Makes a prefill of the known tokens of every source's prefix.

        Returns None if a sequence with a score might leave the prefix: n-gram blocker or search may exclude its tokens.
        """
        from fairseq import search

        model = generator.model
        if prefix is None or model.has_encoder() or model.models_size != 1 or prefix.dim() != 2:
            return None
        searches = (search.BeamSearch, search.DiverseBeamSearch, search.DiverseSiblingsSearch, search.Sampling)
        decoder = model.single_model.decoder
        # A LayerDropModuleList draws a random number in each pass, so that the number of passes matters.
        if type(generator.search) not in searches or type(decoder.layers) is not torch.nn.ModuleList:
            return None
        if generator.vocab_size <= 4 * generator.beam_size + 8:
            return None
        free = prefix.eq(generator.pad) | prefix.eq(generator.eos)
        known = int((free.cumsum(dim=1) == 0).all(dim=0).sum())
        prefix = prefix[:, : min(known, max_len)]
        if prefix.shape[1] < 2:
            return None
        blocker = generator.repeat_ngram_blocker
        if blocker is not None and _repeats_ngram(prefix, bos, blocker.no_repeat_ngram_size):
            return None
        return cls(prefix, generator.beam_size)

    def run(self, model: Any, first: Tensor, temperature: float) -> None:
        """Computes the prefix, which follows the tokens `first`, [sources, 1]."""
        tokens = torch.cat([first, self.prefix], dim=1)
        features, extra = model.decoder.extract_features(tokens, encoder_out=None, incremental_state=None)
        of_prefix = []
        chunk = max(_CHUNK // (tokens.shape[0] * len(model.decoder.dictionary)), 1)
        for start in range(0, tokens.shape[1], chunk):
            scores = model.decoder.output_layer(features[:, start : start + chunk]).div_(temperature)
            scores = model.get_normalized_probs((scores, extra), log_probs=True, sample=None)
            forced = self.prefix[:, start : start + chunk]
            of_prefix.append(scores[:, : forced.shape[1]].gather(2, forced.unsqueeze(2)).squeeze(2))
            self._behind = scores[:, -1]
        self._of_prefix = torch.cat(of_prefix, dim=1)

    def log_probs(self, step: int) -> Tensor:
        """Returns a step's log-probabilities, up to `steps`, [rows, V]; -inf for tokens that the prefix excludes."""
        if step == self.steps:
            return self._behind.repeat_interleave(self._per_input, dim=0)
        scores = self._behind.new_full((self._behind.shape[0] * self._per_input, self._behind.shape[1]), -math.inf)
        tokens, known = self.prefix[:, step : step + 1], self._of_prefix[:, step : step + 1]
        per_input = self._per_input
        return scores.scatter_(1, tokens.repeat_interleave(per_input, dim=0), known.repeat_interleave(per_input, dim=0))

    def keep(self, sources: Tensor) -> None:
        """Keeps the given sources only."""
        self.prefix, self._of_prefix, self._behind = (
            part[sources] for part in (self.prefix, self._of_prefix, self._behind)
        )


def _repeats_ngram(prefix: Tensor, bos: int, n: int) -> bool:
    rows = [list(zip(*([bos, *row][i:] for i in range(n)), strict=False)) for row in prefix.tolist()]
    return any(len(set(ngrams)) < len(ngrams) for ngrams in rows)
