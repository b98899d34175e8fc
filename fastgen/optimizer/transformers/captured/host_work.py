"""What the host does between the pieces of a step: processors, stopping criteria, and what the call returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastgen.decoding.captured.part import Piece
from fastgen.decoding.captured.search import Search
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.key import Host, Key

# What a search chooses from, and whether it has to be normalised: the arguments of its `propose`.
Scores = tuple[Tensor, bool]


class HostWork:
    """Cuts a step into pieces, and has the buffers between them and the host.

    Args:
        vocabulary: scores of each row.
    """

    def __init__(self, key: Key, vocabulary: int, buffers: StepBuffers, search: Search) -> None:
        self._buffers, self._search = buffers, search
        self._has_criteria, self._has_processors = key.has_criteria, key.processors is None
        size = key.rows, vocabulary
        self.scores = torch.zeros(size if self._has_processors else (0,), device=buffers.device)
        self.kept = {name: torch.zeros(size, device=buffers.device) for name in key.kept}
        self._proposal: tuple[Tensor, ...] = ()
        self._stops = torch.zeros(0, dtype=torch.bool, device=buffers.device)
        self._last: Tensor | None = None  # what a criterion has written in the place of the last tokens

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
        """Goes on where another one is, of a step of the same key."""
        if not self._proposal and other._proposal:
            self._make_proposal(other._proposal)

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
        self._stops = torch.zeros(like[0].numel(), dtype=torch.bool, device=self._buffers.device)

    def _take(self, end: Callable[[], None]) -> None:
        self._search.take(self._proposal, self._stops)
        end()

    # ---- what the host does, after `done` tokens

    def _process(self, host: Host, done: int) -> None:
        search, rows = self._search, self._buffers.rows
        sequences = search.running_tokens[:rows, self._buffers.start : search.prompt_capacity + done]
        # Copies, as in the library's loop every step has tensors of its own: a processor may keep them.
        given = sequences.clone()
        self.scores[:rows] = host.process(given, self.scores[:rows].clone())
        if not torch.equal(sequences, given):  # somebody has written there, which counts in the library's loop, too
            sequences.copy_(given)

    def _keep(self, host: Host, done: int) -> None:
        host.keep({name: buffer[: self._buffers.rows].clone() for name, buffer in self.kept.items()})

    def _stop(self, host: Host, done: int) -> None:
        self._keep(host, done)
        search, start, end = self._search, self._buffers.start, self._search.prompt_capacity + done
        tokens = search.proposed(self._proposal, self._buffers.present, start, end)
        given = tokens.clone()
        stops = host.stops(given)
        self._stops[: stops.shape[0]] = stops
        if not torch.equal(tokens, given):
            search.running_tokens[: len(given), start:end] = given[:, :-1]
            self._last = given[:, -1]

    def _write_last(self, host: Host, done: int) -> None:
        """The token that a criterion has written: what it was decides whether the sequence ends."""
        if self._last is not None:
            rows, end = len(self._last), self._search.prompt_capacity + done
            self._search.running_tokens[:rows, end] = self._search.tokens.view(-1)[:rows] = self._last
            self._last = None
