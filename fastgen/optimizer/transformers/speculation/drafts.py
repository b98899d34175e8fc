"""The drafts of tokens: the model itself with low-bit weights or fewer layers, prompt lookup, or another model.

What drafts need is made step by step, in calls that do not draft yet. Recording a part of a step takes as long as about
twenty steps, a step with drafts has five parts, and the weights are copied, too. A call that made everything would take
twice as long as a plain one. So a call makes at most one item, and all items together take a tenth of the time of the
tokens that calls have asked for (at most 64 of each call that may end earlier).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import settings
from fastgen.decoding.guards import GuardedModel
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.speculation.draft_length import AT_FIRST, DRAFT
from fastgen.decoding.speculation.draft_sources import BOUNDARY, DraftWeights, OtherLogits, PromptLookup
from fastgen.interrupts import cached_property, undoing
from fastgen.optimizer.transformers.call import LINEAR_LAYERS, Call, fast_layers
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.pays import Budget
from fastgen.optimizer.transformers.speculation.drafting import LENGTHS, Drafting


class Draft:
    """Drafts tokens for the rows of one call. If it does not serve the call, `make` or `begin` raise CannotBeCaptured.

    Attributes:
        is_model: it draws its tokens if the model does.
        has_buffers: it works on the step's own buffers, so that no other step may replace the step later.
        schedule: chooses how many tokens to draft, if the user has set it.
        threshold: a draft ends with the first token to which the drafting model gives a lower probability.
        is_prepared: what it needs is made step by step, in earlier calls (`make_next`).
        recorded_at_once_from: a number of tokens, if the call itself requests the draft. A call of at least this many
            tokens records a step whether or not others follow, and takes about as long as a plain call without one.
    """

    is_model = True
    is_prepared = False
    recorded_at_once_from: int | None = None
    schedule: Schedule | None = None
    threshold: float = 0.0
    has_buffers = False

    @property
    def kind(self) -> Hashable:
        """The properties of the draft that are frozen in a captured step."""
        raise NotImplementedError

    def ready(self) -> AbstractContextManager[Any]:
        """Returns a context to enter before the call takes its turn, because entering may wait for other threads."""
        return contextlib.nullcontext()

    def make(self, seconds: float) -> bool:
        """Makes what it drafts with, for about this many seconds. Returns whether everything is made."""
        return True

    def begin(self, drafting: Drafting, decoding: Any) -> None:
        """Begins the call, a `SpeculativeDecoding`, before its prompt is in the step."""

    def available(self, drafting: Drafting, rows: Sequence[int], most: int) -> list[int] | None:
        """Returns how many tokens there are for each row, at most `most`; None for as many as wanted."""
        return None

    def cut(self, counts: Sequence[int]) -> None:
        """Has `propose` use so many of the available tokens of each of these rows."""
        raise NotImplementedError

    def propose(self, drafting: Drafting, model: Any, count: int) -> None:
        """Writes `count` tokens, or those available, after each row, and their numbers to `drafting.counts`."""
        raise NotImplementedError

    def hits(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns for each row whether a token was available, and whether the first was the one that came; as 0 or 1.

        To be called after an iteration without a draft.
        """
        raise NotImplementedError

    def take(self, drafting: Drafting, lengths: Sequence[int]) -> None:
        """Notes the rows' new lengths, after the first token is chosen or a draft is verified."""

    def end(self) -> None:
        """Ends a call in which nothing has failed."""


class SelfDraft(Draft):
    """The model with low-bit copies of its weights."""

    is_prepared = True

    def __init__(self, model: Any, precision: str, group_size: int) -> None:
        self._model, self._form = model, (precision, group_size)

    @property
    def kind(self) -> Hashable:
        return "self-draft", *self._form, self._weights.number

    @cached_property
    def _weights(self) -> DraftWeights:
        return DraftWeights.of(self._model, LINEAR_LAYERS, *self._form, self._model.get_output_embeddings())

    def make(self, seconds: float = math.inf) -> bool:
        try:
            return self._weights.copy(seconds)
        except ValueError as error:
            raise CannotBeCaptured(str(error)) from error

    def begin(self, drafting: Drafting, decoding: Any) -> None:
        self.make()
        # Drop steps that drafted with earlier copies, which they would keep alive.
        graph_cache.forget(self._model, self._is_old)

    def _is_old(self, key: Any) -> bool:
        kind: Any = key.draft.kind if key.draft is not None else ()
        own: Any = self.kind
        return bool(kind) and kind[:-1] == own[:-1] and kind[-1] != own[-1]

    def propose(self, drafting: Drafting, model: Any, count: int) -> None:
        weights = self._weights
        weights.copy_head(drafting.takes_largest)
        for _ in range(count):
            try:
                drafting.draft(model, weights.used, weights.argmax)
            except OtherLogits:
                weights.copy_head(drafting.takes_largest)
                drafting.draft(model, weights.used, weights.argmax)
        drafting.counts.fill_(count)


