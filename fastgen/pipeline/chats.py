"""Message contents for chat templates: those of models that take images may write only lists of parts, even for
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

# A text that no template writes by itself.
_PROBE = "text of a message"


def with_parts(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages for a tokenizer's chat template: a text becomes a list of one part if only lists are written."""
    if not reads_parts_only(tokenizer, str(tokenizer.chat_template)):
        return [dict(message) for message in messages]
    return [{**message, "content": _as_parts(message["content"])} for message in messages]


@lru_cache(maxsize=64)
def reads_parts_only(tokenizer: Any, template: str) -> bool:
    """Whether a chat template writes contents that are lists of parts, but not contents that are texts.

    Args:
        template: the tokenizer's template, which may be replaced.
    """
    return not _writes(tokenizer, _PROBE) and _writes(tokenizer, _as_parts(_PROBE))


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _writes(tokenizer: Any, content: Any) -> bool:
    with suppress(Exception):  # a template is a program, and may refuse what it does not know
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    return False
