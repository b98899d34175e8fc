"""T5-base shape: beam search with sources of a sentence or two, as in translation; relative position biases."""

from __future__ import annotations

from benchmarks.workload import NEVER_SLOWER, Generation, faster_on_cpu, faster_than
from benchmarks.workloads.shapes import t5_base

WORKLOADS = [
    Generation(
        name="t5-base-b16-s128",
        title="T5-base, batch 16, 4 beams, source 128",
        shape=t5_base,
        batch=16,
        length=128,
        new_tokens=64,
        options={"num_beams": 4, "do_sample": False},
        further_backends=("transformers-compile", "ctranslate2"),
        targets=(NEVER_SLOWER, faster_on_cpu(3.6), faster_than("ctranslate2", 1.7)),
    )
]
