"""Settings of FastGen, read from the environment once and changed by `fastgen.enable(...)`; `KeepBits`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from fastgen.interrupts import forkable_lock, undoing

# The values that a setting can have.
CHOICES = {
    "packed_weights": ("call", "keep", "never"),
    "weight_dtype": ("fp32", "int8", "int4", "bf16"),
    "weight_group_size": (32, 64, 128),
    "activations": ("float", "int8"),
    "captured_step": ("auto", "always", "never"),
    "padding": ("exact", "zero"),
    "self_speculation": ("off", "int8", "int4"),
    "assisted_sampling": ("library", "fastgen"),
}
# A run over a data set records steps on the CPU for batches that need at least this many steps together: results must
# not depend on measurements. A call that may end at any token counts at most the second number.
RECORDING_PAYS_FROM, STEPS_OF_A_CALL = 48, 64
# Prefixes of the names of the installed commands.
_COMMANDS = (
    "fastgen-generate", "fastgen-embed", "fastgen-classify", "fastgen-quantize", "fastgen-interactive-for-fairseq",
    "fastgen-eval-lm", "fastgen-serve",
)  # fmt: skip
# Settings that are on or off.
SWITCHES = ("keep_bits",)
# Former settings, with the values that they had: they have no effect now.
RETIRED = {"linear_products": ("measured", "fixed")}
# Former names of settings, with their present names; and former values of one of them.
RENAMED = {"cpu_weights": "weight_dtype", "few_bits_inputs": "activations"}
_RENAMED_VALUES = {"few_bits_inputs": {"exact": "float"}}


def _flag(name: str) -> bool:
    """Whether the environment variable `name` is set to anything but an empty string, 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What FastGen may do. Instances are immutable: `fastgen.enable(strict=True)` installs a changed copy.

    Attributes:
        disabled: importing FastGen changes nothing until `fastgen.enable()` is called (FASTGEN_DISABLE=1).
        strict: raise `FallbackError` if a call would fall back to the original code (FASTGEN_STRICT=1).
        packed_weights: how long copies of a model's weights in `weight_dtype` are kept: for a "call" of `generate` (the
            default), or as long as the model ("keep": a later call need not make them again, but weights must not be
            written to through `parameter.data`). "never": linear layers run on torch's own kernels, and no weight is
            copied except for a draft (FASTGEN_PACKED_WEIGHTS). With the other values, captured greedy steps also keep
            an 8-bit copy of the output layer, and captured steps of up to 16 rows a copy of each float32 weight that 16
            bits represent exactly. Such a copy is validated in each call.
        weight_dtype: the type that linear layers multiply with: that of the weights, "fp32", or copies in "int8",
            "int4" or "bf16", which change the results and are used for every linear layer: "bf16" for a model in
            float32, the others in half precision, too (FASTGEN_WEIGHT_DTYPE). The setting's old name, cpu_weights
            (FASTGEN_CPU_WEIGHTS), is deprecated.
        weight_group_size: how many inputs share a scale in "int8" and "int4": 32, 64 or 128
            (FASTGEN_WEIGHT_GROUP_SIZE). Smaller groups are more accurate, and take more memory.
        keep_bits: `from_pretrained` loads low-bit checkpoints into layers that keep their weights in these bits, if
            FastGen knows the format (FASTGEN_KEEP_BITS=1); otherwise it returns what the library makes of them.
            `KeepBits` asks for it in one call.
        activations: what the weights of such layers are multiplied with on the CPU: activations in "float" (the
            default), with the results of the unpacked weights, or rounded to "int8", row by row and group by group,
            which is faster and changes results (FASTGEN_ACTIVATIONS). The setting's old name, few_bits_inputs
            (FASTGEN_FEW_BITS_INPUTS, with "exact" for "float"), is deprecated.
        captured_step: whether decode steps are captured and replayed, on the CPU as recorded operators, on an NVIDIA
            GPU as a CUDA graph (FASTGEN_CAPTURED_STEP). "auto" (the default): whenever a captured step serves the call;
            on the CPU, once the rest of a call, or the calls so far, suggest that recording pays, so that the last
            digits of results may depend on that. "always": from the first call on. "never": the library's loop runs.
            With the last two, a result of `generate` does not depend on earlier calls.
        padding: what encoder results hold where the input has padding (FASTGEN_PADDING). "exact" (the default): what
            the library returns; padding is skipped only if no result has such positions. "zero": zeros, so that padding
            is always skipped.
        self_speculation: whether the model's own weights in "int8" or "int4" draft tokens, which the model verifies
            several at a time, if steps are captured; "off" by default (FASTGEN_SELF_SPECULATION). Needs memory for
            those weights.
        assisted_sampling: who samples if a call of `generate` asks for assisted generation with sampling
            (FASTGEN_ASSISTED_SAMPLING). "library" (the default): Transformers, on its own code, so that a seed gives
            the same tokens as there; FastGen only for several sequences, which Transformers refuses. "fastgen":
            FastGen's draft and verify, which sample other tokens from the same distribution.

        explicit: the names of the settings that the user has given, in the environment or to `fastgen.enable`.

    Raises:
        ValueError: a value is not among these, or weight_dtype asks for packed weights and packed_weights forbids them.
    """

    disabled: bool = False
    strict: bool = False
    packed_weights: str = "call"
    weight_dtype: str = "fp32"
    weight_group_size: int = 64
    keep_bits: bool = False
    activations: str = "float"
    captured_step: str = "auto"
    padding: str = "exact"
    self_speculation: str = "off"
    assisted_sampling: str = "library"
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        for name in ("disabled", "strict"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} (FASTGEN_{name.upper()}) is {getattr(self, name)!r}; known: True, False")
        for name, known in CHOICES.items():
            given = getattr(self, name)
            # 64.0, and other values that merely equal a known one, are refused.
            if not any(type(given) is type(each) and given == each for each in known):
                raise ValueError(f"{name} (FASTGEN_{name.upper()}) is {given!r}; known: {', '.join(map(str, known))}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} (FASTGEN_{name.upper()}) is {getattr(self, name)!r}: give True or False")
        if self.weight_dtype != "fp32" and self.packed_weights == "never":
            raise ValueError(f"weight_dtype {self.weight_dtype} needs packed weights: packed_weights must not be never")

    @property
    def kept_weights(self) -> tuple[str, int] | None:
        """The type and group size of copies that outlive a call, or None."""
        is_kept = self.weight_dtype != "fp32" and self.packed_weights == "keep"
        return (self.weight_dtype, self.weight_group_size) if is_kept else None

    @classmethod
    def from_environment(cls) -> Settings:
        """Returns the settings that the environment variables named above ask for."""
        given: dict[str, Any] = {}
        # Old names come first, so that the new name wins if both are given.
        for name in (*RETIRED, *RENAMED, *CHOICES):
            value = os.environ.get(f"FASTGEN_{name.upper()}", "").strip().lower()
            if value:
                # An invalid number is refused with a list of the known values.
                is_number = isinstance(CHOICES.get(name, ("",))[0], int) and value.isdecimal()
                given |= renamed({name: int(value) if is_number else value}, "FASTGEN_{}".format)
        switches = {name: f"FASTGEN_{name.upper()}" for name in SWITCHES}
        given |= {name: _flag(variable) for name, variable in switches.items() if variable in os.environ}
        explicit = frozenset(given)
        return cls(disabled=_flag("FASTGEN_DISABLE"), strict=_flag("FASTGEN_STRICT"), explicit=explicit, **given)


def renamed(changes: dict[str, Any], spelled: Callable[[str], str] = str.lower) -> dict[str, Any]:
    """Returns `changes` with present names and values of settings; warns of old names, and of settings that are gone.

    Args:
        spelled: formats a setting's name in warnings, given the name in capitals.

    Raises:
        TypeError: a setting is given by both names.
        ValueError: a setting that is gone is given a value that it did not have.
    """
    found = {name: value for name, value in changes.items() if name not in (*RENAMED, *RETIRED)}
    for name, values in RETIRED.items():
        if changes.get(name) is not None:
            if changes[name] not in values:
                raise ValueError(f"{name} is {changes[name]!r}; known: {', '.join(values)}")
            message = f"{spelled(name.upper())} has no effect any more: the kernel of a linear layer is never measured"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
    for old, new in RENAMED.items():
        if old in changes:
            if new in found:
                raise TypeError(f"{old} is the old name of {new}: give one of them")
            message = f"{spelled(old.upper())} is now called {spelled(new.upper())}"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            found[new] = _RENAMED_VALUES.get(old, {}).get(changes[old], changes[old])
    return found


def _is_command() -> bool:
    """Whether this process is one of FastGen's commands, before any of its own code has run."""
    program = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if program == "-m":  # while Python looks for the module, whose name may be attached: -mfastgen
        return re.match(r"(-\w*?m)?fastgen(_cli|_serve)?(\.|$)", sys.orig_argv[-len(sys.argv)]) is not None
    return program.startswith(_COMMANDS)


