"""Llama 3.2 1B shape: grouped queries, rotary positions, and a model that needs 5 GB in fp32."""

from __future__ import annotations

from benchmarks.workload import NEVER_SLOWER, Generation, faster_on_cpu
from benchmarks.workloads.shapes import llama_1b

WORKLOADS = [
    Generation(
        name="llama-1b-beam-b4-p128",
        title="Llama-1B, batch 4, 4 beams, prompt 128",
        shape=llama_1b,
        batch=4,
        length=128,
        new_tokens=32,
        options={"num_beams": 4, "do_sample": False},
        targets=(NEVER_SLOWER,),
    ),
    Generation(
        name="llama-1b-greedy-b16-p128",
        title="Llama-1B, batch 16, greedy, prompt 128",
        shape=llama_1b,
        batch=16,
        length=128,
        new_tokens=32,
        options={"do_sample": False},
        further_backends=("transformers-compile",),
        targets=(NEVER_SLOWER, faster_on_cpu(2.2)),
    ),
]
