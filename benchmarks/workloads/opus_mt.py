"""The shape of the opus-mt models: translation of sentences, in small batches, with a large vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.workload import NEVER_SLOWER, Generation, faster_on_cpu, faster_than
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
        further_backends=("fastgen-hooks", "ctranslate2"),
        targets=(NEVER_SLOWER, faster_on_cpu(times), faster_than("ctranslate2", than)),
    )


def _with_int8(work: Generation, times: float) -> Generation:
    """Also with weights in 8 bits, against CTranslate2."""
    further = (*work.further_backends, "ctranslate2-int8", "fastgen-int8")
    target = faster_than("ctranslate2-int8", times, "fastgen-int8")
    return replace(work, further_backends=further, targets=(*work.targets, target))


WORKLOADS = [
    _with_int8(_workload("b1", "1 sentence, 4 beams", 1, {"num_beams": 4}, 4.5, 3), 1.8),
    _workload("b8", "8 sentences, 4 beams", 8, {"num_beams": 4}, 3.5, 3.2),
    _workload("greedy-b1", "1 sentence, greedy", 1, {}, 3.5, 1.9),
]
