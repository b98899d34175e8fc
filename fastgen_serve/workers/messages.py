"""The messages between the server and a model's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen_serve.errors import ServeError
from fastgen_serve.jobs import Delta, Encode, Encoded, Generate, Generated, ModelInfo, Transcribe, Transcribed

# ---- to the process


@dataclass(frozen=True)
class Submit:
    """Run this job. `number` identifies the request in the answers."""

    number: int
    job: Generate | Transcribe | Encode


@dataclass(frozen=True)
class Cancel:
    """Cancel a request."""

    number: int


@dataclass(frozen=True)
class AskStats:
    """Report statistics."""

    number: int


@dataclass(frozen=True)
class Stop:
    """End at once."""


# ---- from the process


@dataclass(frozen=True)
class Progress:
    """The stage of loading, in a few words."""

    text: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded and warmed up."""

    info: ModelInfo


@dataclass(frozen=True)
class Broken:
    """The model cannot be loaded, and a retry would not help."""

    reason: str


@dataclass(frozen=True)
class Update:
    """New tokens of a request."""

    number: int
    delta: Delta


@dataclass(frozen=True)
class Done:
    """The result of a request."""

    number: int
    result: Generated | Transcribed | Encoded


@dataclass(frozen=True)
class Failure:
    """The error of a request."""

    number: int
    error: ServeError


@dataclass(frozen=True)
class Stats:
    """Statistics."""

    number: int
    values: dict[str, Any]


Answer = Update | Done | Failure | Stats
