"""The log: a line of JSON for each request, without its text."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

REQUESTS = logging.getLogger("fastgen_serve.requests")


@dataclass
class Entry:
    """What is told of a request.

    Attributes:
        more: "model", "tokens" and so on, of those who know.
    """

    id: str
    method: str
    path: str
    start: float = field(default_factory=time.perf_counter)
    more: dict[str, Any] = field(default_factory=dict)


current: ContextVar[Entry | None] = ContextVar("current", default=None)


def note(**values: Any) -> None:
    """Adds to the line of the request that runs here; numbers and lists add up."""
    entry = current.get()
    if entry is None:
        return
    for name, value in values.items():
        adds_up = isinstance(value, (int, list)) and name in entry.more
        entry.more[name] = entry.more[name] + value if adds_up else value


def passed(entry: Entry) -> float:
    """Seconds since a request has come."""
    return time.perf_counter() - entry.start


def write(entry: Entry, status: int) -> None:
    """The line of a request that is over."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": entry.id,
        "method": entry.method,
        "path": entry.path,
        "status": status,
        "ms": round(passed(entry) * 1000, 1),
        **entry.more,
    }
    REQUESTS.info(json.dumps(line, ensure_ascii=False))


def to_standard_error() -> None:
    """Has the lines written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    REQUESTS.handlers[:] = [handler]
    REQUESTS.setLevel(logging.INFO)
    REQUESTS.propagate = False
