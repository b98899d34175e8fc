"""The fields of a model's JSON files. A file may hold anything: an error names the file, the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.settings import must_be

_LONGEST = 80  # characters of a value in a message
_LARGEST = 2**31 - 1  # limit of a size: no vector has more elements


class Fields:
    """The fields of one file; empty if the model has no such file.

    Every method raises `SetupError` if the value has the wrong type. A field that is null counts as missing.
    """

    def __init__(self, path: Path, values: Mapping[str, Any] | None) -> None:
        self.path, self._is_there = path, values is not None
        self.values = dict(values or {})
        """All fields, as they are in the file."""

    def __bool__(self) -> bool:
        """Whether there is such a file."""
        return self._is_there

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """Returns a value of this type."""
        found = self.values.get(name)
        if found is None:
            return default
        if (must := must_be(found, kind)) is not None:
            raise self.wrong(name, must)
        return found

    def size(self, name: str) -> int | None:
        """Returns a positive number."""
        found: int | None = self.get(name, int)
        if found is not None and found < 1:
            raise self.wrong(name, "a positive number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """Returns an object of strings."""
        found: dict[str, str] = self.get(name, dict[str, str], {})
        for key, value in found.items():
            if type(value) is not str:
                raise SetupError(f"{self.path}: {name}[{short(key)}] is {short(value)}: it must be a string")
        return found

    def needed(self, name: str) -> int:
        """Returns a positive number of elements of a tensor, which must be given."""
        found = self.size(name)
        if found is None:
            raise SetupError(f"{self.path} has no {name}: it must be a positive number")
        if found > _LARGEST:
            raise self.wrong(name, f"at most {_LARGEST}")
        return found

    def wrong(self, name: str, must: str) -> SetupError:
        return SetupError(f"{self.path}: {name} is {short(self.values.get(name))}: it must be {must}")


def short(value: Any) -> str:
    """Formats a value for a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_folder(path: str) -> bool:
    """Whether this names a folder inside the model's folder, or that folder itself."""
    return not (path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"))
