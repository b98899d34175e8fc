"""The workloads: every module here has a list `WORKLOADS`. They run in the order of `_MODULES`."""

from __future__ import annotations

from importlib import import_module

from benchmarks.workload import Workload

# Slow ones come last, so that an interrupted run has most of the results.
_MODULES = (
    "gpu_models",
    "first_call",
    "half_precision",
    "smollm2_chat",
    "speculation",
    "ordinary_session",
    "continuous",
    "encoders",
    "models",
    "fairseq_shapes",
    "commands",
)


def all_workloads() -> list[Workload]:
    """Returns every workload, in the order in which they run."""
    return [workload for name in _MODULES for workload in import_module(f"{__name__}.{name}").WORKLOADS]
