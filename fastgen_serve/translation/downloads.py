"""Keeps translated files in memory, under unguessable names, for some minutes."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from fastgen_serve.errors import Busy

# Lifetime of a file in seconds, and limit in bytes of all files.
LIFE = 1200.0
MOST_BYTES = 128 * 2**20


class Downloads:
    """Files by name, oldest first.

    Args:
        life: lifetime of a file in seconds.
        most: limit in bytes of all files.
        now: the clock.
    """

    def __init__(self, life: float = LIFE, most: int = MOST_BYTES, now: Callable[[], float] = time.monotonic) -> None:
        self._life, self._most, self._now = life, most, now
        self._files: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def add(self, data: bytes, ending: str) -> str:
        """Stores a file. Returns its name.

        Raises:
            Busy: other files leave no room for it.
        """
        self._forget()
        if self._bytes + len(data) > self._most:
            raise Busy("too many translated files wait to be fetched: try again later", retry_after=60)
        name = secrets.token_urlsafe(24) + ending
        self._files[name] = (self._now() + self._life, data)
        self._bytes += len(data)
        return name

    def get(self, name: str) -> bytes | None:
        """Returns the file of this name; None if it is unknown, or has expired."""
        self._forget()
        found = self._files.get(name)
        return None if found is None else found[1]

    def _forget(self) -> None:
        while self._files and next(iter(self._files.values()))[0] <= self._now():
            _, (_, data) = self._files.popitem(last=False)
            self._bytes -= len(data)
