"""The data of a run: a row as it is stored, its record, and the record's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Result = dict[str, Any]
"""One record in the journal: `position`, `line` and `id`, and either `text` and what belongs to it, or `error` (the
kind) and `message`.
"""


@dataclass(frozen=True)
class Problem:
    """Why a record is skipped: a kind, which is a short word for programs, and a message for people."""

    kind: str
    message: str


@dataclass(frozen=True)
class Row:
    """One row as it is stored: its fields, or the problem in reading it. `line` counts from 1."""

    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem | None = None


@dataclass(frozen=True)
class Record:
    """One input, from the reader to the model. `position` counts from 0; `line` is its line or row in the file, from 1.

    A skipped record has a problem, and nothing else beside position, line and id.
    """

    position: int
    line: int
    id: Any
    text: str = ""
    reference: str | None = None
    pair: str | None = None
    """The second text, for a command that takes two."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A conversation, of which `text` is the last message."""
    kept: tuple[Any, ...] | None = None
    """The values of the columns to keep, in their order."""
    problem: Problem | None = None
    """Why it is skipped."""
    ids: Sequence[int] = ()
    """Its tokens, once it has been tokenised."""
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Further model inputs for each token, such as which of two texts it belongs to."""
    truncated: bool = False
    """Whether tokens were cut off, because the model does not take so many."""

    def skipped(self, problem: Problem) -> Record:
        return Record(self.position, self.line, self.id, problem=problem)

    def named(self) -> Result:
        """Returns the beginning of its result."""
        return {"position": self.position, "line": self.line, "id": self.id}

    def error(self) -> Result:
        """Returns the result of a skipped record."""
        assert self.problem is not None
        return self.named() | {"error": self.problem.kind, "message": self.problem.message}
