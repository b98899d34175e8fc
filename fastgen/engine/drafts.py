"""What is drafted for requests in slots, and what the engine has learned about drafts and step times."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.decoding.speculation.draft_sources import BOUNDARY
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.entering_decoding import EnteringDecoding, Kind
from fastgen.optimizer.transformers.captured.slot import Chances, SlotDrafts, StepSeconds

# Longest n-gram to match in the preceding tokens, unless the request says otherwise.
_NGRAM = 3


class Drafts:
    """The drafts of an engine.

    Args:
        lookup: tokens to look up at once for a request that does not say how many.

    Attributes:
        seconds: the measured times of the model's steps.
    """

    def __init__(self, lookup: int) -> None:
        self._lookup, self._chances, self.seconds = lookup, Chances(), StepSeconds()

    def of_batch(
        self, batch: Sequence[Request], decoding: EnteringDecoding, kind: Kind
    ) -> tuple[Kind, list[SlotDrafts | None]]:
        """Returns the kind of step for these requests, which verifies drafts if any has some, and the drafts."""
        if not kind.may_draft(decoding.model):
            return kind, [None] * len(batch)
        found = [self._of(request, decoding) for request in batch]
        return kind.drafting() if any(found) else kind, found

    def _of(self, request: Request, decoding: EnteringDecoding) -> SlotDrafts | None:
        most = self._lookup if request.lookup is None else request.lookup
        if not most:
            return None
        source, vocabulary = list[int](), decoding.prompt.logits.shape[-1]
        if decoding.model.config.is_encoder_decoder:  # an encoder may read tokens that the decoder cannot write
            source = [token if token < vocabulary else BOUNDARY for token in request.token_list]
        max_ngram = request.config.max_matching_ngram_size or _NGRAM
        return SlotDrafts(most, max_ngram, source, decoding.prompt.eos, self._chances)
