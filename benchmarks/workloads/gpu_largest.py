"""The same models, each backend with the largest batch that it has memory for.

Memory grows with the batch by the same amount for every input, so two runs with few inputs tell how much, and how many
fit into nine tenths of what is free. Should that be too many all the same, a quarter less is tried. Backends run one
after another, since none leaves memory for the next. Times are seconds per input.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import fastgen
from benchmarks import backends, memory
from benchmarks.backends import SUBJECT, Backend, Job
from benchmarks.budget import Budget
from benchmarks.measure import summary, timed
from benchmarks.record import Record
from benchmarks.workload import CAPTURED_STEP, Context, Outcome, Workload, check_code
from benchmarks.workloads.gpu_models import OnGpu
from fastgen.memory import is_out
from fastgen.pipeline.memory import free_memory

_OF_FREE = 0.9


@dataclass(frozen=True, kw_only=True)
class LargestBatch(Workload):
    """Attributes:
    work: what is done with every batch.
    probes: the two batches that tell how much memory an input takes.
    most: inputs of a batch that are not exceeded, whatever fits; more are no faster, and take long.
    """

    work: OnGpu
    probes: tuple[int, int] = (8, 24)
    most: int = 1024
    needs_gpu: bool = True
    repetitions: int = 1

    group = "generation"
    entry_point = CAPTURED_STEP

    def run(self, context: Context, record: Record) -> None:
        batches: dict[str, int] = {}
        record.parameters = {**self.work.parameters(), "batches": batches, "most": self.most}
        del record.parameters["batch"]
        model, _ = self.work.build(context.device)
        budget = Budget(self.seconds)
        ready: dict[str, Backend] = {}
        outcomes: dict[str, list[Outcome]] = {}
        for name in context.chosen_backends():
            backend = ready[name] = backends.make(name)
            with budget.limit(name):
                batches[name] = self.largest(backend, model, context)
                outcomes[name] = self._time(backend, model, batches, context, record)
            context.log(f"{name}: {batches[name]} inputs, {record.backends[name]['median'] * 1e3:.3g} ms each")
        record.compare(backends.pairs(ready.values()))
        record.metrics |= {f"batch {name}": float(batch) for name, batch in batches.items()}
        check_code(record, ready, outcomes)
        found = [
            f"{name} {batch}" + " (the most that are tried)" * (batch >= self.most) for name, batch in batches.items()
        ]
        record.notes.append(f"inputs of a batch: {', '.join(found)}")

    def largest(self, backend: Backend, model: Any, context: Context) -> int:
        """Inputs of the largest batch that should fit."""
        found = []
        for batch in self.probes:
            job = self._job(model, batch)
            backend.setup(job)
            found.append(_bytes_of(lambda: backend.run(self.work.new_tokens), context.device))
            _let_go(backend)
        (few, many), (below, above) = self.probes, found
        each = max(above - below, 1) / (many - few)
        fit = int((_OF_FREE * free_memory(context.device) - below) / each) + few
        # Graphs are made for batches of these sizes.
        return max(1, min(fit // 16 * 16, self.most)) if fit >= 16 else max(1, fit)

    def _time(
        self, backend: Backend, model: Any, batches: dict[str, int], context: Context, record: Record
    ) -> list[Outcome]:
        """Times the backend with its batch, or with as many inputs of it as do fit."""
        while True:
            batch = batches[backend.name]
            try:
                return self._time_batch(backend, self._job(model, batch), context, record)
            except Exception as error:
                if batch == 1 or not is_out(error):
                    raise
            # Outside of the handler: the exception held the tensors of its frames.
            context.log(f"{backend.name}: {batch} inputs do not fit")
            batches[backend.name] = max(1, batch * 3 // 4)
            _let_go(backend)

    def _time_batch(self, backend: Backend, job: Job, context: Context, record: Record) -> list[Outcome]:
        peaks = memory.DevicePeaks(context.device)
        outcomes, seconds = [], []
        try:
            with peaks.of(backend.name):
                backend.setup(job)
                backend.warm_up()
            for _ in range(self.repetitions_in(context)):
                fastgen.reset_stats()
                with peaks.of(backend.name):
                    taken, tokens = timed(lambda: backend.run(self.work.new_tokens), context.device)
                seconds.append(taken / job.workload.batch)
                outcomes.append(Outcome(tokens.cpu(), fastgen.stats()))
        finally:
            _let_go(backend)
        record.backends[backend.name] = summary(seconds)
        if peaks.bytes:
            record.memory[backend.name] = {"peak_bytes": peaks.bytes[backend.name], "peak_method": peaks.method}
        return outcomes

    def _job(self, model: Any, batch: int) -> Job:
        work = replace(self.work, batch=batch)
        return Job(work, model, work.make_inputs(model), torch.get_num_threads())


def _bytes_of(run: Callable[[], Any], device: torch.device) -> int:
    with memory.PeakMemory(device) as peak:
        run()
    return peak.bytes


def _let_go(backend: Backend) -> None:
    """Gives back what the backend has kept between its runs."""
    backend.close()
    if backend.name == SUBJECT:
        # Graphs and their buffers go when FastGen is turned off.
        fastgen.disable()
        fastgen.enable()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(work: OnGpu, seconds: float, **changes: Any) -> LargestBatch:
    """The workload that does `work` with the largest batches."""
    return LargestBatch(
        name=work.name.replace(f"b{work.batch}", "largest"),
        title=work.title.replace(f"batch {work.batch}", "largest batch each"),
        work=work,
        seconds=seconds,
        **{"targets": work.targets, **changes},
    )
