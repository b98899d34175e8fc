"""`fastgen-generate` over a file, with Moses detokenising in worker processes: the whole of a run, end to end.

The model is the small trained one of the examples, its inputs are the held-out sources, repeated as often as needed.
Each run is the command in a process of its own, and its times are those of its report: from the first record read until
the output is in place, without loading the model. Backends:

* transformers: with --no-fastgen;
* fastgen: the command as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.backends import BASELINE, SUBJECT
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, summary
from benchmarks.memory import child_environment
from benchmarks.record import Record, Target
from benchmarks.workload import NEVER_SLOWER, Context, Workload

_DETOKENIZER = ("--detokenizer", "moses", "--lang", "en")


class _Run(NamedTuple):
    report: dict[str, Any]
    output: bytes


@dataclass(frozen=True, kw_only=True)
class Pipeline(Workload):
    """The command, timed end to end.

    Attributes:
        outputs: how many to make.
        options: of the command.
        model, inputs: what it is run on.
    """

    outputs: int
    options: tuple[str, ...] = ("--batch-size", "16")
    model: Path = ROOT / "examples" / "models" / "kjv-bart"
    inputs: Path = ROOT / "examples" / "data" / "heldout.src.txt"

    group = "pipeline"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {"outputs": self.outputs, "options": [*_DETOKENIZER, *self.options]}
        for path in (self.model, self.inputs):
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: this workload needs the model and the data of examples/")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "input.txt")
            lines = self.inputs.read_text(encoding="utf-8").splitlines()
            source.write_text("".join(f"{line}\n" for line in islice(cycle(lines), self.outputs)), encoding="utf-8")

            def run_of(*options: str) -> Callable[[], tuple[float, _Run]]:
                return lambda: self._run_command(context, Path(folder), source, options)

            runs = {BASELINE: run_of("--no-fastgen"), SUBJECT: run_of()}
            results = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in runs]) for name, runs in results.items()}
        record.compare()
        patched = [run for _, run in results[SUBJECT]]
        self._check(record, [run for _, run in results[BASELINE]], patched)
        # The largest of the runs: a promise about waiting has to hold in each.
        record.metrics["waiting_percent"] = max(100 * run.report["waiting_for_output_share"] for run in patched)
        record.metrics["held_up_percent"] = max(100 * _held_up(run.report["seconds"]) for run in patched)

    def _run_command(
        self, context: Context, folder: Path, source: Path, options: tuple[str, ...]
    ) -> tuple[float, _Run]:
        output, report = folder / "output.txt", folder / "report.json"
        command = [sys.executable, "-m", "fastgen_cli.generate", str(self.model), str(source), str(output)]
        command += [*_DETOKENIZER, *options, *self.options, "--device", str(context.device)]
        command += ["--report", str(report), "--overwrite", "--quiet"]
        done = subprocess.run(command, env=child_environment(context.threads), cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"fastgen-generate ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
        found = json.loads(report.read_text(encoding="utf-8"))
        return found["seconds"]["generate"] + found["seconds"]["finish"], _Run(found, output.read_bytes())

    def _check(self, record: Record, unpatched: list[_Run], patched: list[_Run]) -> None:
        record.identical = True
        for run in (*unpatched, *patched):
            lines = run.output.splitlines()
            if len(lines) != self.outputs:
                record.errors.append(f"{len(lines)} outputs instead of {self.outputs}")
            if run.output != unpatched[0].output:
                record.identical = False
                differing = sum(a != b for a, b in zip(lines, unpatched[0].output.splitlines(), strict=False))
                record.notes.append(f"{differing} of {self.outputs} outputs differ")
        record.accelerated = True
        for run in patched:
            stats = run.report["fastgen"].get("stats") or {}
            record.count_fallbacks(stats)
            counts = stats.get("transformers.generate", {})
            if not counts.get("accelerated") or counts.get("fallback"):
                record.accelerated = False


def _held_up(seconds: dict[str, float]) -> float:
    """The part of a run in which post-processing, not the model, was what it went on for.

    That is the time the model waited to hand over a batch, and the time after its last batch until the output was
    there: with queues as long as the input, a pipeline that cannot keep up would show in the second alone.
    """
    return (seconds["waiting_for_output"] + seconds["finish"]) / (seconds["generate"] + seconds["finish"])


WORKLOADS = [
    Pipeline(
        name="pipeline-100",
        title="fastgen-generate, 100 outputs, Moses",
        outputs=100,
        quick=True,
        quick_repetitions=1,
        targets=(NEVER_SLOWER,),
    ),
    Pipeline(
        name="pipeline-2000",
        title="fastgen-generate, 2,000 outputs, Moses",
        outputs=2000,
        repetitions=1,
        targets=(
            Target("% of the time that the model waited for post-processing", "waiting_percent", at_most=2),
            Target(
                "% of the time that post-processing held the run up, its end included", "held_up_percent", at_most=2
            ),
            NEVER_SLOWER,
        ),
    ),
]