try:
    _current = Settings.from_environment()
except ValueError as error:
    if not _is_command():
        raise
    print(f"fastgen: {error}", file=sys.stderr)
    raise SystemExit(2) from None
_changing = forkable_lock()
_of_block: ContextVar[Settings | None] = ContextVar("fastgen_settings", default=None)


def current() -> Settings:
    """Returns the settings in force for the calling thread."""
    return _of_block.get() or _current


def change(**changes: Any) -> Settings:
    """Changes the settings of all threads, and of the `changed` block around this; returns those now in force.

    Raises:
        TypeError: a name in `changes` is not a setting, or one is given by its old and its new name.
        ValueError: a value is not one that the setting can have.
    """
    global _current
    with _changing:
        everywhere, block = _with(_current, changes), _of_block.get()
        if block is not None:
            _of_block.set(_with(block, changes))
        _current = everywhere
    return current()


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """A context with the present settings, plus `changes`. Raises what `change` raises.

    It applies to the calling thread, and to threads that run in a copy of its context (`contextvars.copy_context`).
    Other threads are not affected, and a `change` that they make does not affect the block.
    """
    with undoing(partial(_of_block.set, _of_block.get())):
        _of_block.set(_with(current(), changes))
        yield


def unless_explicit(**changes: Any) -> dict[str, Any]:
    """Returns those of `changes` whose setting has its default value, and was not given by the user."""
    now, default = current(), Settings()
    return {
        name: value
        for name, value in changes.items()
        if name not in now.explicit and getattr(now, name) == getattr(default, name)
    }


