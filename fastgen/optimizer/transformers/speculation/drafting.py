"""The parts of a decode step with drafts: drafting tokens, and verifying them in one forward pass.

There is one part for each number of positions, all on the same buffers. If the model itself drafts, a step of the draft
is a part, too (`fastgen.decoding.speculation`). The verifying part overwrites what a draft has stored in the KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastgen.decoding.captured.capturable import SymbolicLength
from fastgen.decoding.kv.rows import RaggedState, StepState
from fastgen.decoding.speculation import speculative_search
from fastgen.decoding.speculation.draft_length import DRAFT, Costs
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch, best_tokens
from fastgen.optimizer.transformers.cache import cache_of
from fastgen.optimizer.transformers.captured.key import POSITIONS, Key, Prompt
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor, StepTokens
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.models import TOKEN_TYPES

# Tokens that an iteration drafts for each row. Each number is a part of its own, so there are only a few. With the
# token after the draft, they are powers of two, so that the rows of some batches fill vectors completely.
LENGTHS = (0, 1, 3, 7)
# Parts of an assistant besides the draft step, which has the same number as in the step that verifies.
_FIRST, _STORE, _ADVANCE = -1, -2, -3


def lengths_of(key: Key) -> tuple[int, ...]:
    """Returns how many tokens an iteration of a step of this key may draft, 0 first: per row, or for all together."""
    if not key.draft.is_ragged:
        return LENGTHS
    least = max(2, key.rows // 2)  # half a token per row, but some tokens even for few rows
    return 0, least, 2 * least, 4 * least


def _largest(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


class Drafting:
    """Draft-verify iterations of a step: some draft steps, and the forward pass that verifies the drafted tokens.

    `key.width` is the maximum number of positions of this pass: the drafted tokens and the one after them.

    Attributes:
        lengths: numbers of tokens that an iteration may draft, 0 first.
        counts: [rows], int64: how many tokens are drafted after the end of each row. Written when tokens are drafted,
            and zero again after they are verified.
        accepted: [rows], int64: how many of them were kept in the last iteration.
        prompt_lengths: [rows], int64: tokens of each row's prompt, without padding on the left.
        near_ties: int64 scalar: number of positions in this call whose two best tokens were about equally good.
        recorded: [rows, width, 2, vocabulary], float32: the scores by which the last tokens were chosen, and the logits
            from which they were computed; empty unless `key.draft.records`.
        costs: the times of captured parts, and the acceptance rate of the last call.
    """

    def __init__(self, step: DecodeStep, prompt: Prompt) -> None:
        self.key = key = step.key
        self.lengths = lengths_of(key)
        self.search: SpeculativeSearch = step.search
        # Parts of the step, not the step itself, as a reference cycle would delay its release.
        self._buffers, self._forward, self._parts, self._flag = step.buffers, step.forward, step.parts, step.flag
        self._processors = list(step.processors or ())
        rows, width, device = key.rows, key.width, step.device
        self.device, self.vocabulary = device, prompt.logits.shape[-1]
        self.counts, self.accepted = torch.zeros(2, rows, dtype=torch.int64, device=device).unbind()
        self.near_ties = torch.zeros((), dtype=torch.int64, device=device)
        self.drafted = torch.zeros((), dtype=torch.int64, device=device)  # tokens of this draft so far, for each row
        position, self._cache_length = self._buffers.position, self._buffers.cache_length
        self._ahead, self._ahead_length = position.beside(1), torch.zeros_like(self._cache_length)
        self._cache_ahead = self._cache_at(self._ahead, self._ahead_length)
        self._caches = {
            each: self._cache_at(position.of_width(each), self._cache_length) for each in range(1, width + 1)
        }
        drawn = rows if self.key.draft.samples else 0
        floats = partial(torch.zeros, dtype=torch.float32, device=device)
        self.draft_probabilities = floats(drawn, width - 1, self.vocabulary)
        self._ratings = floats(rows, width - 1)  # probabilities of drafted tokens
        recorded = rows if self.key.draft.records else 0
        self.recorded = floats(recorded, width, 2, self.vocabulary)
        self.costs = Costs(rows, self.lengths, key.draft.is_ragged)
        self.assistant: Any = None  # the state and the step with which another model drafts on these sequences
        # Products from one token to the next: per layer, seven linear ops, two of attention, and five with an encoder.
        self._products = len(prompt.own) * (14 if prompt.cross else 9) + 1

    def _cache_at(self, position: StepState, cache_length: Tensor) -> Cache:
        return self._buffers.cache_at(position, cache_length, self.search)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, including those of an assistant."""
        assistant = self.assistant[1].nbytes if self.assistant is not None else 0
        return self.draft_probabilities.nbytes + self.recorded.nbytes + int(assistant)

    # ---- a call

    def begin(self, prompt: Prompt) -> None:
        """Begins a call in the step."""
        if self.device.type == "cpu":  # on a GPU, a part is only measured in its first runs
            self.costs.begin_call()
        self.near_ties.zero_()
        self.drafted.zero_()
        self.counts.zero_()
        # Padding on the right of a prompt counts as tokens, because generated tokens follow it.
        padding = torch.zeros_like(prompt.span[0]) if self.key.is_encoder_decoder else prompt.span[0]
        self.prompt_lengths = (prompt.tokens.shape[1] - padding).repeat_interleave(self.key.per_input)

    def take_over(self, other: Drafting) -> None:
        """Continues another step of as many rows."""
        self.near_ties.copy_(other.near_ties)
        self.drafted.zero_()
        self.counts.zero_()
        self.costs = other.costs

    def end(self, rows: Tensor, length: int) -> None:
        """Ends some rows, [rows], bool, at a length that they have reached."""
        self._buffers.position.keep_max_length()
        self.search.cut(rows, length)
        self._advance()  # back to the rows' ends
        self._flag.send(self.search.done)

    # ---- times of parts

    def measure(self, part: int, run: Callable[[], None]) -> None:
        """Has a part captured and measured by calling `run`, whose effects on the sequences do not count."""
        self.counts.zero_()
        while self.costs.seconds(part) is None:
            run()

    def _run_part(self, number: int, cache: Cache, function: Callable[[], object]) -> None:
        # On a GPU, the host only waits for a part while it measures it.
        is_measured = self.device.type == "cpu" or self.costs.seconds(number) is None
        start = self.now(is_measured)
        is_replay = self._parts.run(number, lambda: [(function, None)], cache)
        if not is_measured:
            return
        seconds = self.now(True) - start
        if is_replay:
            self.costs.add(number, seconds)

    def now(self, waits: bool) -> float:
        """Returns the time; if it `waits`, after all work on the device has finished."""
        if waits and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ---- an iteration

    def put_draft(self, tokens: Tensor, counts: Tensor) -> None:
        """Writes drafted tokens, [rows, any], and how many of each row count, [rows]; both on the host."""
        at = self.search.length.view(-1, 1) + torch.arange(tokens.shape[1], device=self.device)
        self.search.running_tokens.scatter_(1, at, tokens.to(self.device))
        self.counts.copy_(counts)

    @property
    def takes_largest(self) -> bool:
        """Whether only the argmax of each row is read from a draft's logits."""
        return not (self.key.samples or self._processors or self.key.draft.is_rated)

    def draft(
        self,
        model: Any,
        context: Callable[[], AbstractContextManager[Any]],
        largest: Callable[[Tensor], Tensor] = _largest,
    ) -> None:
        """Drafts one more token of each row with the model as it is in `context`.

        If nothing else is read from the logits, `largest` finds their argmax, [rows, vocabulary] -> [rows].
        """

        def draft_one() -> None:
            self._ahead.position_table.copy_(self._buffers.position.position_table[:2] + self.drafted)
            self._ahead_length.copy_(self._cache_length + self.drafted)
            with context():
                logits = self._logits(model, self._cache_ahead, self.drafted, 1)
            self._choose_draft(logits[:, -1], largest)

        self._run_part(DRAFT, self._cache_ahead, draft_one)

    def verify(self, model: Any, drafted: int) -> None:
        """Commits the accepted tokens of at most `drafted` ones, and one more token.

        Raises CannotBeCaptured as `DecodeStep.verify` does.
        """
        width = drafted + 1
        self._run_part(width, self._caches[width], lambda: self._verify(model, width))

    # ---- what is captured

    def _choose_draft(self, logits: Tensor, largest: Callable[[Tensor], Tensor] = _largest) -> None:
        """Chooses the next drafted token from [rows, vocabulary]."""
        scores = logits if self.takes_largest else self._processed_at(logits, self.drafted, self._processors)
        if self.key.samples:
            probabilities = torch.softmax(scores, dim=-1)
            self.draft_probabilities.index_copy_(1, self.drafted.view(1), probabilities.unsqueeze(1))
            tokens = speculative_search.draw(
                probabilities, speculative_search.random_numbers(len(scores), 0, self.device)[1]
            )
        else:
            tokens = (largest if self.takes_largest else _largest)(scores)
        if self.key.draft.is_rated:
            ratings = torch.softmax(scores, dim=-1).gather(1, tokens.unsqueeze(1))
            self._ratings.index_copy_(1, self.drafted.view(1), ratings)
        self.search.draft(tokens, self.drafted)
        self.drafted.add_(1)

    def _verify(self, model: Any, width: int) -> None:
        logits = self._logits(model, self._caches[width], 0, width)
        self.record(logits, 1)
        scores = self._all_processed(logits)
        self.record(scores, 0)
        if self.key.samples:
            chosen = self._accept_sampled(scores, self.search.following(1, width - 1))
            self.search.commit(chosen, None, self.accepted, None, self.near_ties)
        else:
            chosen, near = best_tokens(scores, self._products)
            self.search.commit(chosen, self.counts, self.accepted, near, self.near_ties)
        self._advance()
        self.drafted.zero_()
        self._flag.send(self.search.done)

    def _advance(self) -> None:
        """Advances the rows by the number of tokens that the search has taken."""
        self._buffers.advance(None, self.search.taken.view(-1))

    def _accept_sampled(self, scores: Tensor, drafted: Tensor) -> Tensor:
        rows, width, _ = scores.shape
        probabilities = torch.softmax(scores, dim=-1)
        numbers = speculative_search.random_numbers(rows, width - 1, self.device)
        q = self.draft_probabilities[:, : width - 1] if self.key.draft.samples else None
        accepted, token = speculative_search.accept_sampled(drafted, q, probabilities, self.counts, *numbers)
        self.accepted.copy_(accepted)
        # A NaN score makes its whole position NaN. Nothing is accepted there, so it is the last position that is drawn
        # from. Later positions belong to tokens that plain generation may never meet.
        last = probabilities[:, :, 0].gather(1, accepted.unsqueeze(1)).squeeze(1)
        self.search.has_nan.logical_or_((last.isnan() & self.search.unfinished.view(-1)).any())
        none = torch.zeros_like(drafted[:, :1]) if width > 1 else accepted.new_zeros(rows, 1)
        return torch.cat([drafted, none], dim=1).scatter(1, accepted.unsqueeze(1), token.unsqueeze(1))

    def _logits(self, model: Any, cache: Any, ahead: Tensor | int, width: int) -> Tensor:
        """Returns the logits after `width` tokens from the last one on, skipping `ahead`: [rows, width, vocabulary]."""
        inputs = dict(self._buffers.inputs)
        for name in POSITIONS:
            if name in inputs:
                inputs[name] = self._positions_of(inputs[name], ahead, width)
        for name in TOKEN_TYPES:
            if name in inputs:
                inputs[name] = inputs[name].expand(-1, width)
        return self._forward(model, cache, self.search.following(ahead, width), inputs, width)

    def _positions_of(self, last: Tensor, ahead: Tensor | int, width: int) -> Tensor:
        """Returns positions, [rows, width], from those of the last tokens, [rows, 1], within plain decoding's range.

        What a row drafts beyond its limit does not count, but a model may have no position for it, nor for tokens
        before a row that has ended long ago.
        """
        left = (self.search.limit - self.search.length - 1).view(-1, 1)
        positions = last + ahead + torch.arange(width, device=self.device)
        return torch.minimum(positions, last + left).clamp(min=0)

    def _all_processed(self, logits: Tensor) -> Tensor:
        """Returns the scores for the token after each position, [rows, positions, vocabulary], float32.

        Processors that only read scores, and come after all others, process all positions at once. The result may share
        the memory of the logits.
        """
        scores, processors = logits.float(), self._processors
        number = next((n for n in range(len(processors), 0, -1) if not processors[n - 1].reads_scores_alone), 0)
        if number:
            positions = [self._processed_at(logits[:, at], at, processors[:number]) for at in range(logits.shape[1])]
            # A single position is not copied, because it may be a greedy LM head (`fastgen.decoding.lm_head`).
            scores = torch.stack(positions, dim=1) if len(positions) > 1 else positions[0].unsqueeze(1)
        found = scores.flatten(0, 1)
        for processor in processors[number:]:
            found = processor(found, StepTokens.of(self.search))
        return found.view(scores.shape)

    def _processed_at(self, logits: Tensor, ahead: Tensor | int, processors: Sequence[CapturedProcessor]) -> Tensor:
        """Returns the scores with `ahead` drafted tokens after the end of each row, [rows, vocabulary], float32."""
        scores = logits.float()
        if processors:
            tokens = StepTokens.of(self.search, ahead)
            for processor in processors:
                scores = processor(scores, tokens)
        return scores

    def record(self, given: Tensor, place: int) -> None:
        """Keeps scores (0) or logits (1), [rows, positions, vocabulary], for a call that returns them."""
        if self.key.draft.records:
            self.recorded[:, : given.shape[1], place].copy_(given)


