"""The digest of a file: what an input is known by, and an output that was put in place."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK = 1 << 20


def digest(path: Path) -> str:
    """Of all bytes of the file, as hexadecimal digits."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
