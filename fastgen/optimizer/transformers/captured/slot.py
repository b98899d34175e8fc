"""An input that enters a step while others continue, and what belongs to it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.optimizer.transformers.captured.forms import FormMask, FormProcessor
from fastgen.optimizer.transformers.captured.host import Host
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.slot_drafts import SlotDrafts


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
