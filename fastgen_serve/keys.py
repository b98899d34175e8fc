"""API keys: who may use the server."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from fastgen_serve.errors import Unauthorized


def check(key: str | None, keys: Sequence[str]) -> None:
    """Accepts any of the keys, and every request if there are none. Takes the same time for every wrong key.

    Raises:
        Unauthorized: the key is missing or wrong.
    """
    given = (key or "").encode("utf-8", "surrogatepass")  # JSON may contain lone surrogates
    found = [hmac.compare_digest(given, each.encode()) for each in keys]  # all of them, to take constant time
    if keys and not any(found):
        what = "no API key: send the header Authorization: Bearer KEY" if not key else "another API key"
        raise Unauthorized(what)


def of_header(value: str | None) -> str | None:
    """Returns the key in the value of an Authorization header; None if there is none."""
    scheme, _, key = (value or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def read(path: str) -> tuple[str, ...]:
    """Returns the keys in a file, one a line. Ignores empty lines, and lines that begin with #.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no key.
    """
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no key: write one a line")
    return keys
