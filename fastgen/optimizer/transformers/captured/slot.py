"""An input that enters a step while others continue, and the drafts that free rows verify for it.

Each row that verifies is a copy of an input, one drafted token longer than the one before, and shares the input's K and
V. So it is a row of the step like any other: its processors and its draw are those that the input would have after
these tokens, and it chooses what the input would choose. A drafted token is kept if the row before it has chosen the
same token. Greedy or drawn, the tokens are therefore those of a step without drafts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.decoding.speculation.draft_length import Chance, Timings, by_gain
from fastgen.decoding.speculation.draft_sources import BOUNDARY, PromptLookup
from fastgen.optimizer.transformers.captured.choice import Host
from fastgen.optimizer.transformers.captured.forms import FormMask, FormProcessor
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import DecodeStep

# Maximum number of tokens of a draft: their probabilities multiply.
MOST = 15
# The most rows of a step with drafts: beyond these, the time of a step grows in proportion to its rows.
MOST_ROWS = 16
# Initial probabilities that a token is right: if the form of the result forces it, as the model may write the same
# text with other tokens; and after one, two, or three tokens that have occurred before.
_FORCED, _FOUND = 0.9, (0.1, 0.3, 0.6)
# Weight of a verified token in the average of its input, and in that of all inputs.
_WEIGHT, _WEIGHT_FOR_ALL = 0.2, 0.02
# Less likely tokens are not verified: their gain is smaller than the error of the costs.
_LEAST_CHANCE = 0.05
# The assumed part of a step's time that another row adds, until steps were measured.
_SHARE = 0.08
# Drafts are verified if the rate of tokens grows at least by this factor.
_LEAST_GAIN = 1.05


@dataclass(eq=False)
class Slot:
    """An input in a step, or about to enter it.

    Attributes:
        owner: the object that the input belongs to.
        new_tokens: the most tokens that it may generate.
        padding: positions of padding before its prompt in its prefill.
        results: returns its result from a search and its place there.
        host: what the host does for it in each step; None for nothing.
        generator: draws its tokens; None if none are drawn.
        streamer: receives each token, [1], as it comes.
        streams_prompt: the streamer gets the prompt from the slot, because its call has several inputs.
        form: of its result, if the step masks tokens by it.
        are_banned: which of the step's masks it uses (`FormMask`).
        error: what user code has raised, or that its probabilities are NaN.
        certain_tokens: tokens that it generates whatever the model predicts.
        entered: number of steps that had been made when it entered.
        positions, source: stored positions of self-attention, over all its rows, and of cross-attention.
        most_bytes: the most bytes of K, V and states that it may store.
        has_streamed: its streamer has got the prompt from the slot.
        is_over: it has ended.
        drafts: proposes tokens for free rows to verify; None for none.
        undrawn: noise for coming tokens, [vocabulary] each, which rows with rejected drafts have not used.
        taken: tokens that it has got in the latest step.
    """

    owner: Any
    new_tokens: int
    padding: int
    results: Callable[[Search, slice], Any]
    host: Host | None = None
    generator: torch.Generator | None = None
    streamer: Any = None
    streams_prompt: bool = False
    form: FormProcessor | None = None
    are_banned: bool = False
    error: BaseException | None = None
    place: int = field(default=-1, init=False)
    certain_tokens: int = field(default=0, init=False)
    entered: int = field(default=0, init=False)
    positions: int = field(default=0, init=False)
    source: int = field(default=0, init=False)
    most_bytes: int = field(default=0, init=False)
    has_streamed: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)
    drafts: SlotDrafts | None = field(default=None, init=False)
    undrawn: list[Tensor] = field(default_factory=list, init=False)
    taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.host = None if self.host is None else self._protected(self.host)

    def draw(self, noise: Tensor) -> None:
        """Writes the noise of its rows' next token, [rows * vocabulary], if it is drawn."""
        if self.undrawn:
            noise.copy_(self.undrawn.pop(0))
        elif self.generator is not None:
            noise.exponential_(generator=self.generator)

    def mask(self, made: Sequence[CapturedProcessor] | None) -> FormMask:
        """Returns the mask for its form among the processors of a step."""
        masks = (each for each in made or () if isinstance(each, FormMask))
        return next(each for each in masks if each.are_banned == self.are_banned)

    def _protected(self, host: Host) -> Host:
        """Returns a host whose exceptions are noted, and end this input only."""

        def process(tokens: Tensor, scores: Tensor) -> Tensor:
            return self.catch(lambda: host.process(tokens, scores).expand_as(scores), scores)

        def stops(tokens: Tensor) -> Tensor:
            return self.catch(lambda: host.stops(tokens).view(len(tokens)), torch.ones(len(tokens), dtype=torch.bool))

        return Host(process, stops, host.keep)

    def catch(self, run: Callable[[], Any], otherwise: Any = None) -> Any:
        """Returns the result of `run`, or `otherwise` if it raises, or something has raised before."""
        if self.error is not None:
            return otherwise
        try:
            return run()
        except BaseException as error:  # any exception ends only this request
            self.error = error
            return otherwise


