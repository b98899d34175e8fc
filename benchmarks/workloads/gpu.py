"""Workloads for an NVIDIA GPU, those that tell most first: a check that has to end may not come to the last ones."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workload import Workload
from benchmarks.workloads import fairseq_shapes
from benchmarks.workloads.gpu_ablation import ablation
from benchmarks.workloads.gpu_host_time import HOST_TIME
from benchmarks.workloads.gpu_kernels import ATTENTION, NO_REPEAT_NGRAM
from benchmarks.workloads.gpu_largest import largest
from benchmarks.workloads.gpu_models import (
    BART_LARGE,
    COMPILED,
    DISTILBART,
    GPT2,
    LLAMA_7B,
    PROPHETNET,
    T5,
    UNILM,
    OnGpu,
    ten_times,
)
from benchmarks.workloads.half_precision import HALF_ON_GPU


def _compiled(work: OnGpu, *backends: str) -> OnGpu:
    """The same beside what has to be compiled first, which takes a minute or more."""
    return replace(
        work,
        name=f"{work.name}-compiled",
        title=f"{work.title}, beside compiled code",
        gpu_backends=backends,
        repetitions=1,
        seconds=150,
        targets=(),
    )


_FAIRSEQ = next(workload for workload in fairseq_shapes.WORKLOADS if workload.name == "fairseq-wmt-b64")

WORKLOADS: list[Workload] = [
    BART_LARGE,
    NO_REPEAT_NGRAM,
    ATTENTION,
    HOST_TIME,
    HALF_ON_GPU,
    LLAMA_7B,
    largest(BART_LARGE, seconds=60, targets=(ten_times(),)),
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
    ablation(seconds=70),
    _compiled(LLAMA_7B, COMPILED, "compiled-loop"),
    _compiled(BART_LARGE, COMPILED),
    *(largest(work, seconds=45) for work in (GPT2, T5, DISTILBART, PROPHETNET, UNILM)),
]
