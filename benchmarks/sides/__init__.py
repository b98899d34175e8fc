"""The ways to do the same generation that a workload compares: one class each, with `setup`, `run` and `close`.

A new one is a subclass of `Side` (`base.py`) in a module here, and a line in `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from benchmarks.sides.base import Job, Side, Unsupported

BASELINE, SUBJECT = "transformers", "fastgen"

# name: (module, class, arguments). Modules are imported when their side is asked for, and may import what they need.
_MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    BASELINE: ("generate", "Unpatched", {}),
    "transformers-compile": ("compiled", "Compiled", {}),
    "compiled-loop": ("compiled_loop", "CompiledLoop", {}),
    "ctranslate2": ("ctranslate2", "CTranslate2", {"compute_type": "float32"}),
    "ctranslate2-int8": ("ctranslate2", "CTranslate2", {"compute_type": "int8", "rival": "fastgen-int8"}),
    "fairseq": ("fairseq", "FairSeq", {"rival": "fastgen-fairseq"}),
    SUBJECT: ("generate", "Patched", {}),
    "fastgen-tier1": ("generate", "Patched", {"settings": {"captured_step": "never"}}),
    "fastgen-int8": ("generate", "Patched", {"settings": {"cpu_weights": "int8"}}),
    "fastgen-bf16": ("generate", "Patched", {"settings": {"cpu_weights": "bf16"}}),
    "fastgen-fairseq": ("fairseq", "FastFairSeq", {}),
}

ALL = tuple(_MAKERS)

__all__ = ["ALL", "BASELINE", "SUBJECT", "Job", "Side", "Unsupported", "in_order", "make", "pairs"]


def make(name: str) -> Side:
    """The side of this name.

    Raises:
        KeyError: there is none.
    """
    module, kind, arguments = _MAKERS[name]
    maker: Callable[..., Side] = getattr(import_module(f"{__name__}.{module}"), kind)
    return maker(name, **arguments)


def in_order(names: Iterable[str]) -> list[str]:
    """The names without repetitions, in the order in which the sides take turns."""
    wanted = set(names)
    return [name for name in ALL if name in wanted]


def pairs(sides: Iterable[Side]) -> list[tuple[str, str]]:
    """Which side is held against which of FastGen's: (other, FastGen's).

    Each is held against FastGen in its own precision and toolkit, or as it comes where that was not measured. FastGen
    in other precisions and toolkits is held against the baseline as well.
    """
    measured = {side.name: side for side in sides}
    found = []
    for name, side in measured.items():
        if side.fastgen and name != SUBJECT and BASELINE in measured:
            found.append((BASELINE, name))
        elif not side.fastgen:
            rival = side.rival if side.rival in measured else SUBJECT
            if rival in measured:
                found.append((name, rival))
    return found
