"""What beams cost: the same work with one beam and with several, on every backend.

A backend is named after what does the work and the number of beams: "fastgen, 8 beams". The metric "cost fastgen" is
the time with the most beams over that with the fewest.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from benchmarks import backends
from benchmarks.backends import BASELINE, SUBJECT, Backend, Job
from benchmarks.record import Record
from benchmarks.workload import (
    Context,
    Generation,
    Outcome,
    Workload,
    check_code,
    check_tokens,
    open_backends,
    time_backends,
)


@dataclass(frozen=True, kw_only=True)
class BeamCost(Workload):
    """Attributes: the `work`, and the numbers of `beams`, the fewest first."""

    work: Generation
    beams: tuple[int, ...] = (1, 8)

    group = "beams"

    def new_record(self) -> Record:
        record = super().new_record()
        record.baseline, record.subject = (_name(backend, self.beams[-1]) for backend in (BASELINE, SUBJECT))
        return record

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {**self.work.parameters(), "beams": list(self.beams)}
        context.log("building the model")
        model, inputs = self.work.build(context.device)
        jobs: dict[str, tuple[Backend, Job]] = {}
        for name in context.chosen_backends():
            for beams in self.beams:
                work = replace(self.work, options={**self.work.options, "num_beams": beams})
                jobs[_name(name, beams)] = (backends.make(name), Job(work, model, inputs, torch.get_num_threads()))
        with ExitStack() as stack:
            ready = open_backends(stack, jobs, context, record)
            outcomes = time_backends(ready, self.repetitions_in(context), context, record)
        record.compare()
        check_code(record, ready, outcomes)
        self._check_tokens(record, ready, outcomes)
        self._costs(record)

    def _check_tokens(self, record: Record, ready: dict[str, Backend], outcomes: dict[str, list[Outcome]]) -> None:
        """Against the baseline with as many beams."""
        for beams in self.beams:
            names = [name for name in outcomes if name.endswith(_name("", beams))]
            check_tokens(record, ready, {name: outcomes[name] for name in names})

    def _costs(self, record: Record) -> None:
        for name in backends.ALL:
            few, many = (record.backends.get(_name(name, beams)) for beams in (self.beams[0], self.beams[-1]))
            if few and many:
                record.metrics[f"cost {name}"] = many["median"] / few["median"]
        costs = [f"{cost:.2f} ({name[5:]})" for name, cost in record.metrics.items() if name.startswith("cost ")]
        record.notes.append(f"time at {self.beams[-1]} beams over time at {self.beams[0]}: {', '.join(costs)}")


def _name(backend: str, beams: int) -> str:
    return f"{backend}, {beams} beam{'s' if beams > 1 else ''}"
