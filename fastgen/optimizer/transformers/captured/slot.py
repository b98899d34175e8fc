"""An input that enters a step while others go on, and what belongs to it alone."""

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
    """An input in a step, or on its way there.

    Attributes:
        owner: whose it is.
        new_tokens: the most that it may generate.
        padding: positions in front of its prompt that its prefill was padded with.
        results: what it returns, of a search and its place there.
        host: what the host does in each step; None if that is nothing.
        generator: what its tokens are drawn with; None where none are.
        streamer: gets each token, [1], as it comes.
        streams_prompt: the streamer gets the prompt here, and not from the call, which is one of several inputs.
        form: of its result, where that is data of the step.
        are_banned: which of the step's masks has it (`FormMask`).
        error: what code of the user's has raised, or that there is nothing to draw from.
        certain_tokens: that it generates whatever the model says.
        entered: steps that had been made when it came.
        positions, source: of self-attention that are stored, of all its rows; and of cross-attention.
        has_streamed: its streamer has got the prompt here.
        is_over: it has come to its end.
        drafts: what may come next, for rows that are free to verify; None for none.
        undrawn: noise of tokens to come, each [vocabulary], which rows have had that verified drafts.
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
    has_streamed: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)
    drafts: SlotDrafts | None = field(default=None, init=False)
    undrawn: list[Tensor] = field(default_factory=list, init=False)
    taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.host = None if self.host is None else self._protected(self.host)

    def draw(self, noise: Tensor) -> None:
        """Puts there what the next token of its rows is drawn with, [rows * vocabulary], where it is drawn at all."""
        if self.undrawn:
            noise.copy_(self.undrawn.pop(0))
        elif self.generator is not None:
            noise.exponential_(generator=self.generator)

    def mask(self, made: Sequence[CapturedProcessor] | None) -> FormMask:
        """That of its form among the processors of a step."""
        masks = (each for each in made or () if isinstance(each, FormMask))
        return next(each for each in masks if each.are_banned == self.are_banned)

    def _protected(self, host: Host) -> Host:
        """The same, where an exception is noted, and ends this input alone."""

        def process(tokens: Tensor, scores: Tensor) -> Tensor:
            return self.catch(lambda: host.process(tokens, scores).expand_as(scores), scores)

        def stops(tokens: Tensor) -> Tensor:
            return self.catch(lambda: host.stops(tokens).view(len(tokens)), torch.ones(len(tokens), dtype=torch.bool))

        return Host(process, stops, host.keep)

    def catch(self, run: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `run` returns; `otherwise` where it raises, or something has raised before."""
        if self.error is not None:
            return otherwise
        try:
            return run()
        except BaseException as error:  # whatever it is, it ends this request alone
            self.error = error
            return otherwise
