"""Speculative decoding on real weights: FastGen with captured steps, without drafts ("fastgen-captured") and with."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.smollm2_chat import QUESTIONS, Chat, smollm2_instruct

_TEXT = (
    "The harbour was quiet in the early morning. Three fishing boats lay at the quay, and a thin mist hung over the "
    "water. Old Martin sat on a crate and mended his nets, as he had done for forty years. The gulls waited for him to "
    "finish his breakfast. At seven the bell of the church rang, and the first children ran down the hill to school. "
)
_NAMES = ("Peter", "Anna", "John", "Maria", "Paul", "Ruth", "Karl", "Eve")
_REWRITE = tuple(f"Repeat this text word by word, and change only the name to {name}. {_TEXT}" for name in _NAMES)
_PLAIN, _SELF, _LOOKUP = "fastgen-captured", "fastgen-self-draft", "fastgen-lookup"


def _row(name: str, title: str, draft: str, questions: tuple[str, ...], **changes: Any) -> Chat:
    fields = {"new_tokens": 128, "options": {"do_sample": False}, **changes}
    return Chat(
        name=f"speculation-{name}",
        title=f"SmolLM2-135M, {title}",
        shape=smollm2_instruct,
        questions=questions,
        batch=len(questions),
        further_backends=(_PLAIN, draft),
        **fields,
    )


WORKLOADS = [
    _row("self-b1", "self-draft, 1 sequence", _SELF, QUESTIONS[:1]),
    _row("self-b4", "self-draft, 4 sequences", _SELF, QUESTIONS[:4]),
    _row(
        "self-b1-sampled",
        "self-draft, 1 sequence, sampled at 0.7",
        _SELF,
        QUESTIONS[:1],
        options={"do_sample": True, "temperature": 0.7},
    ),
    _row("self-b1-bfloat16", "self-draft, 1 sequence, bfloat16", _SELF, QUESTIONS[:1], dtype="bfloat16"),
    _row("lookup-b1", "prompt lookup, rewriting, 1 sequence", _LOOKUP, _REWRITE[:1]),
    _row("lookup-b8", "prompt lookup, rewriting, 8 sequences", _LOOKUP, _REWRITE),
]
