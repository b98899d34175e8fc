"""The shape of the opus-mt models: translation of sentences, in small batches, with a large vocabulary."""

from __future__ import annotations

from typing import Any

from benchmarks.workload import NEVER_SLOWER, Generation, faster_on_cpu, faster_than_ctranslate2
from benchmarks.workloads.shapes import opus_mt


def _workload(name: str, title: str, batch: int, options: dict[str, Any], times: float, than: float) -> Generation:
    return Generation(
        name=f"opus-mt-{name}",
        title=f"opus-mt, {title}, source 32",
        shape=opus_mt,
        batch=batch,
        length=32,
        new_tokens=32,
        options={"do_sample": False, **options},
        repetitions=7,
        memory=False,
        further_backends=("fastgen-tier1", "ctranslate2"),
        targets=(NEVER_SLOWER, faster_on_cpu(times), faster_than_ctranslate2(than)),
    )


WORKLOADS = [
    _workload("b1", "1 sentence, 4 beams", 1, {"num_beams": 4}, 4.5, 3),
    _workload("b8", "8 sentences, 4 beams", 8, {"num_beams": 4}, 3.5, 3.2),
    _workload("greedy-b1", "1 sentence, greedy", 1, {}, 3.5, 1.9),
]
