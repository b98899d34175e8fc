"""The data of the stages before the model: rows as they are stored, and the records made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Result = dict[str, Any]
"""One record as the journal holds it: `position`, `line` and `id`, and either `text` and what belongs to it, or
`error` (the kind) and `message`."""


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
    """One input. `position` counts records from 0; `line` is its line or row in the file, counted from 1."""

    position: int
    line: int
    id: Any
    text: str
    reference: str | None = None
    pair: str | None = None
    """The second text, for a command that takes two."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A conversation, of which `text` is the last message."""
    kept: tuple[Any, ...] | None = None
    """The values of the columns to keep, in their order."""

    def skipped(self, problem: Problem) -> BadRecord:
        return BadRecord(self.position, self.line, self.id, problem)


@dataclass(frozen=True)
class BadRecord:
    """An input that is skipped."""

    position: int
    line: int
    id: Any
    problem: Problem

    @classmethod
    def of(cls, result: Result) -> BadRecord:
        return cls(result["position"], result["line"], result["id"], Problem(result["error"], result["message"]))

    def result(self) -> Result:
        named = {"position": self.position, "line": self.line, "id": self.id}
        return named | {"error": self.problem.kind, "message": self.problem.message}