def _with(settings: Settings, changes: dict[str, Any]) -> Settings:
    changes, known = renamed(changes), [field.name for field in fields(Settings)]
    unknown = sorted(changes.keys() - known)
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(map(str, known))}")
    return replace(settings, **changes)


# The key of a file's `quantization_config` that asks for this. Other libraries ignore it.
IN_CONFIG = "fastgen_keep_bits"


@dataclass(frozen=True)
class KeepBits:
    """Asks for layers that keep the weights of a low-bit checkpoint in its bits, in place of the library's layers.

        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", quantization_config=fastgen.KeepBits()
        )

    Serves GGUF, GPTQ, AWQ and compressed-tensors (docs/quantization.md). A checkpoint that FastGen cannot keep in its
    bits is loaded by the library, with a warning that gives the reason.

    Args:
        activations: what the weights of this model are multiplied with on the CPU: "float", with the results of the
            unpacked weights, or rounded to "int8", which is faster and changes results. By default as set by
            `fastgen.enable(activations=...)`.

    Raises:
        ValueError: `activations` is none of these.
    """

    activations: str | None = None

    def __post_init__(self) -> None:
        known = CHOICES["activations"]
        if self.activations is not None and self.activations not in known:
            raise ValueError(f"activations is {self.activations!r}; known: {', '.join(map(str, known))}")

    def __getattr__(self, name: str) -> Any:
        # The library reads attributes of its own configurations if FastGen does not handle this object first.
        raise AttributeError(f"KeepBits has no {name}: FastGen reads it, which is disabled (call fastgen.enable())")
