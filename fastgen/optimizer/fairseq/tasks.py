"""FairSeq's tasks, where they are at odds with FairSeq itself."""

from __future__ import annotations

from typing import Any


def keep_arguments(wrapped: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of `TranslationFromPretrainedBARTTask.__init__`.

    Its methods look for the task's options where tasks had them once, so that no fine-tuned mBART could generate
    (FairSeq's issues 3169 and 4479).
    """
    wrapped(*args, **kwargs)
    if not hasattr(task, "args"):
        task.args = task.cfg
