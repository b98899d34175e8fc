"""API keys: who may use the server."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from fastgen_serve.errors import Unauthorized


def check(key: str | None, keys: Sequence[str]) -> None:
    """Lets in who has one of the keys, and everybody if there are none. It takes as long for any wrong key.

    Raises:
        Unauthorized: it is none of them.
    """
    given = (key or "").encode("utf-8", "surrogatepass")  # JSON may have half of a character
    found = [hmac.compare_digest(given, each.encode()) for each in keys]  # all of them, whichever it is
    if keys and not any(found):
        what = "no API key: send the header Authorization: Bearer KEY" if not key else "another API key"
        raise Unauthorized(what)


def of_header(value: str | None) -> str | None:
    """The key in the value of an Authorization header; None where there is none."""
    scheme, _, key = (value or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def read(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line; lines that begin with # are left out.

    Raises:
        OSError: it cannot be read.
        ValueError: there is none.
    """
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no key: write one a line")
    return keys