# ---- what is drafted


class Chances:
    """The probabilities that drafted tokens are right.

    Attributes:
        forced: of tokens that the form of a result forces.
        found: of tokens after one token that has occurred before, after two, and so on.
    """

    def __init__(self) -> None:
        self.forced, *self.found = (Chance(first, _WEIGHT_FOR_ALL) for first in (_FORCED, *_FOUND))

    def of_input(self) -> Chances:
        """Returns those of another input, which begin with what is known of all inputs."""
        made = Chances()
        made.forced, *made.found = (Chance(each.value, _WEIGHT, of_all=each) for each in (self.forced, *self.found))
        return made


class SlotDrafts:
    """The drafts of an input, one after the other.

    Args:
        most: maximum number of tokens of a draft found in the text; 0 for none.
        max_ngram: maximum number of tokens to find in the earlier text.
        source: the tokens of the encoder's input.
        eos: tokens that end a sequence.
        chances: of all inputs.
    """

    def __init__(self, most: int, max_ngram: int, source: Iterable[int], eos: Iterable[int], chances: Chances) -> None:
        self._most, self._eos, self._chances = min(most, MOST), frozenset(eos), chances.of_input()
        self._lookup = PromptLookup(1, max_ngram, self._most, self._eos)
        self.append([*source, BOUNDARY])

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the sequence."""
        if self._most:
            self._lookup.append(0, tokens)

    def propose(self, form: FormProcessor | None, tokens: Tensor | None) -> tuple[list[int], Chance]:
        """Returns tokens that may follow the sequence, and the probability that each of them is right.

        Args:
            form: of the input's result, if it has one.
            tokens: the input's sequence, [length], if it has a form.
        """
        forced = [] if form is None or tokens is None else form.forced(tokens)[:MOST]
        if forced := list(itertools.takewhile(lambda token: token not in self._eos, forced)):
            return forced, self._chances.forced
        found, size = self._lookup.propose(0, self._most) if self._most else ([], 0)
        return found, self._chances.found[min(max(size, 1), len(self._chances.found)) - 1]


# ---- which drafts are verified


class Draft(NamedTuple):
    """Tokens that may follow the sequence of an input, and the probability that each is right."""

    slot: Slot
    tokens: list[int]
    chance: Chance


class _Verified(NamedTuple):
    draft: Draft
    rows: range


class DraftRows:
    """The drafts of a step. Nothing of them remains between two steps.

    Args:
        seconds: times of the model's steps; None if nothing may depend on a clock.

    Attributes:
        drafted, accepted: numbers of tokens in the latest step.
    """

    def __init__(self, seconds: StepSeconds | None) -> None:
        self._is_timed, self._seconds = seconds is not None, StepSeconds() if seconds is None else seconds
        self._verified: list[_Verified] = []
        self._proposed: list[Draft] = []
        self.drafted = self.accepted = 0

    def note(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a replayed step of this many rows."""
        if self._is_timed:
            self._seconds.note(rows, seconds)

    def put(
        self, step: DecodeStep, slots: Iterable[Slot], taken: int, most: int | None, places: Callable[[], Sequence[int]]
    ) -> int:
        """Puts drafts for these inputs into the slots after those taken. Returns the number of slots in use then.

        Args:
            most: maximum number of drafted tokens; None for no limit.
            places: returns the numbers of slots that steps compute, in order.
        """
        room = min(step.key.batch, MOST_ROWS, MOST_ROWS if most is None else taken + most)
        if taken >= room:
            return taken
        proposed = (self._propose(step, slot) for slot in slots if slot.drafts is not None and slot.error is None)
        self._proposed = [draft for draft in proposed if draft.tokens]
        if not self._proposed:
            return taken
        drafts = [(each.chance.value, len(each.tokens)) for each in self._proposed]
        chosen = counts(drafts, taken, room, self._seconds, places())
        for draft, count in zip(self._proposed, chosen, strict=True):
            if count:
                taken += self._fork(step, draft._replace(tokens=draft.tokens[:count]), taken)
        return taken

    def _propose(self, step: DecodeStep, slot: Slot) -> Draft:
        assert slot.drafts is not None, "as who calls has made sure"
        tokens = None if slot.form is None else step.search.sequences_of(slot.place)[0]
        found, chance = slot.catch(partial(slot.drafts.propose, slot.form, tokens), ([], None))
        if found:  # the last row may choose the last token
            found = found[: int(step.search.limit[slot.place, 0]) - int(step.search.length[slot.place, 0]) - 1]
        return Draft(slot, found, chance)

    def _fork(self, step: DecodeStep, draft: Draft, first: int) -> int:
        """Has rows from `first` on verify a draft. Returns their number."""
        slot, tokens = draft.slot, draft.tokens
        if slot.form is not None:
            forms = slot.catch(partial(slot.form.drafted, step.search.sequences_of(slot.place)[0], tokens), [])
            tokens = tokens[: len(forms)]
        rows = range(first, first + len(tokens))
        if not rows:
            return 0
        where = slice(rows.start, rows.stop)
        step.search.fork(slot.place, where, torch.tensor(tokens))
        step.buffers.fork(slot.place, where)
        for processor in step.processors or ():
            for row in rows:
                processor.insert(processor, slot.place, row)
        if slot.form is not None:
            slot.mask(step.processors).block_behind(forms, first)
        for row in rows if slot.generator is not None else ():
            slot.draw(step.search.noise[row])
        self._verified.append(_Verified(draft._replace(tokens=tokens), rows))
        return len(rows)

    def take(self, step: DecodeStep) -> None:
        """Advances the inputs by the right tokens of their drafts, after the step. Adds the numbers of these tokens to
        the slots' `taken`.
        """
        if not self._proposed:
            return
        chosen = step.search.tokens.tolist()
        for each in self._verified:
            self._keep_right(step, each, chosen)
        if self._verified:
            forks = slice(self._verified[0].rows.start, self._verified[-1].rows.stop)
            step.search.leave(forks)
            step.buffers.empty(forks)
        verified = {each.draft.slot for each in self._verified}
        for draft in self._proposed:
            if draft.slot not in verified:  # learn from the draft that was not verified
                draft.chance.note(1, int(chosen[draft.slot.place] == draft.tokens[0]))
        self._verified, self._proposed = [], []

    def _keep_right(self, step: DecodeStep, verified: _Verified, chosen: list[int]) -> None:
        """Advances an input by those tokens of its draft that the rows before them have `chosen`."""
        draft, rows = verified
        slot, right = draft.slot, 0
        in_front = slot.place, *rows
        while right < len(rows) and chosen[in_front[right]] == draft.tokens[right]:
            right += 1
        if right:
            failed = step.search.nan_inputs[[*in_front[: right + 1]]].any()
            last, own = (slice(place, place + 1) for place in (rows[right - 1], slot.place))
            step.search.insert(step.search, last, own)
            step.search.nan_inputs[own] = failed
            step.buffers.join(last, own)
        if slot.generator is not None:
            slot.undrawn[:0] = [step.search.noise[row].clone() for row in rows[right:]]
        slot.taken += right
        draft.chance.note(len(rows), right)
        self.drafted += len(rows)
        self.accepted += right


