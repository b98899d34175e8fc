"""Settings of FastGen, read from the environment once and changed by `fastgen.enable(...)`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

PACKED_WEIGHTS = ("call", "keep", "never")
WEIGHT_DTYPES = ("fp32", "int8", "bf16")
LINEAR_PRODUCTS = ("measured", "fixed")
CAPTURED_STEP = ("auto", "never")
# Names that settings had, and their names now.
_RENAMED = {"cpu_weights": "weight_dtype"}


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
        weight_dtype: the type of those copies: that of the weights, "fp32", or "int8" or "bf16", which change the
            results and are used for every linear layer of a model in float32 (FASTGEN_WEIGHT_DTYPE). The setting's old
            name, cpu_weights (FASTGEN_CPU_WEIGHTS), is deprecated.
        linear_products: how the product of a linear layer on the CPU is chosen (FASTGEN_LINEAR_PRODUCTS). "measured"
            (the default): the fastest, by timings of this machine and by the number of products so far. Torch's product
            and FastGen's round differently, so the last digits of scores may differ between two runs. "fixed": by the
            weight's shape and the processor's instructions alone, so that a run can be repeated to the last bit.
            FastGen's product is then used for every large weight, and a row's result depends neither on the other rows
            nor on the number of threads; where the processor has no AVX2, torch's is used.
        captured_step: whether decoding steps on an NVIDIA GPU are captured in a CUDA graph: where it serves, "auto", or
            "never" (FASTGEN_CAPTURED_STEP).

    Raises:
        ValueError: one of them has a value that is not among these, or no copy is to be made in another precision.
    """

    disabled: bool = False
    strict: bool = False
    packed_weights: str = "call"
    weight_dtype: str = "fp32"
    linear_products: str = "measured"
    captured_step: str = "auto"

    def __post_init__(self) -> None:
        choices = {
            "packed_weights": PACKED_WEIGHTS,
            "weight_dtype": WEIGHT_DTYPES,
            "linear_products": LINEAR_PRODUCTS,
            "captured_step": CAPTURED_STEP,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ValueError(f"{name} (FASTGEN_{name.upper()}) is {given!r}; known: {', '.join(known)}")
        if self.weight_dtype != "fp32" and self.packed_weights == "never":
            raise ValueError(f"weight_dtype {self.weight_dtype} needs packed weights: packed_weights must not be never")

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the environment variables named above ask for."""
        given: dict[str, Any] = {"disabled": _flag("FASTGEN_DISABLE"), "strict": _flag("FASTGEN_STRICT")}
        # An old name comes first, so that the new one counts where both are given.
        for name in ("cpu_weights", "packed_weights", "weight_dtype", "linear_products", "captured_step"):
            value = os.environ.get(f"FASTGEN_{name.upper()}", "").strip().lower()
            if value:
                given |= renamed({name: value}, "FASTGEN_{}".format)
        return cls(**given)


def renamed(changes: dict[str, Any], spelled: Callable[[str], str] = str.lower) -> dict[str, Any]:
    """`changes` with the names that settings have now; warns of old ones.

    Args:
        spelled: what a warning calls a setting, from its name in capitals.

    Raises:
        TypeError: a setting is given by both names.
    """
    found = {name: value for name, value in changes.items() if name not in _RENAMED}
    for old, new in _RENAMED.items():
        if old in changes:
            if new in found:
                raise TypeError(f"{old} is the old name of {new}: give one of them")
            message = f"{spelled(old.upper())} is now called {spelled(new.upper())}"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            found[new] = changes[old]
    return found


_current = Settings.from_environment()


def current() -> Settings:
    """The settings in force."""
    return _current


def change(**changes: Any) -> Settings:
    """Installs a copy of the current settings with `changes` applied, and returns it.

    Raises:
        TypeError: a name in `changes` is not a setting, or one is given by its old and its new name.
        ValueError: a value is not one that the setting can have.
    """
    global _current
    changes = renamed(changes)
    unknown = sorted(set(changes) - {field.name for field in fields(Settings)})
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(f.name for f in fields(Settings))}")
    _current = replace(_current, **changes)
    return _current


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Inside this block the settings have `changes` applied, in all threads. Raises what `change` raises."""
    changes = renamed(changes)
    before = {name: getattr(_current, name) for name in changes if hasattr(_current, name)}
    change(**changes)
    try:
        yield
    finally:
        change(**before)
