"""What the host does at each position: stopping criteria, the streamer, and returned scores.

In plain generation, all rows are at the same position in each step. Here, each row advances by its own number of
tokens, so a position is handled once the last row has reached it. Every call is then made as often, in the same order
and with the same contents as in plain generation. A row that a criterion ends there loses the tokens after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.optimizer.transformers.speculation.drafting import Drafting

# Scores and logits of the positions so far, each [rows, vocabulary]; None for those that the call does not return.
Records = tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]


class Positions:
    """The positions of one call that all rows have reached.

    Args:
        rows: number of sequences of the call.
        stops: tells from tokens, [rows, length], and the scores so far which sequences end, [rows], bool; None if only
            end tokens and lengths end sequences.
        put: receives the tokens of a position, [rows]; None without a streamer.
        ends_singly: a sequence that ends is padded. Otherwise all continue until each has met a criterion.
        records: whether scores, and whether logits are returned.
    """

    def __init__(
        self,
        rows: int,
        stops: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor] | None,
        put: Callable[[Tensor], None] | None,
        ends_singly: bool,
        records: tuple[bool, bool],
    ) -> None:
        self._rows, self._stops, self._put, self._ends_singly = rows, stops, put, ends_singly
        self._has_stopped = torch.zeros(rows, dtype=torch.bool)
        self._keeps = any(records)
        self._records: list[tuple[Tensor, ...] | None] = [() if wanted else None for wanted in records]
        # By row: scores and logits of the tokens after the last position that all rows have reached.
        self._ahead: list[deque[Tensor]] = [deque() for _ in range(rows)]
        self._known: list[int] = []
        self._reached = 0

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self._stops is not None or self._put is not None or self._keeps

    @property
    def records(self) -> Records:
        """The scores and the logits of all positions so far."""
        return self._records[0], self._records[1]

    def take(self, drafting: Drafting) -> None:
        """Handles the positions due after the first token or a verify. May end rows of the step."""
        search = drafting.search
        if not self._known:
            self._reached = search.prompt_capacity
            self._known = [self._reached] * self._rows
        self._keep_scores(drafting)
        due = self._due(drafting)
        while self._reached < due:
            self._reached += 1
            self._note_scores()
            if self._stops is not None:
                start = int(search.start.flatten()[0])
                tokens = search.running_tokens[: self._rows, start : self._reached]
                self._end(drafting, self._stops(tokens.clone(), self._records[0]))
            if self._put is not None:
                self._put(search.running_tokens[: self._rows, self._reached - 1].cpu())
            due = self._due(drafting)

    def _due(self, drafting: Drafting) -> int:
        """Returns the length that all unfinished rows have reached."""
        lengths = drafting.search.length.flatten()[: self._rows]
        unfinished = drafting.search.unfinished.flatten()[: self._rows]
        return int(lengths[unfinished].amin() if bool(unfinished.any()) else lengths.amax())

    def _end(self, drafting: Drafting, stops: Tensor) -> None:
        """Ends the rows of `stops`, [rows], bool, at the present position."""
        self._has_stopped |= stops.cpu()
        if not self._ends_singly:
            stops = torch.full_like(stops, bool(self._has_stopped.all()))
        search = drafting.search
        lengths, unfinished = search.length.flatten(), search.unfinished.flatten()
        ending = torch.zeros_like(unfinished)
        ending[: self._rows] = stops
        ending &= (lengths > self._reached) | ((lengths == self._reached) & unfinished)
        if bool(ending.any()):
            drafting.end(ending, self._reached)

    def _keep_scores(self, drafting: Drafting) -> None:
        """Keeps scores and logits of the tokens that the rows have just taken."""
        if not self._keeps:
            return
        for row, end in enumerate(drafting.search.length.flatten()[: self._rows].tolist()):
            self._ahead[row].extend(drafting.recorded[row, : max(end - self._known[row], 0)].clone().unbind())
            self._known[row] = end

    def _note_scores(self) -> None:
        if not self._keeps:
            return
        both = torch.stack([ahead.popleft() for ahead in self._ahead], dim=1)
        self._records = [
            None if kept is None else (*kept, part.clone()) for kept, part in zip(self._records, both, strict=True)
        ]
