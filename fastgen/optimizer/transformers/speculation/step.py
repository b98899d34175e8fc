"""A captured step that checks drafted tokens: one forward pass over several positions of each row.

Each number of positions is a program of its own, all on the same buffers; so is a step of the draft, where the draft is
the model itself (`fastgen.decoding.speculation`). What a draft stores in the K/V cache, the check writes over.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastgen import releases
from fastgen.decoding import layer_forms
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.growing import Growing
from fastgen.decoding.captured.kv import StepState
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.symbolic_length import Ranges, SymbolicLength
from fastgen.decoding.norms import fused
from fastgen.decoding.speculation import acceptance
from fastgen.decoding.speculation.costs import Costs
from fastgen.decoding.speculation.near_ties import best_tokens
from fastgen.decoding.speculation.row_lengths import RowLengths
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.ops import search_step
from fastgen.optimizer.transformers.cache import cache_of, layers_in
from fastgen.optimizer.transformers.captured import rewritten_processors
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens
from fastgen.optimizer.transformers.captured.sizes import Sizes
from fastgen.optimizer.transformers.captured.step import POSITIONS, CapturedStep, Key, Prompt, Scores

# Tokens drafted in a round, of each row. Each number is a program of its own, so there are only a few. With the token
# behind the draft, some sequences have as many rows in a check as fill vectors without a rest.
LENGTHS = (0, 1, 3, 7)


def lengths_of(key: Key) -> tuple[int, ...]:
    """How many tokens a round of a step of this key may draft, 0 first: of each row, or of all together."""
    if not key.draft.is_ragged:
        return LENGTHS
    least = max(2, key.rows // 2)  # half a token of each row; few rows have some tokens all the same
    return 0, least, 2 * least, 4 * least


# Processors that look at nothing but scores, row by row.
_SCORES_ALONE = (rewritten_processors.Library, rewritten_processors.Eta)


class _Part:
    """Something that a round does over and over: it is captured, after it has run once as it is where it `warms_up`."""

    def __init__(self, device: torch.device, warms_up: bool) -> None:
        self._device, self._warms_up = device, warms_up
        self.captured: graph.Graph | Program | None = None

    def __call__(self, function: Callable[[], object]) -> bool:
        """Runs it, as `function` while it is not captured; says whether that took as long as it will from now on.

        The function is not kept: it has the model, which would never be freed then.
        """
        if self.captured is not None:
            self.captured.replay()
            return True
        function = graph.capturable(function)
        if self._warms_up:
            function()
            self._warms_up = False
        else:
            made = graph.new(self._device)
            made.capture(function)
            made.replay()
            self.captured = made
        return False


def _largest(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


class SpeculativeStep(CapturedStep):
    """A round of speculative decoding: some steps of a draft, and the check of what they have drafted.

    `key.width` is the most positions of a check: the drafted tokens and the one behind them.

    Attributes:
        counts: [rows], int64: how many tokens are drafted, behind the end of each row. Whoever drafts writes them, and
            they are zeros again after a check.
        accepted: [rows], int64: how many of them were kept in the last round.
        costs: what its parts take once they have been captured, and what was accepted in the last call.
        seconds_of_first_runs: of all parts until they had been captured.
        seconds_of_move: what it took to take over rows of a larger step.
        near_ties: one int64: positions of this call where the two best tokens were as good as each other.
        recorded: [rows, width, 2, vocabulary], float32: the scores that the tokens of the last check were chosen by,
            and the logits that these were made of; nothing unless `key.draft.records`.
    """

    search: SpeculativeSearch

    def __init__(self, key: Key, prompt: Prompt, processors: Sequence[CapturedProcessor] | None, sizes: Sizes) -> None:
        super().__init__(key, prompt, processors, sizes)
        rows, device = key.rows, self.device
        self.counts, self.accepted = torch.zeros(2, rows, dtype=torch.int64, device=device).unbind()
        self.near_ties = torch.zeros((), dtype=torch.int64, device=device)
        self._drafted = torch.zeros((), dtype=torch.int64, device=device)  # tokens of this round so far, of each row
        self._ahead = self._state.beside(1)
        self._ahead_seen = torch.zeros_like(self._seen)
        self._cache_ahead = self._cache_for(self._ahead, self._ahead_seen)
        self._caches = {
            width: self._cache_for(self._state.of_width(width), self._seen) for width in range(1, key.width + 1)
        }
        drawn = rows if key.draft.samples else 0, key.width - 1, prompt.logits.shape[-1]
        self._draft_probabilities = torch.zeros(drawn, device=device)
        self._ratings = torch.zeros(rows, key.width - 1, device=device)  # what drafted tokens are given
        recorded = rows if key.draft.records else 0, key.width, 2, prompt.logits.shape[-1]
        self.recorded = torch.zeros(recorded, device=device)
        self._made: dict[int, _Part] = {}
        self.costs = Costs(rows, self.lengths, key.draft.is_ragged)
        self.seconds_of_first_runs = self.seconds_of_move = 0.0
        self.assistant: Any = None  # what another model drafts with on these sequences
        self._is_first = True
        # Products from one token to the next: seven layers and two of attention in each, and five more with an encoder.
        self._products = len(prompt.own) * (14 if prompt.cross else 9) + 1

    def _new_search(self, *sizes: Any, samples: bool, growing: Growing | None) -> SpeculativeSearch:
        return SpeculativeSearch(*sizes, samples=samples, width=self.key.width, together=self.key.draft.together)

    def _cache_for(self, state: StepState, seen: Tensor) -> Cache:
        """The cache as a step finds it that is where `state` is, with `seen` positions in front of its longest row."""
        stored = self.sizes.stored
        bounded = SymbolicLength.of(seen, stored, stored + self.sizes.new)
        own = [kv.view(state) for kv in self._own]
        if self.has_own_lengths:
            # The step holds the cache: it would never be freed at once if the cache held the step.
            step = weakref.ref(self)

            def lengths_of_rows() -> Tensor:
                holder = step()
                assert holder is not None, "a step that runs is there"
                return holder._lengths_of_rows(state, bounded)

            return cache_of(own, self._cross, bounded, lengths_of_rows)
        return cache_of(own, self._cross, bounded)

    @property
    def has_own_lengths(self) -> bool:
        """Whether the model computes positions from lengths of the rows: it may have none behind their limit."""
        return not self.key.draft.together and {*POSITIONS}.isdisjoint(self.key.tensors)

    def _lengths_of_rows(self, state: StepState, bounded: SymbolicLength) -> RowLengths:
        """Nothing counts of a row that is finished: it is not to go on behind its limit."""
        position = torch.where(self.search.unfinished.view(-1), state.position, 0)
        return RowLengths.of(position + self.sizes.stored, bounded)

    @property
    def is_captured(self) -> bool:
        return any(part.captured is not None for part in self._made.values())

    @property
    def is_complete(self) -> bool:
        return bool(self._made) and all(part.captured is not None for part in self._made.values())

    @property
    def nbytes(self) -> int:
        """Also of what is kept for drafts."""
        assistant = self.assistant[1].nbytes if self.assistant is not None else 0
        return super().nbytes + self._draft_probabilities.nbytes + self.recorded.nbytes + assistant

    def take_over(self, other: CapturedStep, inputs: Tensor | slice = slice(None)) -> None:
        assert isinstance(other, SpeculativeStep), "a step of the same kind"
        start = self._now(waits=True)
        super().take_over(other, inputs)
        self.near_ties.copy_(other.near_ties)
        self._drafted.zero_()
        self.counts.zero_()
        self._is_first &= other._is_first  # what masks say, the other one may have found out
        if self.key.rows == other.key.rows:
            self.costs = other.costs
        self.seconds_of_move = self._now(waits=True) - start

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens a round may draft, 0 first."""
        return lengths_of(self.key)

    def tokens_of(self, length: int) -> int:
        """How many tokens a check has where so many are drafted."""
        return self.key.rows * (length + 1)

    def measure(self, part: int, run: Callable[[], None]) -> None:
        """Has a part captured and measured. `run` does it once; what that does to the sequences counts for nothing."""
        self.counts.zero_()
        while self.costs.seconds(part) is None:
            run()

    def begin(self, prompt: Prompt, fill: int, inputs: slice = slice(None), **options: Any) -> None:
        super().begin(prompt, fill, inputs, **options)
        if self.device.type == "cpu":  # on a GPU, a part is measured in its first runs alone
            self.costs.begin_call()
        self.near_ties.zero_()
        self._drafted.zero_()
        self.counts.zero_()
        # Of a prompt that is padded on the right, the padding counts as tokens: it is between them.
        padding = prompt.span[0] if self.key.encoder is None else torch.zeros_like(prompt.span[0])
        self._prompt_lengths = prompt.tokens.shape[1] - padding
        self._extend_all()

    def prompt_lengths(self) -> Tensor:
        """[rows], int64: tokens of each row's prompt, without padding on the left."""
        return self._prompt_lengths.repeat_interleave(self.key.per_input)

    def end(self, rows: Tensor, length: int) -> None:
        """Ends some rows, [rows], bool, at a length that they have reached."""
        self._state.keep_reach()
        self.search.cut(rows, length)
        self._advance_run()  # back to where they end
        self._send()

    # ---- a round

    def put_draft(self, tokens: Tensor, counts: Tensor) -> None:
        """Tokens that others have drafted, [rows, any], and how many of each row count, [rows]; both on the host."""
        at = self.search.length.view(-1, 1) + torch.arange(tokens.shape[1], device=self.device)
        self.search.running_tokens.scatter_(1, at, tokens.to(self.device))
        self.counts.copy_(counts)

    @property
    def takes_largest(self) -> bool:
        """Whether the largest of each row is all that is asked of the logits of a draft."""
        return not (self.key.samples or self.processors or self.key.draft.is_rated)

    def draft(
        self,
        model: Any,
        context: Callable[[], AbstractContextManager[Any]],
        largest: Callable[[Tensor], Tensor] = _largest,
    ) -> None:
        """The model itself, as it is in `context`, drafts one more token of each row.

        Args:
            largest: finds the largest logit of each row, [rows, vocabulary] -> [rows], where nothing else is asked.
        """
        self._run_part(0, self._cache_ahead, lambda: self._draft_one(model, context, largest))

    def check(self, model: Any, drafted: int) -> None:
        """Takes what is right of the tokens that were drafted, `drafted` at the most, and one more.

        Raises:
            CannotBeCaptured: as `CapturedStep.start`.
        """
        width = drafted + 1
        self._run_part(width, self._caches[width], lambda: self._check(model, width))

    def _run_part(self, positions: int, cache: Cache, function: Callable[[], object]) -> None:
        """In the very first step, where all rows are as long as each other, masks may be looked at.

        On a GPU each part runs before it is captured: kernels are compiled then.
        """
        kvs = [layer.kv for layers in layers_in(cache) for layer in layers] if self._is_first else []
        for kv in kvs:
            kv.host_may_wait = True
        try:
            self._run_and_time(positions, function)
        finally:
            for kv in kvs:
                kv.host_may_wait = False

    def _run_and_time(self, positions: int, function: Callable[[], object]) -> None:
        if positions not in self._made:
            self._made[positions] = _Part(self.device, self._is_first or self.device.type != "cpu")
        # On a GPU the host waits for a part only as long as it measures it.
        is_measured = self.device.type == "cpu" or self.costs.seconds(positions) is None
        start = self._now(is_measured)
        is_captured = self._made[positions](function)
        self._is_first = False
        if is_measured:
            seconds = self._now(True) - start
            if is_captured:
                self.costs.add(positions, seconds)
            else:
                self.seconds_of_first_runs += seconds

    def _now(self, waits: bool) -> float:
        if waits and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ---- what is captured

    def _draft_one(
        self, model: Any, context: Callable[[], AbstractContextManager[Any]], largest: Callable[[Tensor], Tensor]
    ) -> None:
        self._ahead.numbers.copy_(self._state.numbers[:2] + self._drafted)
        self._ahead_seen.copy_(self._seen + self._drafted)
        with context():
            logits = self._forward(model, self._cache_ahead, self._drafted, 1)
        self._choose_draft(logits[:, -1], largest)

    def _choose_draft(self, logits: Tensor, largest: Callable[[Tensor], Tensor] = _largest) -> None:
        """The next drafted token, from [rows, vocabulary]."""
        scores = logits if self.takes_largest else self._processed_at(logits, self._drafted)
        if self.key.samples:
            probabilities = torch.softmax(scores, dim=-1)
            self._draft_probabilities.index_copy_(1, self._drafted.view(1), probabilities.unsqueeze(1))
            tokens = acceptance.draw(probabilities, acceptance.random_numbers(len(scores), 0, self.device)[1])
        else:
            tokens = (largest if self.takes_largest else _largest)(scores)
        if self.key.draft.is_rated:
            ratings = torch.softmax(scores, dim=-1).gather(1, tokens.unsqueeze(1))
            self._ratings.index_copy_(1, self._drafted.view(1), ratings)
        self.search.draft(tokens, self._drafted)
        self._drafted.add_(1)

    def _check(self, model: Any, width: int) -> None:
        search, key = self.search, self.key
        logits = self._forward(model, self._caches[width], 0, width)
        self._record(logits, 1)
        scores = self._all_processed(logits)
        self._record(scores, 0)
        if key.samples:
            chosen = self._accept_sampled(scores, search.following(1, width - 1))
            search.commit(chosen, None, self.accepted, None, self.near_ties)
        else:
            chosen, near = best_tokens(scores, self._products)
            search.commit(chosen, self.counts, self.accepted, near, self.near_ties)
        self._advance_run()
        self._drafted.zero_()
        self._send()

    def _accept_sampled(self, scores: Tensor, drafted: Tensor) -> Tensor:
        rows, width, _ = scores.shape
        probabilities = torch.softmax(scores, dim=-1)
        numbers = acceptance.random_numbers(rows, width - 1, self.device)
        q = self._draft_probabilities[:, : width - 1] if self.key.draft.samples else None
        accepted, token = acceptance.accept_sampled(drafted, q, probabilities, self.counts, *numbers)
        self.accepted.copy_(accepted)
        # One score that is no number spoils its whole position. Nothing is accepted there, so it is the last one that
        # is drawn from; those behind it are of tokens that plain generation may never meet.
        last = probabilities[:, :, 0].gather(1, accepted.unsqueeze(1)).squeeze(1)
        self.search.has_nan.logical_or_((last.isnan() & self.search.unfinished.view(-1)).any())
        none = torch.zeros_like(drafted[:, :1]) if width > 1 else accepted.new_zeros(rows, 1)
        return torch.cat([drafted, none], dim=1).scatter(1, accepted.unsqueeze(1), token.unsqueeze(1))

    def _forward(self, model: Any, cache: Any, ahead: Tensor | int, width: int) -> Tensor:
        """[rows, width, vocabulary]: the logits behind the last token, of which the first `ahead` are left out."""
        inputs = dict(self._inputs)
        for name in POSITIONS:
            if name in inputs:
                inputs[name] = self._positions_of(inputs[name], ahead, width)
        for name in ("token_type_ids",):
            if name in inputs:
                inputs[name] = inputs[name].expand(-1, width)
        return self._run_model(model, cache, self.search.following(ahead, width), inputs, width)

    def _run_model(self, model: Any, cache: Any, tokens: Tensor, inputs: dict[str, Tensor], width: int) -> Tensor:
        """Logits of tokens, [any, width]."""
        constants = self._constants()
        if "logits_to_keep" in constants:
            constants["logits_to_keep"] = width
        inputs = model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=width,
            **releases.with_cache(cache),
            **inputs,
            **constants,
        )
        with Ranges(), fused(), layer_forms.plain_linear():
            return model(**inputs, return_dict=True).logits[:, -width:]

    def _positions_of(self, last: Tensor, ahead: Tensor | int, width: int) -> Tensor:
        """[rows, width], from those of the last tokens, [rows, 1]; none that plain decoding would not read.

        What a row drafts behind its limit counts for nothing, but a model may have no position for it; nor for what is
        in front of a row that has ended long ago.
        """
        left = (self.search.limit - self.search.length - 1).view(-1, 1)
        positions = last + ahead + torch.arange(width, device=self.device)
        return torch.minimum(positions, last + left).clamp(min=0)

    def _all_processed(self, logits: Tensor) -> Tensor:
        """What the token behind each of some positions is chosen from, [rows, positions, vocabulary], float32.

        Processors that look at the scores alone, behind all others, get those of all positions at once. The result may
        be where the logits were.
        """
        scores, processors = logits.float(), list(self.processors or ())
        number = next((n for n in range(len(processors), 0, -1) if not isinstance(processors[n - 1], _SCORES_ALONE)), 0)
        if number:
            positions = [self._processed_at(logits[:, at], at, processors[:number]) for at in range(logits.shape[1])]
            # One position is not copied: it may be recognised as that of the output layer (`largest_outputs`).
            scores = torch.stack(positions, dim=1) if len(positions) > 1 else positions[0].unsqueeze(1)
        found = scores.flatten(0, 1)
        for processor in processors[number:]:
            found = processor(found, self._tokens_at(0))
        return found.view(scores.shape)

    def _processed_at(
        self, logits: Tensor, ahead: Tensor | int, processors: Sequence[CapturedProcessor] | None = None
    ) -> Tensor:
        """What is chosen from, with `ahead` drafted tokens behind the end of each row, [rows, vocabulary], float32.

        Args:
            processors: all by default.
        """
        scores, processors = logits.float(), self.processors if processors is None else processors
        if processors:
            tokens = self._tokens_at(ahead)
            for processor in processors:
                scores = processor(scores, tokens)
        return scores

    def _tokens_at(self, ahead: Tensor | int) -> StepTokens:
        search = self.search
        start, length, limit = (x.view(-1, 1) for x in (search.start, search.length, search.limit))
        return StepTokens(search.running_tokens, start, length + ahead, search.prompt, limit - start)

    def _record(self, given: Tensor, place: int) -> None:
        """Keeps scores or logits, [rows, positions, vocabulary], at their place, for who returns them."""
        if self.key.draft.records:
            self.recorded[:, : given.shape[1], place].copy_(given)

    def _processed(self, logits: Callable[[], Tensor]) -> Scores:
        """As of any step: what the first token is chosen from."""
        first = logits()
        self._record(first.unsqueeze(1), 1)  # before processors, which may write into it
        scores, is_raw = super()._processed(lambda: first)
        self._record(scores.unsqueeze(1), 0)
        return scores, is_raw

    def _advance_run(self) -> None:
        """The rows go on by what the search has taken."""
        taken = self.search.taken.view(-1)
        positions = [buffer for name, buffer in self._inputs.items() if name in POSITIONS]
        masks = [buffer for name, buffer in self._inputs.items() if self._grows(name)]
        if search_step.available(taken) and search_step.serves(positions, masks):
            state = self._state
            torch.ops.fastgen.advance_(
                None, taken, self._stored, state.numbers, None, self._seen, positions, masks, self.key.width
            )
            return
        self._state.advance(None, taken)
        self._measure()
        for buffer in positions:
            buffer.add_(taken.unsqueeze(1))
        self._extend_all()

    def _extend_all(self) -> None:
        for name, mask in self._inputs.items():
            if self._grows(name):
                self._extend(mask)

    def _extend(self, mask: Tensor) -> None:
        """All positions that the next check may store count. What is behind a query, attention leaves out by itself."""
        columns = torch.arange(self.key.width, device=self.device)
        at = self.sizes.stored + self._state.position.unsqueeze(1) + columns
        mask.scatter_(1, at.clamp(max=mask.shape[1] - 1), 1)

    def _width_of(self, name: str) -> int:
        return super()._width_of(name) + (self.key.width - 1 if self._grows(name) else 0)
