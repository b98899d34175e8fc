"""The core cases of the grid: the ways of decoding, and the shapes of the batch."""

from __future__ import annotations

from typing import Any

from tests.equivalence.models import LONG, SHORT, Family

# Ways of decoding. All of them run for every model.
DECODING: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 4},
    "beam, 3 returned": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "sampling, 4 returned": {"do_sample": True, "num_return_sequences": 4, "top_k": 50},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    "greedy": {},
}

# Shapes of the batch, as arguments of `Family.make_inputs`.
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"batch": 3, "length": LONG},
    "short": {"batch": 3, "length": SHORT},
    "one": {"batch": 1, "length": LONG},
    "padded on the other side": {"batch": 3, "length": LONG, "padding": "right"},
}


def shapes_of(family: Family) -> list[str]:
    """The shapes that make a difference for a model."""
    if family.inputs == "audio":
        return ["padded", "one"]
    if family.encoder_decoder:
        return [name for name in SHAPES if name != "padded on the other side"]
    return list(SHAPES)
