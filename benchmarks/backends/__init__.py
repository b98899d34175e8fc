"""The backends that a workload compares: one class each, with `setup`, `run` and `close`.

A new backend is a subclass of `Backend` in a module here, and a line in `_MAKERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

BASELINE, SUBJECT = "transformers", "fastgen"
_GGUF = ("fastgen-gguf", "fastgen-gguf-int8")
_CAPTURED = {"captured_step": "always"}

# name: (module, class, arguments). A module is imported when its backend is used, and may import what it needs.
_MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    BASELINE: ("generate", "Unpatched", {}),
    "fairseq": ("generate", "Unpatched", {}),
    "ctranslate2": ("ctranslate2", "CTranslate2", {"compute_type": "float32"}),
    "ctranslate2-int8": ("ctranslate2", "CTranslate2", {"compute_type": "int8", "rivals": ("fastgen-int8",)}),
    "openvino": ("openvino", "OpenVINO", {}),
    "openvino-int8": ("openvino", "OpenVINO", {"bits": 8, "rivals": ("fastgen-int8",)}),
    "openvino-int4": ("openvino", "OpenVINO", {"bits": 4, "rivals": ("fastgen-int4",)}),
    "openvino-genai": ("openvino", "OpenVINOGenAI", {"rivals": _GGUF}),
    "llama.cpp-f32": ("llama_cpp", "LlamaCpp", {"precision": "F32"}),
    "llama.cpp-bf16": ("llama_cpp", "LlamaCpp", {"precision": "BF16"}),
    "llama.cpp-q8_0": ("llama_cpp", "LlamaCpp", {"precision": "Q8_0", "rivals": ("fastgen-int8",)}),
    "llama.cpp-q4_1": ("llama_cpp", "LlamaCpp", {"precision": "Q4_1", "rivals": ("fastgen-int4", *_GGUF)}),
    SUBJECT: ("generate", "Patched", {}),
    "fastgen-hooks": ("generate", "Patched", {"settings": {"captured_step": "never"}}),
    "fastgen-captured": ("generate", "Patched", {"settings": _CAPTURED}),
    "fastgen-int8": ("generate", "Patched", {"settings": {"weight_dtype": "int8", "packed_weights": "keep"}}),
    "fastgen-int4": (
        "generate",
        "Patched",
        {"settings": {"weight_dtype": "int4", "weight_group_size": 32, "packed_weights": "keep"}},
    ),
    "fastgen-bf16": ("generate", "Patched", {"settings": {"weight_dtype": "bf16"}}),
    "fastgen-gguf": ("generate", "KeptBits", {"activations": "float"}),
    "fastgen-gguf-int8": ("generate", "KeptBits", {"activations": "int8"}),
    "fastgen-self-draft": ("generate", "Drafted", {"settings": {"self_speculation": "int8", **_CAPTURED}}),
    "fastgen-lookup": (
        "generate",
        "Drafted",
        {"settings": _CAPTURED, "options": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}},
    ),
    "fastgen-zero-padding": ("generate", "Patched", {"settings": {"padding": "zero"}}),
    "fastgen-fairseq": ("generate", "Patched", {}),
    "fastgen-fairseq-plain": ("generate", "Patched", {"settings": {"packed_weights": "never"}}),
}

ALL = tuple(_MAKERS)


class Unsupported(Exception):
    """A backend cannot do this work here; the message is the reason, for the reader of the results."""


@dataclass(frozen=True)
class Job:
    """The work of a backend.

    Attributes:
        workload: the `Generation` with the number of new tokens and the options.
        model: the model in Transformers. A backend that converts it must not change it.
        inputs: "input_ids" and "attention_mask".
        threads: to use.
    """

    workload: Any
    model: Any
    inputs: dict[str, Tensor]
    threads: int


class Backend(ABC):
    """One way to do the work. It is set up once, runs a few times interleaved with the others, and is closed.

    Attributes:
        name: in the options and the results.
        rivals: the FastGen backends that it is compared with, if those are measured.
        fastgen: whether it measures FastGen, rather than something that FastGen is compared with.
        exact: whether it must produce the baseline's tokens; different arithmetic may lead to others.
        version: of the library that does the work, if the versions of the whole run do not have it.
        warm_up_seconds: set by the harness.
    """

    fastgen = False
    exact = False
    version: str | None = None
    warm_up_seconds: float

    def __init__(self, name: str, rivals: tuple[str, ...] = ()) -> None:
        self.name = name
        self.rivals = rivals

    def setup(self, job: Job) -> None:
        """Prepares the backend; not timed.

        Raises:
            Unsupported: this backend cannot do the job.
        """
        self.job = job

    def warm_up(self) -> None:
        """Does all one-time work before the timing."""
        # A few steps run all code, read all weights, and let caches of prepared weights fill.
        for _ in range(self.job.workload.warm_ups):
            self.run(min(3, self.job.workload.new_tokens))

    @abstractmethod
    def run(self, new_tokens: int) -> Tensor:
        """Makes one timed run; returns the tokens as `generate` does, with the prompt or the decoder's start token."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Releases the resources of `setup`. Always called, even if that failed."""


def make(name: str) -> Backend:
    """Creates the backend of this name.

    Raises:
        KeyError: there is none.
    """
    module, kind, arguments = _MAKERS[name]
    return getattr(import_module(f"{__name__}.{module}"), kind)(name, **arguments)


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the distinct names, in the order in which the backends alternate."""
    wanted = set(names)
    return [name for name in ALL if name in wanted]


def pairs(measured: Iterable[Backend], baseline: str, subject: str) -> list[tuple[str, str]]:
    """Returns the comparisons with FastGen's backends: (other, FastGen's).

    Each backend is compared with FastGen in its own precision and toolkit, or with default FastGen if that was not
    measured. FastGen in other precisions and toolkits is also compared with the baseline.
    """
    by_name = {backend.name: backend for backend in measured}
    found = []
    for name, backend in by_name.items():
        rivals = [rival for rival in backend.rivals if rival in by_name]
        if not backend.fastgen:
            found += [(name, rival) for rival in rivals or [subject]]
        elif name != subject:
            found += [(other, name) for other in (baseline, *rivals)]
    return [pair for pair in found if by_name.keys() >= set(pair)]
