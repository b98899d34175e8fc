"""Runs batches on a Ray cluster: workers hold the model, and Ray Data distributes the batches.

The command's process reads, tokenises and plans as usual, and writes results in the order of the plan. A batch's result
does not depend on other batches, so the output does not show which worker ran it, nor how often: the batches of a lost
worker run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fastgen
from fastgen import counters, patching
from fastgen import settings as process_settings
from fastgen.pipeline.batches import Batch, BatchResult, BatchStage, Window
from fastgen.pipeline.errors import PipelineError, SetupError, explained, one_line
from fastgen.pipeline.generation.loading import LoadedModel, load
from fastgen.pipeline.generation.model import stage_for
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.journal import content

LOCAL = "local"
"""The address of a cluster on this machine, which lives as long as the run."""


@dataclass(frozen=True)
class Job:
    """What makes a worker compute like the command's process.

    Attributes:
        process: FastGen's settings.
        is_active: whether FastGen is enabled.
        threads: torch's number of threads.
        on_gpu: whether the model is on a GPU.
        content: digests of the model.
    """

    settings: RunOptions
    process: dict[str, Any]
    is_active: bool
    threads: int
    on_gpu: bool
    content: dict[str, str]

    @classmethod
    def of(cls, settings: RunOptions, loaded: LoadedModel) -> Job:
        import torch

        return cls(
            settings=dataclasses.replace(settings, quiet=True),
            process=dict(vars(process_settings.current())),
            is_active=patching.is_active(),
            threads=torch.get_num_threads(),
            on_gpu=loaded.device.type == "cuda",
            content=content(loaded.model, loaded.tokenizer),
        )


@dataclass(frozen=True)
class Made:
    """A batch that a worker has run: its result, and what it adds to the seconds and counts of the command."""

    done: BatchResult[Any]
    seconds: float
    out_of_memory: int
    stats: dict[str, Any]


class Worker:
    """Holds the model in a process of its own, and runs batches. Returns its failures, which the command raises."""

    def __init__(self, job: Job) -> None:
        import torch

        torch.set_num_threads(job.threads)
        process_settings.change(**job.process)
        if not job.is_active:
            fastgen.disable()
        self._failure: PipelineError | None = None
        try:
            loaded = load(job.settings)
            if content(loaded.model, loaded.tokenizer) != job.content:
                raise SetupError(f"a worker finds another model in {job.settings.model} than the command does")
            self._stage = stage_for(loaded, job.settings)
        except Exception as error:
            self._failure = error if isinstance(error, PipelineError) else SetupError(f"a worker: {one_line(error)}")

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"made": [pickle.dumps(self._run(pickle.loads(batch))) for batch in rows["batch"]]}

    def _run(self, batch: Batch) -> PipelineError | Made:
        if self._failure is not None:
            return self._failure
        stage = self._stage
        seconds, out_of_memory = stage.seconds, stage.out_of_memory
        counters.reset()
        try:
            done = stage.run(batch)
        except PipelineError as error:
            return error
        done.told = 0  # the worker shows no progress
        return Made(done, stage.seconds - seconds, stage.out_of_memory - out_of_memory, counters.snapshot())


@contextlib.contextmanager
def cluster(address: str, workers: int, log_to_driver: bool = False) -> Iterator[None]:
    """A context in which Ray is connected to a cluster, unless the program has done so before.

    Args:
        workers: least number of CPUs of a cluster on this machine.
        log_to_driver: show here what processes of the cluster write to standard error.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    if address == LOCAL:
        options |= {"num_cpus": max(workers, os.cpu_count() or 1), "include_dashboard": False}
    with explained(f"cannot connect to the Ray cluster {address}"):
        ray.init(address=address, **options)
    try:
        yield
    finally:
        ray.shutdown()


def computed(
    planned: Iterator[Window | Batch | BatchResult[Any]], job: Job, workers: int, stage: BatchStage[Any]
) -> Iterator[Window | BatchResult[Any]]:
    """Yields the plan with each batch run by a worker, in the plan's order. Makes the whole plan first.

    Args:
        stage: the command's stage, which counts what the workers have done.

    Raises:
        PipelineError: what a worker has failed with.
    """
    import pyarrow
    import ray

    windows: list[Window | None] = []  # None stands for a batch
    batches = []
    for item in planned:
        windows.append(item if isinstance(item, Window) else None)
        if isinstance(item, Batch):
            batches.append(ray.put(pyarrow.table({"batch": [pickle.dumps(item)]})))
    stage.state = f"{workers} workers"
    results = _results(batches, job, min(workers, len(batches)))
    for window in windows:
        if window is not None:
            yield window
            continue
        made = next(results)
        if isinstance(made, PipelineError):
            raise made
        counters.merge(made.stats)
        yield stage.adopt(made.done, made.seconds, made.out_of_memory)


def _results(batches: list[Any], job: Job, workers: int) -> Iterator[PipelineError | Made]:
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    data = from_arrow_refs(batches).map_batches(
        Worker,
        fn_constructor_args=(job,),
        compute=ActorPoolStrategy(size=workers),
        batch_size=1,
        num_cpus=1,
        num_gpus=int(job.on_gpu),
    )
    for row in data.iter_rows():
        yield pickle.loads(row["made"])
