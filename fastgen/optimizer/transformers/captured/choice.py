"""From logits to the chosen tokens: processors, criteria and the search, in pieces where the host has a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.part import Piece, run_pieces
from fastgen.decoding.captured.search import NOTHING, Search
from fastgen.decoding.kv.exchange import Growing
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.optimizer.transformers.captured.host import HostWork, Scores, Turn
from fastgen.optimizer.transformers.captured.key import Key
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens
from fastgen.optimizer.transformers.captured.sizes import Sizes


def search_of(key: Key, sizes: Sizes, device: torch.device, growing: Growing | None = None) -> Search:
    """Of the key's kind; each call says which tokens end a sequence."""
    given = key.batch, key.per_input, sizes.prompt, sizes.new, device, [NOTHING] * key.ends
    if key.draft is not None:
        return SpeculativeSearch(*given, samples=key.samples, width=key.width, together=key.draft.together)
    if key.early_stopping is None:
        return Search(*given, samples=key.samples, growing=growing)
    sorts, stops = key.samples and releases.sorts_drawn_candidates(), key.early_stopping
    return BeamSearch(*given, early_stopping=stops, samples=key.samples, sorts=sorts, growing=growing)


class Choice:
    """Chooses the next tokens of a search.

    Args:
        vocabulary: scores of each row.
        processors: that are captured; None if the host runs the call's.
        record: gets what is chosen from, [rows, vocabulary], and 1 before the processors, 0 behind them.
    """

    def __init__(
        self,
        key: Key,
        vocabulary: int,
        search: Search,
        processors: Sequence[CapturedProcessor] | None,
        record: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        self._search, self.processors, self._record = search, processors, record
        self.vocabulary = vocabulary
        self.host_work = HostWork(key, vocabulary, search)

    def pieces(self, logits: Callable[[], Tensor], end: Callable[[], None]) -> list[Piece]:
        """A step that computes logits, [rows, vocabulary], chooses from them, and ends."""
        return self.host_work.pieces(partial(self._put_scores, logits), partial(self._processed, logits), end)

    def first(self, logits: Tensor, end: Callable[[], None], turns: Sequence[Turn]) -> None:
        """Chooses the first tokens, from the logits of prompts, [rows, vocabulary]."""
        pieces = self.pieces(lambda: logits, end)
        run_pieces([(graph.capturable(run), then) for run, then in pieces], (turns,))

    def _normalised(self, logits: Tensor) -> Tensor:
        """What processors get: of beam search log-probabilities, otherwise the logits, in float32."""
        if isinstance(self._search, BeamSearch):
            return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        return logits.float()

    def _put_scores(self, logits: Callable[[], Tensor]) -> None:
        """What the host's processors get."""
        found = logits()
        self.host_work.keep("logits", found)
        self.host_work.scores.copy_(self._normalised(found))

    def _processed(self, logits: Callable[[], Tensor]) -> Scores:
        """What the search chooses from, after the processors."""
        kept = self.host_work
        if self.processors is None:  # the host has run them
            kept.keep("scores", kept.scores)
            return kept.scores, False
        found = logits()
        kept.keep("logits", found)
        if self._record is not None:
            self._record(found, 1)  # before processors, which may write into it
        if not self.processors and "scores" not in kept.kept:
            scores, normalise = found, True
        else:
            scores, normalise = self._normalised(found), False
            tokens = StepTokens.of(self._search)
            for processor in self.processors:
                scores = processor(scores, tokens)
        kept.keep("scores", scores)
        if self._record is not None:
            self._record(scores, 0)
        return scores, normalise
