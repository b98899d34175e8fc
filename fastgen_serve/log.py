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
    """The log entry of a request.

    Attributes:
        more: "model", "tokens" and other values that `note` adds.
    """

    id: str
    method: str
    path: str
    start: float = field(default_factory=time.perf_counter)
    more: dict[str, Any] = field(default_factory=dict)


current: ContextVar[Entry | None] = ContextVar("current", default=None)


def note(**values: Any) -> None:
    """Adds values to the log line of the current request; numbers and lists are summed."""
    entry = current.get()
    if entry is None:
        return
    for name, value in values.items():
        adds_up = isinstance(value, (int, list)) and name in entry.more
        entry.more[name] = entry.more[name] + value if adds_up else value


def passed(entry: Entry) -> float:
    """Returns the seconds since a request arrived."""
    return time.perf_counter() - entry.start


def write(entry: Entry, status: int) -> None:
    """Writes the line of a finished request."""
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
    """Makes the log write to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    REQUESTS.handlers[:] = [handler]
    REQUESTS.setLevel(logging.INFO)
    REQUESTS.propagate = False
