"""What the server and the process of a model tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen_serve.errors import ServeError
from fastgen_serve.jobs import Delta, Encode, Encoded, Generate, Generated, ModelInfo, Transcribe, Transcribed

# ---- to the process


@dataclass(frozen=True)
class Submit:
    """Run this. `number` says which request the answers belong to."""

    number: int
    job: Generate | Transcribe | Encode


@dataclass(frozen=True)
class Cancel:
    """Nobody wants the result any more."""

    number: int


@dataclass(frozen=True)
class AskStats:
    """Say what has been done so far."""

    number: int


@dataclass(frozen=True)
class Stop:
    """End, at once."""


# ---- from the process


@dataclass(frozen=True)
class Progress:
    """What loading has come to, in a few words."""

    text: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded and warmed up."""

    info: ModelInfo


@dataclass(frozen=True)
class Broken:
    """The model cannot be loaded: to try again is of no use."""

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
    """What a request has failed with."""

    number: int
    error: ServeError


@dataclass(frozen=True)
class Stats:
    """What has been done so far."""

    number: int
    values: dict[str, Any]


Answer = Update | Done | Failure | Stats
