"""Computes a language model's prefix in one pass, once per source.

FairSeq forces the prefix: it takes a step for each token, and excludes every other token. The loop still takes these
steps, because the search and the scores belong to it, but one pass over the prefix supplies the model's results.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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