class StepSeconds:
    """Times of steps by their number of rows. If nothing may depend on the clock, no measurement is noted."""

    def __init__(self) -> None:
        self._of_rows: defaultdict[int, Timings] = defaultdict(Timings)

    def note(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a step of this many rows."""
        self._of_rows[rows].add(seconds)

    def ratio(self, rows: int, to: int) -> float:
        """Returns the time of a step of `rows` rows relative to one of `to` rows, which is at least 1 if measured."""
        own, others = self._of_rows[rows].seconds(), self._of_rows[to].seconds()
        return 1 + _SHARE * (rows - to) if own is None or others is None else max(own / others, 1.0)


def counts(
    drafts: Sequence[tuple[float, int]], inputs: int, room: int, seconds: StepSeconds, sizes: Sequence[int]
) -> list[int]:
    """Returns how many tokens of each draft to verify: as many as maximize the tokens per second.

    A verified token takes a row. Its value is the probability that it is right, and its cost is the additional time of
    the step. So a step that serves many inputs verifies few drafts, or none.

    Args:
        drafts: the probability of each draft's tokens to be right if those before are, and their number.
        inputs: number of other rows of the step.
        room: the most rows that the step may have in total.
        sizes: numbers of rows that steps have, in order.
    """
    found = [0] * len(drafts)
    likely = [each for each in by_gain((1.0, *draft) for draft in drafts) if each[0] >= _LEAST_CHANCE]
    plain = next(size for size in sizes if size >= inputs)
    gains = [0.0, *itertools.accumulate(gain for gain, _ in likely)]
    best, most = 0, inputs * _LEAST_GAIN
    for size in sizes:
        count = min(size - inputs, len(likely))
        if count > 0 and size <= room:
            rate = (inputs + gains[count]) / seconds.ratio(size, plain)
            best, most = (count, rate) if rate > most else (best, most)
    for _, draft in likely[:best]:
        found[draft] += 1
    return found