# ---- rows that share the tokens of a verify


def may_share(key: Key, device: torch.device) -> bool:
    """Whether steps of this key can verify different numbers of tokens of each row."""
    is_plain = not (key.samples or key.processors or key.encoder or any(key.windows) or key.draft.records)
    return device.type == "cpu" and key.rows > 1 and is_plain and not {*POSITIONS}.isdisjoint(key.tensors)


class RaggedDrafting(Drafting):
    """Verifies a total number of drafted tokens over all rows, so that the rows with the best drafts get more.

    A row without a draft has one token, and a finished row has none. Serves greedy search on a CPU with drafts that are
    found in a text, which rows have at different times.
    """

    def __init__(self, step: DecodeStep, prompt: Prompt) -> None:
        super().__init__(step, prompt)
        self._of_tokens: dict[int, tuple[RaggedState, Any]] = {}
        self._length_by_tokens = torch.zeros_like(self._cache_length)

    def verify(self, model: Any, drafted: int) -> None:
        if not drafted:
            super().verify(model, 0)
            return
        state, cache = self._with_tokens(self.key.rows + drafted)
        unfinished = self.search.unfinished.flatten().tolist()
        state.spread(
            [count + 1 if goes_on else 0 for count, goes_on in zip(self.counts.tolist(), unfinished, strict=True)]
        )
        self._run_part(drafted + 1, cache, lambda: self._verify_tokens(model, state, cache))

    def _with_tokens(self, tokens: int) -> tuple[RaggedState, Any]:
        if tokens not in self._of_tokens:
            state = RaggedState(tokens, self._buffers.position)
            own = [kv.view(state) for kv in self._buffers.own]
            prefix = self._buffers.sizes.cached
            bounds = prefix, prefix + self._buffers.position.capacity
            self._of_tokens[tokens] = state, cache_of(own, [], SymbolicLength.of(self._length_by_tokens, *bounds))
        return self._of_tokens[tokens]

    def _verify_tokens(self, model: Any, state: RaggedState, cache: Any) -> None:
        state.locate()
        # Models' masks are for the longest row, and hide nothing that attention would not exclude by itself.
        self._length_by_tokens.copy_(self._cache_length + self.key.width - 1)
        logits = self._forward(model, cache, self._ids_of(state), self._inputs_of(state), 1)
        chosen, near = (self._by_row(found, state) for found in best_tokens(logits.float(), self._products))
        self.search.commit(chosen, self.counts, self.accepted, near, self.near_ties)
        self._advance()
        self._flag.send(self.search.done)

    def _ids_of(self, state: RaggedState) -> Tensor:
        at = self.search.length.view(-1) - 1
        return self.search.running_tokens[state.row_map, at[state.row_map] + state.offsets].unsqueeze(1)

    def _inputs_of(self, state: RaggedState) -> dict[str, Tensor]:
        found = {name: buffer.index_select(0, state.row_map) for name, buffer in self._buffers.inputs.items()}
        left = (self.search.limit - self.search.length - 1).view(-1)[state.row_map]
        for name, given in found.items():
            if name in POSITIONS:
                found[name] = given + torch.minimum(state.offsets, left).unsqueeze(1)
            elif self.key.is_sequences_mask(name):
                own = self._buffers.sizes.cached + state.position.unsqueeze(1)
                found[name] = given.masked_fill(torch.arange(given.shape[1], device=self.device) > own, 0)
        return found

    def _by_row(self, found: Tensor, state: RaggedState) -> Tensor:
        """Returns [rows, width] from [tokens, 1], with zeros for positions without a token."""
        none = found.new_zeros(self.key.rows, self.key.width)
        return none.index_put((state.row_map, state.offsets), found.squeeze(1))


