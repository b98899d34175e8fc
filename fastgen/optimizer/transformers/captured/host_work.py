"""What the host does between the pieces of a step: processors, stopping criteria, and what the call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.captured.part import Piece
from fastgen.decoding.captured.search import Search
from fastgen.optimizer.transformers.captured.key import Host, Key

# What a search chooses from, and whether it has to be normalised: the arguments of its `propose`.
Scores = tuple[Tensor, bool]


class Turn(NamedTuple):
    """Some inputs of a step, next to each other and as long as each other, and what the host does for them."""

    host: Host
    inputs: slice
    start: int  # where their sequences begin and end in the buffers of the search
    end: int


class HostWork:
    """Cuts a step into pieces, and has the buffers between them and the host.

    Args:
        vocabulary: scores of each row.
    """

    def __init__(self, key: Key, vocabulary: int, search: Search) -> None:
        self._search, self._per_input = search, key.per_input
        self._device = device = search.tokens.device
        self._has_criteria, self._has_processors = key.has_criteria, key.processors is None
        size = key.rows, vocabulary
        self.scores = torch.zeros(size if self._has_processors else (0,), device=device)
        self.kept = {name: torch.zeros(size, device=device) for name in key.kept}
        self._proposal: tuple[Tensor, ...] = ()
        self._stops = torch.zeros(0, dtype=torch.bool, device=device)
        self._written: list[tuple[slice, int, Tensor]] = []  # what criteria have written over the last tokens

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.kept.values(), self.scores, *self._proposal))

    def pieces(
        self, put_scores: Callable[[], None], scores: Callable[[], Scores], end: Callable[[], None]
    ) -> list[Piece]:
        """A step from the logits to the chosen tokens, and what ends it; cut where the host does something.

        Args:
            put_scores: has `self.scores` hold what processors on the host get.
            scores: what the search chooses from.
        """
        pieces: list[Piece] = []
        if self._has_processors:
            pieces.append((put_scores, self._process))
        if self._has_criteria:
            pieces.append((partial(self._put_proposal, scores), self._stop))
            pieces.append((partial(self._take, end), self._write_last))
        else:
            pieces.append((partial(self._choose, scores, end), self._keep if self.kept else None))
        return pieces

    def keep(self, name: str, made: Tensor) -> None:
        """For the host, if the call returns it. Is captured."""
        if name in self.kept:
            self.kept[name].copy_(made)

    def take_over(self, other: HostWork) -> None:
        """Goes on where another one is, of a step of the same key, but maybe for another number of inputs."""
        if not self._proposal and other._proposal:
            times = len(self._search.length), len(other._search.length)
            sizes = [(part.shape[0] * times[0] // times[1], *part.shape[1:]) for part in other._proposal]
            like = zip(other._proposal, sizes, strict=True)
            self._make_proposal(tuple(part.new_empty(size) for part, size in like))

    # ---- what is captured

    def _choose(self, scores: Callable[[], Scores], end: Callable[[], None]) -> None:
        self._search.choose(*scores())
        end()

    def _put_proposal(self, scores: Callable[[], Scores]) -> None:
        proposal = self._search.propose(*scores())
        if not self._proposal:  # for the first token, which is not captured
            self._make_proposal(proposal)
        for buffer, part in zip(self._proposal, proposal, strict=True):
            buffer.copy_(part)

    def _make_proposal(self, like: tuple[Tensor, ...]) -> None:
        self._proposal = tuple(torch.zeros_like(part) for part in like)
        self._stops = torch.zeros(like[0].numel(), dtype=torch.bool, device=self._device)

    def _take(self, end: Callable[[], None]) -> None:
        self._search.take(self._proposal, self._stops)
        end()

    # ---- what the host does

    def _rows(self, inputs: slice) -> slice:
        return slice(inputs.start * self._per_input, inputs.stop * self._per_input)

    def _process(self, turns: Sequence[Turn]) -> None:
        for host, inputs, start, end in turns:
            rows = self._rows(inputs)
            sequences = self._search.running_tokens[rows, start:end]
            # Copies, as in the library's loop every step has tensors of its own: a processor may keep them.
            given = sequences.clone()
            self.scores[rows] = host.process(given, self.scores[rows].clone())
            if not torch.equal(sequences, given):  # somebody has written there, which counts in the library's loop, too
                sequences.copy_(given)

    def _keep(self, turns: Sequence[Turn]) -> None:
        for host, inputs, *_ in turns:
            host.keep({name: buffer[self._rows(inputs)].clone() for name, buffer in self.kept.items()})

    def _stop(self, turns: Sequence[Turn]) -> None:
        self._keep(turns)
        search, self._written = self._search, []
        stops = self._stops.view(len(search.length), -1)
        for host, inputs, start, end in turns:
            tokens = search.proposed(self._proposal, inputs, start, end)
            given = tokens.clone()
            stops[inputs] = host.stops(given).view_as(stops[inputs])
            if not torch.equal(tokens, given):
                rows = self._rows(inputs)
                search.running_tokens[rows, start:end] = given[:, :-1]
                self._written.append((rows, end, given[:, -1]))

    def _write_last(self, turns: Sequence[Turn]) -> None:
        """The token that a criterion has written: what it was decides whether the sequence ends."""
        for rows, end, tokens in self._written:
            self._search.running_tokens[rows, end] = self._search.tokens.view(-1)[rows] = tokens
