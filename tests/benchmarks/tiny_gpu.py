"""The workloads for a GPU, and what makes one of them tiny enough for a CPU."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workload import Context
from benchmarks.workloads import all_workloads
from benchmarks.workloads.gpu_models import OnGpu, WeightBound
from tests.benchmarks import tiny_configs

WORKLOADS = {workload.name: workload for workload in all_workloads() if workload.needs_gpu}


GENERATION = [name for name, workload in WORKLOADS.items() if isinstance(workload, OnGpu)]


CONFIGS = {**tiny_configs.CONFIGS, "bart": {**tiny_configs.CONFIGS["bart"], "max_position_embeddings": 64}}


ON_CPU = Context(threads=1)


def tiny(work: OnGpu, **changes) -> OnGpu:
    config = next(config for shape, config in CONFIGS.items() if work.shape.__name__.startswith(shape))
    sizes = {"batch": min(work.batch, 2), "length": min(work.length, 24), "new_tokens": 5, "repetitions": 1}
    if isinstance(work, WeightBound):
        changes["copy_bytes"] = 2**12
    return replace(work, **{"config": config, **sizes, **changes})
