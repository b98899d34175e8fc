"""Speculative decoding in `generate`: which calls draft, with what, and how drafts are verified."""

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
    if now.self_speculation == "off":
        return None
    return SelfDraft(call.model, now.self_speculation, now.weight_group_size)
