"""A decode step of a model that a CUDA graph or, on the CPU, a program replays, with all the buffers that it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.part import Piece, run_pieces
from fastgen.decoding.captured.search import NOTHING, Search
from fastgen.decoding.kv.exchange import Growing
from fastgen.decoding.kv.rows import rows_of
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.forward import Forward
from fastgen.optimizer.transformers.captured.host_work import HostWork, Scores
from fastgen.optimizer.transformers.captured.key import Host, Key, Prompt
from fastgen.optimizer.transformers.captured.parts import Parts
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens
from fastgen.optimizer.transformers.captured.sizes import Sizes

# Steps under way on a GPU that the host does not know the outcome of. On the CPU there are none.
_LATE = 2


class DecodeStep:
    """The step, its buffers, and what has been captured of it.

    Its parts verify a number of positions each, and draft, if it is one with drafts. A plain step verifies one position
    behind no draft: it chooses the next token.

    Of `prompt`, any of the key's kind, nothing is stored. `processors` is None if the host runs them.

    Args:
        drafting: makes what a step with drafts has besides (`speculation.drafting`).
        search: of another step on the same sequences.
    """

    def __init__(
        self,
        key: Key,
        prompt: Prompt,
        processors: Sequence[CapturedProcessor] | None,
        sizes: Sizes,
        drafting: Callable[[DecodeStep, Prompt], Any] | None = None,
        search: SpeculativeSearch | None = None,
    ) -> None:
        self.key, self.processors, self.device = key, processors, prompt.tokens.device
        self.state: Hashable = None  # of the model that it is captured with
        self.buffers = StepBuffers(key, prompt, sizes)
        self.search: Any = search or _search(key, sizes, self.device, self.buffers.growing)
        self.host_work = HostWork(key, prompt.logits.shape[-1], self.buffers, self.search)
        self.forward = Forward(key, prompt, self.buffers)
        self.parts = Parts(key, self.buffers, self.forward)
        self._cache = self.buffers.cache()
        self.flag = graph.LateFlag(self.device, 0 if key.waits_for_host else _LATE)
        self.seconds_of_calls: deque[float] = deque(maxlen=4)  # what a step of the last calls has taken
        self.drafting: Any = None if drafting is None else drafting(self, prompt)

    @property
    def sizes(self) -> Sizes:
        """Those of its buffers; where the key has none, they may grow."""
        return self.buffers.sizes

    @property
    def is_captured(self) -> bool:
        return self.parts.is_captured

    @property
    def nbytes(self) -> int:
        """Of K and V, and of what a call returns of each step; what is computed lies in memory that all steps share."""
        return sum(part.nbytes for part in (self.buffers, self.host_work, self.drafting) if part is not None)

    def make_room(self, needed: Sizes) -> None:
        """Has the buffers grow to these sizes at least: of those that the key leaves open, and between two calls all.

        In a call, what is generated may get more room; what is there stays.
        """
        have = self.sizes
        if have.fit(needed):
            return
        still_holds, sizes = self.buffers.make_room(needed), self.sizes
        if (sizes.prompt, sizes.new) != (have.prompt, have.new):
            self.search.grow(sizes.prompt, sizes.new)
        if not (still_holds and self.parts.follows):
            self.parts.drop()

    # ---- a call

    def begin(self, prompt: Prompt, fill: int, inputs: slice = slice(None), **options: Any) -> None:
        """Takes over a prompt. The other arguments are those of the search's `begin`.

        That of single `inputs`, which begin while others go on, has K and V of all tokens but the last: the next step
        reads that one, as its tensors say, and chooses the first token. ValueError: they can only begin together.
        """
        may_begin = self.key.rows_may_begin_alone and prompt.new_tokens <= self.sizes.new and inputs.step in (None, 1)
        if inputs != slice(None) and not may_begin:
            raise ValueError("inputs of this step can only begin together")
        # First: it refuses what does not fit, and nothing has been changed then.
        self.search.begin(prompt.tokens, prompt.new_tokens, fill=fill, eos=prompt.eos, inputs=inputs, **options)
        if not self.buffers.begin(prompt, inputs):
            self.parts.drop()
        self.flag.reset()
        if self.drafting is not None:
            self.drafting.begin(prompt)

    def clear(self) -> None:
        """K and V of the last call are of no use any more. On a CPU they take no memory then."""
        self.buffers.clear()

    def choose_first(self, logits: Tensor, host: Host) -> None:
        """The first token, from the prompt's logits, [inputs * per_input, vocabulary]."""
        all_rows = logits.new_zeros(self.key.rows, logits.shape[-1])
        all_rows[: logits.shape[0]] = logits
        pieces = self._pieces(lambda: all_rows, self._send)
        run_pieces([(graph.capturable(run), then) for run, then in pieces], (host, 0))

    def is_over(self) -> bool:
        """To be called after each token: whether the search is known to be over."""
        return self.flag.is_set()

    def verify(self, model: Any, host: Host, done: int, captures: bool = True) -> None:
        """Starts the step for the token after `done` of them. With a draft, `drafting.verify` stands for it.

        One that is not captured yet is captured now, if it is to be; otherwise it runs as it is, as on a GPU the first
        ones do in any case.

        Raises:
            CannotBeCaptured: it does something that a captured step cannot do. Anything else that is raised before
                there is a graph means that, too.
        """
        logits = partial(self._logits, model)
        if captures and not self.forward.is_watched and graph.is_recorded(self.device):
            # For a step to come, which will store the same keys and values once more.
            with self.forward.watched(self._cache):
                graph.capturable(logits)()
        pieces = partial(self._pieces, logits, self._advance)
        self.parts.run(1, pieces, self._cache, host, done, captures=captures)

    def stored(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """K and V of self- and of cross-attention, layer by layer, [rows of the inputs, heads, positions, dim].

        Of self-attention those of the prompt, and of all tokens but the last. Waits for the device.
        """
        return self.buffers.materialized(int(self.search.length.max()) - self.sizes.prompt - 1)

    def take_over(self, other: DecodeStep, inputs: Tensor | slice = slice(None)) -> None:
        """Goes on where `other` is, a step of the same key with less capacity, or where these of more inputs are."""
        rows = inputs if isinstance(inputs, slice) else rows_of(inputs, other.key.per_input)
        if not self.buffers.take_over(other.buffers, inputs, rows):
            self.parts.drop()
        self.search.take_over(other.search, inputs)
        self.host_work.take_over(other.host_work)
        self.flag.reset()
        if self.drafting is not None:
            self.forward.is_watched |= other.forward.is_watched  # what masks say, the other one may have found out
            self.drafting.take_over(other.drafting)

    # ---- what is captured

    def _send(self) -> None:
        self.flag.send(self.search.done)

    def _advance(self) -> None:
        """The K/V of this step have been stored; the next one continues the rows that the search has chosen."""
        self.buffers.advance(self.search.parents, self.search.taken.view(-1))
        self._send()

    def _pieces(self, logits: Callable[[], Tensor], end: Callable[[], None]) -> list[Piece]:
        return self.host_work.pieces(partial(self._put_scores, logits), partial(self._processed, logits), end)

    def _logits(self, model: Any) -> Tensor:
        """[rows, vocabulary] of the tokens that the search has chosen."""
        tokens, cache = self.search.tokens.unsqueeze(1), self.forward.cache(model, self._cache)
        return self.forward(model, cache, tokens, self.buffers.inputs, 1)[:, -1]

    def _normalised(self, logits: Tensor) -> Tensor:
        """What processors get: of beam search log-probabilities, otherwise the logits, in float32."""
        if isinstance(self.search, BeamSearch):
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
        if self.drafting is not None:
            self.drafting.record(found.unsqueeze(1), 1)  # before processors, which may write into it
        if not self.processors and "scores" not in kept.kept:
            scores, normalise = found, True
        else:
            scores, normalise = self._normalised(found), False
            tokens = StepTokens.of(self.search)
            for processor in self.processors:
                scores = processor(scores, tokens)
        kept.keep("scores", scores)
        if self.drafting is not None:
            self.drafting.record(scores.unsqueeze(1), 0)
        return scores, normalise


def _search(key: Key, sizes: Sizes, device: torch.device, growing: Growing | None) -> Any:
    """Of the key's kind; each call says which tokens end a sequence."""
    given = key.batch, key.per_input, sizes.prompt, sizes.new, device, [NOTHING] * key.ends
    if key.draft is not None:
        return SpeculativeSearch(*given, samples=key.samples, width=key.width, together=key.draft.together)
    if key.early_stopping is None:
        return Search(*given, samples=key.samples, growing=growing)
    sorts, stops = key.samples and releases.sorts_drawn_candidates(), key.early_stopping
    return BeamSearch(*given, early_stopping=stops, samples=key.samples, sorts=sorts, growing=growing)
