"""The argument of `from_pretrained` that keeps weights in the bits of their file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.settings import CHOICES

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
