"""Workloads for an NVIDIA GPU, those that tell most first: a check that has to end may not come to the last ones."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workload import Workload
from benchmarks.workloads import fairseq_shapes
from benchmarks.workloads.gpu_models import BART_LARGE, DISTILBART, GPT2, LLAMA_7B, PROPHETNET, T5, UNILM
from benchmarks.workloads.half_precision import HALF_ON_GPU

_FAIRSEQ = next(workload for workload in fairseq_shapes.WORKLOADS if workload.name == "fairseq-wmt-b64")

WORKLOADS: list[Workload] = [
    BART_LARGE,
    HALF_ON_GPU,
    LLAMA_7B,
    GPT2,
    T5,
    DISTILBART,
    PROPHETNET,
    UNILM,
    replace(
        _FAIRSEQ,
        name="gpu-fairseq-wmt-b64",
        title=f"{_FAIRSEQ.title}, fp16",
        dtype="float16",
        needs_gpu=True,
        targets=(),
        repetitions=2,
    ),
]
