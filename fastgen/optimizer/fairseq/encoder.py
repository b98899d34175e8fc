"""FairSeq's encoder layers on a current torch."""

from __future__ import annotations

from typing import Any


def load_from_state_dict(wrapped: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `TransformerEncoderLayerBase._load_from_state_dict`.

    A layer that has loaded its weights switches to torch's fused encoder layer, and calls it in a way that torch
    refuses by now when the source has padding. The layer's own code computes the same.
    """
    wrapped(*args, **kwargs)
    layer.load_to_BT = False
