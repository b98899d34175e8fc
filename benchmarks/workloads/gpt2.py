"""GPT-2 shape: beam search behind a long prompt."""

from __future__ import annotations

from benchmarks.record import Target
from benchmarks.workload import Generation, faster_on_cpu
from benchmarks.workloads.shapes import gpt2

WORKLOADS = [
    Generation(
        name="gpt2-b4-p512",
        title="GPT-2, batch 4, 4 beams, prompt 512",
        shape=gpt2,
        batch=4,
        length=512,
        new_tokens=64,
        options={"num_beams": 4, "do_sample": False},
        quick=True,
        further_backends=("ctranslate2",),
        targets=(Target("times as fast as unpatched", "ratio", at_least=4.0), faster_on_cpu(9)),
    )
]
