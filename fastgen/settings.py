"""Settings of FastGen, read from the environment once and changed by `fastgen.enable(...)`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

PACKED_WEIGHTS = ("call", "keep", "never")


def _flag(name: str) -> bool:
    """True when the environment variable `name` is set to anything but an empty string, 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What FastGen may do. Instances are immutable: `fastgen.enable(strict=True)` installs a changed copy.

    Attributes:
        disabled: importing FastGen changes nothing until `fastgen.enable()` is called (FASTGEN_DISABLE=1).
        strict: raise `FallbackError` where a call would fall back to the original code (FASTGEN_STRICT=1).
        packed_weights: how long the packed copies of a model's weights on the CPU are kept: for a "call" of `generate`
            (the default), or with the model ("keep": a call that follows need not pack again, but weights must not be
            written to through `parameter.data`), or "never" made (FASTGEN_PACKED_WEIGHTS).

    Raises:
        ValueError: `packed_weights` is none of these.
    """

    disabled: bool = False
    strict: bool = False
    packed_weights: str = "call"

    def __post_init__(self) -> None:
        if self.packed_weights not in PACKED_WEIGHTS:
            known = ", ".join(PACKED_WEIGHTS)
            raise ValueError(f"packed_weights (FASTGEN_PACKED_WEIGHTS) is {self.packed_weights!r}; known: {known}")

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the environment variables named above ask for."""
        return cls(
            disabled=_flag("FASTGEN_DISABLE"),
            strict=_flag("FASTGEN_STRICT"),
            packed_weights=os.environ.get("FASTGEN_PACKED_WEIGHTS", "").strip().lower() or "call",
        )


_current = Settings.from_environment()


def current() -> Settings:
    """The settings in force."""
    return _current


def change(**changes: Any) -> Settings:
    """Installs a copy of the current settings with `changes` applied, and returns it.

    Raises:
        TypeError: a name in `changes` is not a setting.
        ValueError: a value is not one that the setting can have.
    """
    global _current
    unknown = sorted(set(changes) - {field.name for field in fields(Settings)})
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(f.name for f in fields(Settings))}")
    _current = replace(_current, **changes)
    return _current
