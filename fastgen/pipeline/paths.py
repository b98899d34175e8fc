"""Paths of the files that a run reads and writes."""

from __future__ import annotations

import os
from pathlib import Path


def unfinished_path(path: Path) -> Path:
    """Where a file is written before it takes its name. The suffix stays last, for formats that are told by it."""
    path = followed(path)
    return path.with_name(f".{path.name}.unfinished")


def followed(path: Path) -> Path:
    """What a link leads to: the file is replaced, not the link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or the like, which is written to and cannot be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which need not exist yet."""
    if is_special(one) or is_special(other):
        return False
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return one.exists() and other.exists() and one.samefile(other)