# ---- drafts by another model, on the sequences of the step that verifies


class AssistantDrafting(Drafting):
    """Drafts with a KV cache of its own.

    The cache lacks K and V of the last drafted token, and of tokens that came without a draft. So the first step of a
    draft reads the last two tokens. If more are missing, earlier steps store them. The sequences are those of the step
    that verifies, to which `of` belongs.
    """

    def __init__(self, step: DecodeStep, prompt: Prompt, of: Drafting) -> None:
        super().__init__(step, prompt)
        self.drafted, self.draft_probabilities = of.drafted, of.draft_probabilities
        self.costs = of.costs
        self._back, self._back_length = self._buffers.position.beside(2), torch.zeros_like(self._cache_length)
        self._offset = torch.zeros_like(self.drafted)
        self._cache_back = self._cache_at(self._back, self._back_length)
        self._behind = 1  # maximum number of tokens before the last one that are not stored

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._behind = 1

    def propose(self, model: Any, count: int, threshold: float) -> Tensor:
        """Drafts at most `count` tokens per row, up to the first of less than `threshold`. Returns numbers, [rows]."""
        while self._behind > 1:
            self._offset.fill_(-self._behind)
            self._run_part(_STORE, self._cache_back, lambda: self._store(model))
            self._behind = max(self._behind - 2, 1)
        self._offset.fill_(-1)
        self._run_part(_FIRST, self._cache_back, lambda: self._choose_draft(self._store(model)[:, -1]))
        drafted = 1
        while drafted < count and not (threshold and self._all_doubt(drafted, threshold)):
            self.draft(model, nullcontext)
            drafted += 1
        counts = torch.full_like(self.search.length.view(-1), drafted)
        return speculative_search.confident(self._ratings[:, :drafted], counts, threshold) if threshold else counts

    def _all_doubt(self, drafted: int, threshold: float) -> bool:
        """Whether each unfinished row has a drafted token whose probability is less than `threshold`."""
        doubts = (self._ratings[:, :drafted] < threshold).any(dim=1)
        return bool((doubts | ~self.search.unfinished.view(-1)).all())

    def follow(self, has_drafted: bool) -> None:
        """Advances to the new ends of the sequences."""
        self._behind = 1 if has_drafted else self._behind + 1
        self._run_part(_ADVANCE, self._cache_back, self._advance)

    def _store(self, model: Any) -> Tensor:
        """Stores K and V of two tokens, from `_offset` (negative) after the last one on. Returns their logits."""
        self._back.position_table.copy_(self._buffers.position.position_table[:3] + self._offset)
        self._back_length.copy_(self._cache_length + self._offset)
        return self._logits(model, self._cache_back, self._offset, 2)
