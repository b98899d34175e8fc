"""Which models a captured step serves."""

from __future__ import annotations

from typing import Any

# The library does not run these with a static cache, because they ask the host how long it is, or because nobody has
# looked at them yet. In a captured step the host can tell (`SymbolicLength`). Any other model that the library does not
# run so may compute positions from the number of keys, which is that of the buffers: GPT-Neo does.
_OTHERS = frozenset(
    f"transformers.models.{module}.{name}"
    for module, name in (
        ("fsmt.modeling_fsmt", "FSMTForConditionalGeneration"),
        ("led.modeling_led", "LEDForConditionalGeneration"),
        ("longt5.modeling_longt5", "LongT5ForConditionalGeneration"),
        ("m2m_100.modeling_m2m_100", "M2M100ForConditionalGeneration"),
        ("mvp.modeling_mvp", "MvpForConditionalGeneration"),
        ("plbart.modeling_plbart", "PLBartForConditionalGeneration"),
        ("prophetnet.modeling_prophetnet", "ProphetNetForConditionalGeneration"),  # with the hooks of prophetnet.py
        ("xglm.modeling_xglm", "XGLMForCausalLM"),
    )
)


def is_served(model: Any) -> bool:
    """Whether a step of this model reads the cache in a way that buffers of a fixed size allow, as far as is known.

    Whether it can be captured is found out by trying.
    """
    kind = type(model)
    return (
        getattr(model, "_can_compile_fullgraph", False)
        or hasattr(kind, "step_positions")
        or f"{kind.__module__}.{kind.__qualname__}" in _OTHERS
    )


def positions_of_step(model: Any) -> int:
    """How many positions a step of the model stores; all but the first are dropped again. FastGen's own models say."""
    return getattr(type(model), "step_positions", 1)