class EarlyExitDraft(Draft):
    """The first layers of the model, and its LM head (`assistant_early_exit` of `generate`)."""

    recorded_at_once_from = 128

    def __init__(self, model: Any, count: int) -> None:
        self._base, self._count = getattr(model, model.base_model_prefix), count

    @property
    def kind(self) -> Hashable:
        return "early exit", self._count

    def propose(self, drafting: Drafting, model: Any, count: int) -> None:
        for _ in range(count):
            drafting.draft(model, self._with_few_layers)
        drafting.counts.fill_(count)

    @contextlib.contextmanager
    def _with_few_layers(self) -> Iterator[None]:
        config = self._base.config
        with undoing(partial(setattr, config, "num_hidden_layers", config.num_hidden_layers)):
            config.num_hidden_layers = self._count
            yield


class LookupDraft(Draft):
    """The tokens that followed an earlier occurrence of the last tokens (`prompt_lookup_num_tokens` of `generate`).

    Args:
        most: maximum length of a draft.
        max_ngram: maximum number of last tokens to look up.
        source: [inputs, length]: tokens of an encoder's input, including `padding`.
    """

    kind = "tokens"
    is_model = False
    recorded_at_once_from = 64

    def __init__(self, most: int, max_ngram: int, source: Tensor | None = None, padding: int | None = None) -> None:
        self._most, self._max_ngram, self._source, self._padding = most, max_ngram, source, padding
        self._known: list[int] = []
        self._proposed: dict[int, list[int]] = {}
        self._hits: dict[int, bool] = {}

    def begin(self, drafting: Drafting, decoding: Any) -> None:
        self._index = PromptLookup(drafting.key.rows, self._max_ngram, self._most, decoding.prompt.eos)
        self._known = []
        for number, tokens in enumerate([] if self._source is None else self._source.tolist()):
            # An encoder may have tokens that the decoder's vocabulary lacks.
            source = [token if token < drafting.vocabulary else BOUNDARY for token in tokens if token != self._padding]
            for row in range(number * drafting.key.per_input, (number + 1) * drafting.key.per_input):
                self._index.append(row, [*source, BOUNDARY])

    def available(self, drafting: Drafting, rows: Sequence[int], most: int) -> list[int]:
        self._proposed = {row: self._index.propose(row, most)[0] for row in rows}
        return [len(self._proposed[row]) for row in rows]

    def cut(self, counts: Sequence[int]) -> None:
        pairs = zip(self._proposed.items(), counts, strict=True)
        self._proposed = {row: tokens[:count] for (row, tokens), count in pairs}

    def propose(self, drafting: Drafting, model: Any, count: int) -> None:
        most = max(map(len, self._proposed.values()))
        drafted, counts = torch.zeros(drafting.key.rows, most, dtype=torch.int64), [0] * drafting.key.rows
        for row, tokens in self._proposed.items():
            counts[row] = len(tokens)
            drafted[row, : len(tokens)] = torch.tensor(tokens)
        drafting.put_draft(drafted, torch.tensor(counts))

    def take(self, drafting: Drafting, lengths: Sequence[int]) -> None:
        if not self._known:
            self._known = (drafting.search.prompt_capacity - drafting.prompt_lengths).tolist()
        self._hits = {}
        for row, begin in enumerate(self._known):  # further rows only fill the batch
            if lengths[row] > begin:
                tokens = drafting.search.tokens_of(row, begin, lengths[row])
                if proposed := self._proposed.get(row):
                    self._hits[row] = proposed[0] == tokens[0]
                self._index.append(row, tokens)
                self._known[row] = lengths[row]

    def hits(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        return [int(row in self._hits) for row in rows], [int(self._hits.get(row, False)) for row in rows]


class Schedule:
    """Transformers' `num_assistant_tokens_schedule`, in place of `DraftLength`.

    "heuristic" and "heuristic_transient" add two tokens after an iteration in which every row that had drafted tokens
    accepted all of them, and subtract one after any other. All others, such as "constant", keep the number. After a
    "heuristic" call the library writes `length` back for the next call.

    Args:
        length: number of tokens to draft: `num_assistant_tokens`. The defaults are the library's.
    """

    def __init__(self, length: int = 20, name: str = "constant") -> None:
        self.length, self._adapts = length, name in ("heuristic", "heuristic_transient")

    def choose(self, rows: Sequence[int], most: int, available: Sequence[int] | None = None) -> int:
        """Returns the number of tokens to draft: the next shorter length."""
        return max((k for k in LENGTHS if k <= min(self.length, most)), default=0)

    def observe(self, rows: Sequence[int], length: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Adapts the length to the result of an iteration, by rows."""
        if self._adapts and any(drafted):
            all_accepted = all(kept == count for count, kept in zip(drafted, accepted, strict=True))
            self.length = self.length + 2 if all_accepted else max(1, self.length - 1)


class AssistantDraft(Draft):
    """Another model with the same vocabulary (`assistant_model` of `generate`).

    Args:
        threshold: a draft ends with the first token that the assistant gives a lower probability; 0 for none.
        source: what an encoder reads, [inputs, ...]. The assistant's own encoder runs once in each call.
    """

    recorded_at_once_from = 128
    has_buffers = True

    def __init__(
        self, assistant: Any, schedule: Schedule | None, threshold: float = 0.0, source: Tensor | None = None
    ) -> None:
        self._assistant, self.schedule, self.threshold, self._source = assistant, schedule, threshold, source

    @property
    def kind(self) -> Hashable:
        return "an assistant", id(self._assistant)

    def ready(self) -> AbstractContextManager[Any]:
        return fast_layers(self._assistant)  # `begin` enters it again, without waiting

    def begin(self, drafting: Drafting, decoding: Any) -> None:
        state = GuardedModel.of(self._assistant).check(self._assistant)
        known, kept = drafting.assistant or (None, None)
        with Call(self._assistant, scores_are_private=True, cache_is_the_users=False) as call:
            made = decoding.of_assistant(call, self._source)
            step = made.begin(kept if known == state else None, drafting)
        drafting.assistant, self._own = (state, step), step.drafting
        self._has_drafted = self._is_first = True

    def propose(self, drafting: Drafting, model: Any, count: int) -> None:
        drafting.counts.copy_(self._own.propose(self._assistant, count, self.threshold))
        self._has_drafted = True

    def take(self, drafting: Drafting, lengths: Sequence[int]) -> None:
        if not self._is_first:  # the assistant begins at the first token
            self._own.follow(self._has_drafted)
        self._is_first = self._has_drafted = False

    def end(self) -> None:
        own = self._assistant.generation_config
        if self.schedule is not None and own.num_assistant_tokens_schedule == "heuristic":
            own.num_assistant_tokens = self.schedule.length  # as the library does


def draft_for(call: Call, config: Any) -> Draft | None:
    """Returns the draft of a call; None if it has none."""
    if config.num_beams > 1:
        return None
    if call.draft is not None:
        return call.draft
    now = settings.current()
    if now.self_speculation == "off":
        return None
    return SelfDraft(call.model, now.self_speculation, now.weight_group_size)


def make_next(
    budget: Budget, drafting: Drafting, model: Any, draft: Draft, plain: float, begin: Callable[[], None]
) -> bool:
    """Makes one more item, if one is missing and the budget allows it. Returns whether calls can draft.

    Args:
        plain: seconds of a plain step.
        begin: begins a call in the step, of which nothing is kept.
    """
    # Parts by number of positions that they verify. Calls draft once the parts in `needed` have been measured.
    lengths = drafting.lengths
    needed, more = (lengths[AT_FIRST] + 1, DRAFT, 1), (lengths[-1] + 1, lengths[1] + 1)
    missing = [part for part in (*needed, *more) if drafting.costs.seconds(part) is None]
    seconds = budget.for_next(plain)
    if missing and seconds is not None:
        start = time.perf_counter()
        is_recorded = missing[0] != DRAFT or draft.make(0.0)
        if is_recorded:
            begin()
            _measure(drafting, model, draft, missing[0])
        else:
            draft.make(seconds)
        budget.spend(time.perf_counter() - start, is_typical=is_recorded)
    return all(drafting.costs.seconds(part) is not None for part in needed)


def _measure(drafting: Drafting, model: Any, draft: Draft, part: int) -> None:
    if part == DRAFT:
        drafting.measure(part, lambda: draft.propose(drafting, model, 1))
    else:
        drafting.measure(part, lambda: drafting.verify(model, part - 1))
