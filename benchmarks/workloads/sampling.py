"""Several samples for each prompt: what beam search gains from a shared prompt, parallel sampling gains too."""

from __future__ import annotations

from benchmarks.workload import NEVER_SLOWER, Generation
from benchmarks.workloads.shapes import gpt2

WORKLOADS = [
    Generation(
        name="gpt2-sample4-b4-p512",
        title="GPT-2, batch 4, 4 samples each, prompt 512",
        shape=gpt2,
        batch=4,
        length=512,
        new_tokens=64,
        options={"do_sample": True, "top_k": 50, "num_return_sequences": 4},
        targets=(NEVER_SLOWER,),
    )
]
