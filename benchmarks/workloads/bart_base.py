"""BART-base shape: beam search with long sources, as in summarisation, and what more beams cost there."""

from __future__ import annotations

from benchmarks.record import Target
from benchmarks.workload import NEVER_SLOWER, Generation, faster_on_cpu, faster_than
from benchmarks.workloads.beam_cost import BeamCost
from benchmarks.workloads.shapes import bart_base

_OPTIONS = {"num_beams": 4, "no_repeat_ngram_size": 3, "do_sample": False}
_KV_MEMORY = Target("K/V memory, as a part of unpatched", "kv_ratio", at_most=0.3)
_INT8 = faster_than("ctranslate2-int8", 1.3, "fastgen-int8")

WORKLOADS = [
    Generation(
        name="bart-base-b4-s512",
        title="BART-base, batch 4, 4 beams, source 512",
        shape=bart_base,
        batch=4,
        length=512,
        new_tokens=64,
        options=_OPTIONS,
        further_backends=("ctranslate2", "ctranslate2-int8", "fastgen-int8"),
        quick=True,
        quick_memory=True,
        targets=(
            NEVER_SLOWER,
            faster_on_cpu(4.2),
            faster_than("ctranslate2", 2.4),
            _INT8,
        ),
    ),
    Generation(
        name="bart-base-b16-s1024",
        title="BART-base, batch 16, 4 beams, source 1024",
        shape=bart_base,
        batch=16,
        length=1024,
        new_tokens=64,
        options=_OPTIONS,
        further_backends=("ctranslate2", "ctranslate2-int8", "fastgen-int8", "openvino", "fairseq", "fastgen-fairseq"),
        targets=(
            Target("times as fast as unpatched", "ratio", at_least=3.2),
            faster_on_cpu(8),
            faster_than("ctranslate2", 1.5),
            faster_than("openvino", 3),
            _INT8,
            Target("in FairSeq, times as fast as FairSeq alone", "fairseq/fastgen-fairseq", at_least=2.5),
            _KV_MEMORY,
        ),
    ),
    BeamCost(
        name="bart-base-beam-cost",
        title="BART-base, batch 4, 8 beams and 1, source 1024",
        work=Generation(
            name="bart-base-b4-s1024",
            title="BART-base, batch 4, source 1024",
            shape=bart_base,
            batch=4,
            length=1024,
            new_tokens=64,
            options={**_OPTIONS, "num_beams": 1},
        ),
        targets=(Target("time at 8 beams over time at 1", "cost fastgen", at_most=3.5), NEVER_SLOWER),
    ),
]
