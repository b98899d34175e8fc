"""The ways to do the same generation that a workload compares: one class each, with `setup`, `run` and `close`.

A new one is a subclass of `Backend` (`base.py`) in a module here, and a line in `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from benchmarks.backends.base import Backend, Job, Task, Unsupported

BASELINE, SUBJECT = "transformers", "fastgen"

# name: (module, class, arguments). Modules are imported when their backend is asked for, and may import what they need.
_MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    BASELINE: ("generate", "Unpatched", {}),
    "ctranslate2": ("ctranslate2", "CTranslate2", {"compute_type": "float32"}),
    "ctranslate2-int8": ("ctranslate2", "CTranslate2", {"compute_type": "int8", "rival": "fastgen-int8"}),
    "openvino": ("openvino", "OpenVINO", {}),
    "openvino-int8": ("openvino", "OpenVINO", {"bits": 8, "rival": "fastgen-int8"}),
    "openvino-int4": ("openvino", "OpenVINO", {"bits": 4, "rival": "fastgen-int4"}),
    "llama.cpp-f32": ("llama_cpp", "LlamaCpp", {"precision": "F32"}),
    "llama.cpp-bf16": ("llama_cpp", "LlamaCpp", {"precision": "BF16"}),
    "llama.cpp-q8_0": ("llama_cpp", "LlamaCpp", {"precision": "Q8_0", "rival": "fastgen-int8"}),
    "llama.cpp-q4_1": ("llama_cpp", "LlamaCpp", {"precision": "Q4_1", "rival": "fastgen-int4"}),
    SUBJECT: ("generate", "Patched", {}),
    "fastgen-hooks": ("generate", "Patched", {"settings": {"captured_step": "never"}}),
    "fastgen-captured": ("generate", "Patched", {"settings": {"captured_step": "always"}}),
    "fastgen-int8": ("generate", "Patched", {"settings": {"weight_dtype": "int8", "packed_weights": "keep"}}),
    "fastgen-int4": (
        "generate",
        "Patched",
        {"settings": {"weight_dtype": "int4", "weight_group_size": 32, "packed_weights": "keep"}},
    ),
    "fastgen-bf16": ("generate", "Patched", {"settings": {"weight_dtype": "bf16"}}),
}

ALL = tuple(_MAKERS)

__all__ = ["ALL", "BASELINE", "SUBJECT", "Backend", "Job", "Task", "Unsupported", "in_order", "make", "pairs"]


def make(name: str) -> Backend:
    """The backend of this name.

    Raises:
        KeyError: there is none.
    """
    module, kind, arguments = _MAKERS[name]
    maker: Callable[..., Backend] = getattr(import_module(f"{__name__}.{module}"), kind)
    return maker(name, **arguments)


def in_order(names: Iterable[str]) -> list[str]:
    """The names without repetitions, in the order in which the backends take turns."""
    wanted = set(names)
    return [name for name in ALL if name in wanted]


def pairs(backends: Iterable[Backend]) -> list[tuple[str, str]]:
    """Which backend is held against which of FastGen's: (other, FastGen's).

    Each is held against FastGen in its own precision and toolkit, or as it comes where that was not measured. FastGen
    in other precisions and toolkits is held against the baseline as well.
    """
    measured = {backend.name: backend for backend in backends}
    found = []
    for name, backend in measured.items():
        if backend.fastgen and name != SUBJECT and BASELINE in measured:
            found.append((BASELINE, name))
        elif not backend.fastgen:
            rival = backend.rival if backend.rival in measured else SUBJECT
            if rival in measured:
                found.append((name, rival))
    return found
