"""Speculative decoding in `generate`: which calls draft, with what, and the step that checks what was drafted."""

from __future__ import annotations

from typing import Any

from fastgen import settings
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.speculation.drafts import Draft, SelfDraft


def draft_for(call: Call, config: Any) -> Draft | None:
    """What drafts in this call; None for nothing."""
    if config.num_beams > 1:
        return None
    if call.draft is not None:
        return call.draft
    now = settings.current()
    # How much is drafted is a matter of measured times, and with it the last digits of what is stored.
    if now.self_speculation == "off" or now.linear_products == "fixed":
        return None
    return SelfDraft(call.model, now.self_speculation, now.weight_group_size)
