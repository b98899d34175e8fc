"""Settings of FastGen, read from the environment once and changed by `fastgen.enable(...)`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any


def _flag(name: str) -> bool:
    """True when the environment variable `name` is set to anything but an empty string, 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What FastGen may do. Instances are immutable: `fastgen.enable(strict=True)` installs a changed copy.

    Attributes:
        disabled: importing FastGen changes nothing until `fastgen.enable()` is called (FASTGEN_DISABLE=1).
        strict: raise `FallbackError` where a call would fall back to the original code (FASTGEN_STRICT=1).
    """

    disabled: bool = False
    strict: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the environment variables FASTGEN_DISABLE and FASTGEN_STRICT ask for."""
        return cls(disabled=_flag("FASTGEN_DISABLE"), strict=_flag("FASTGEN_STRICT"))


_current = Settings.from_environment()


def current() -> Settings:
    """The settings in force."""
    return _current


def change(**changes: Any) -> Settings:
    """Installs a copy of the current settings with `changes` applied, and returns it.

    Raises:
        TypeError: a name in `changes` is not a setting.
    """
    global _current
    unknown = sorted(set(changes) - {field.name for field in fields(Settings)})
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(f.name for f in fields(Settings))}")
    _current = replace(_current, **changes)
    return _current
