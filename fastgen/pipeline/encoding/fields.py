"""The fields of a model's JSON files. A file may hold anything: an error names the file, the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import SetupError

_LONGEST = 80  # characters of a value in a message
_LONGEST_NAME = 255  # bytes of a name in file systems
_LARGEST = 2**31 - 1  # of a size: a vector of more numbers is none


class Fields:
    """The fields of one file, or of none, where the model does without.

    Every method raises `SetupError` where the value is of another type than its own. A field that is null is missing.
    """

    def __init__(self, path: Path, values: Mapping[str, Any] | None) -> None:
        self.path, self._is_there = path, values is not None
        self.values = dict(values or {})
        """All of them, as they are in the file."""

    def __bool__(self) -> bool:
        """Whether there is such a file."""
        return self._is_there

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._of(name, bool, "true or false", default))

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string that UTF-8 has bytes for."""
        found: str | None = self._of(name, str, "a string", default)
        if found is not None and not is_text(found):
            raise self.wrong(name, "a string that is valid UTF-8")
        return found

    def size(self, name: str) -> int | None:
        """A positive number."""
        found: int | None = self._of(name, int, "a positive number", None)
        if found is not None and found < 1:
            raise self.wrong(name, "a positive number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """An object of strings."""
        found: dict[str, str] = self._of(name, dict, "an object of strings", {})
        for key, value in found.items():
            if type(value) is not str or not is_text(value) or not is_text(key):
                raise SetupError(f"{self.path}: {name}[{short(key)}] is {short(value)}: it must be a string")
        return found

    def needed(self, name: str) -> int:
        """A positive number of elements of a tensor."""
        found = self.size(name)
        if found is None:
            raise SetupError(f"{self.path} has no {name}: it must be a positive number")
        if found > _LARGEST:
            raise self.wrong(name, f"at most {_LARGEST}")
        return found

    def wrong(self, name: str, must: str) -> SetupError:
        return SetupError(f"{self.path}: {name} is {short(self.values.get(name))}: it must be {must}")

    def _of(self, name: str, kind: type, must: str, default: Any) -> Any:
        found = self.values.get(name)
        if found is None:
            return default
        if type(found) is not kind:  # true is no number
            raise self.wrong(name, must)
        return found


def short(value: Any) -> str:
    """A value in a message."""
    text = ascii(value) if isinstance(value, str) and not is_text(value) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_text(value: str) -> bool:
    """Whether UTF-8 has bytes for it, which it has none for half of a pair of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_folder(path: str) -> bool:
    """Whether this names a folder of a model that does not lead out of it, or the model's own."""
    if not is_text(path) or path.startswith("/"):
        return False
    parts = path.split("/")
    return not any(part == ".." or "\\" in part or "\0" in part or len(part.encode()) > _LONGEST_NAME for part in parts)


def check_shapes(where: str, weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `SetupError` unless there are just these tensors, of these shapes, of numbers."""
    missing, others = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing:
        raise SetupError(f"{where} has no tensor {', '.join(missing)}")
    if others:
        raise SetupError(f"{where} has further tensors: {', '.join(short(each) for each in others[:5])}")
    for name, shape in shapes.items():
        found = tuple(weights[name].shape)
        if found != shape:
            raise SetupError(f"{where}: {name} is of shape {list(found)}: it must be {list(shape)}")
