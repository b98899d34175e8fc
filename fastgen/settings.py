"""Settings of FastGen, read from the environment once and changed by `fastgen.enable(...)`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

PACKED_WEIGHTS = ("call", "keep", "never")
CPU_WEIGHTS = ("fp32", "int8", "bf16")
CAPTURED_STEP = ("auto", "never")


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
            written to through `parameter.data`), or "never" made: linear layers run on torch's own products then
            (FASTGEN_PACKED_WEIGHTS).
        cpu_weights: the precision of those copies: that of the weights, "fp32", or "int8" or "bf16", which change the
            results and are used for every linear layer of a model in float32 (FASTGEN_CPU_WEIGHTS).
        captured_step: whether decoding steps on an NVIDIA GPU are captured in a CUDA graph: where it serves, "auto", or
            "never" (FASTGEN_CAPTURED_STEP).

    Raises:
        ValueError: one of them has a value that is not among these, or no copy is to be made in another precision.
    """

    disabled: bool = False
    strict: bool = False
    packed_weights: str = "call"
    cpu_weights: str = "fp32"
    captured_step: str = "auto"

    def __post_init__(self) -> None:
        choices = {"packed_weights": PACKED_WEIGHTS, "cpu_weights": CPU_WEIGHTS, "captured_step": CAPTURED_STEP}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ValueError(f"{name} (FASTGEN_{name.upper()}) is {given!r}; known: {', '.join(known)}")
        if self.cpu_weights != "fp32" and self.packed_weights == "never":
            raise ValueError(f"cpu_weights {self.cpu_weights} needs packed weights: packed_weights must not be never")

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the environment variables named above ask for."""
        return cls(
            disabled=_flag("FASTGEN_DISABLE"),
            strict=_flag("FASTGEN_STRICT"),
            packed_weights=os.environ.get("FASTGEN_PACKED_WEIGHTS", "").strip().lower() or "call",
            cpu_weights=os.environ.get("FASTGEN_CPU_WEIGHTS", "").strip().lower() or "fp32",
            captured_step=os.environ.get("FASTGEN_CAPTURED_STEP", "").strip().lower() or "auto",
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


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Inside this block the settings have `changes` applied, in all threads. Raises what `change` raises."""
    before = {name: getattr(_current, name) for name in changes if hasattr(_current, name)}
    change(**changes)
    try:
        yield
    finally:
        change(**before)
