"""BART-base shape: beam search with long sources, as in summarisation."""

from __future__ import annotations

from benchmarks.record import Target
from benchmarks.workload import NEVER_SLOWER, Generation
from benchmarks.workloads.shapes import bart_base

_OPTIONS = {"num_beams": 4, "no_repeat_ngram_size": 3, "do_sample": False}
_KV_MEMORY = Target("K/V memory, as a part of unpatched", "kv_ratio", at_most=0.3)

WORKLOADS = [
    Generation(
        name="bart-base-b4-s512",
        title="BART-base, batch 4, 4 beams, source 512",
        shape=bart_base,
        batch=4,
        length=512,
        new_tokens=64,
        options=_OPTIONS,
        quick=True,
        quick_memory=True,
        targets=(NEVER_SLOWER,),
    ),
    Generation(
        name="bart-base-b16-s1024",
        title="BART-base, batch 16, 4 beams, source 1024",
        shape=bart_base,
        batch=16,
        length=1024,
        new_tokens=64,
        options=_OPTIONS,
        targets=(Target("times as fast as unpatched", "ratio", at_least=3.2), _KV_MEMORY),
    ),
]
