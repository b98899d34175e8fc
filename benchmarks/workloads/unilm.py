"""UniLM-base: beam search behind a source that the beams share, against the plain cached loop."""

from __future__ import annotations

from typing import Any

from benchmarks.record import Target
from benchmarks.workload import Generation, faster_on_cpu


def unilm_base(**changes: Any) -> Any:
    """UniLM v1, base: 12 layers of width 768, vocabulary of 28,996."""
    from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM

    return UniLMForSeq2SeqLM(UniLMConfig(**changes))


WORKLOADS = [
    Generation(
        name="unilm-b4-s464",
        title="UniLM-base, batch 4, 4 beams, source 464",
        shape=unilm_base,
        batch=4,
        length=464,
        new_tokens=48,
        options={"num_beams": 4, "do_sample": False},
        targets=(Target("times as fast as unpatched", "ratio", at_least=3.0), faster_on_cpu(6)),
    )
]
