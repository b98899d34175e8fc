"""The part of a run that is the same for every command: from the first record to the report."""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fastgen
from fastgen.pipeline.batches import BatchResult, BatchStage
from fastgen.pipeline.errors import SetupError, StrictError
from fastgen.pipeline.identity import environment, identity
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.layouts import Layout
from fastgen.pipeline.loading import Loaded
from fastgen.pipeline.planner import Batch, Prepared, Resumed, Rules, Window, plan
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.records import BadRecord, Record, Result
from fastgen.pipeline.settings import DataOptions
from fastgen.pipeline.stages import Timing, run_stages
from fastgen.pipeline.writers import FileOutput, Output, StreamOutput, write_json

_RESUMED_ELSEWHERE = (
    "resumed in another environment ({}): the last digits of numbers, and outputs whose best two candidates are nearly "
    "equal, may not be those of a run without interruption"
)
Results = Callable[[], list[Result]]
"""The results of a batch, which may have to be waited for."""


@dataclass
class RunReport:
    """What a run did. Counts are of the whole output; rates and seconds are of this run, which may have resumed one."""

    samples: int
    """Records in the output."""
    skipped: int
    """Records that were bad, and are in the error file."""
    tokens: int
    """Generated tokens, of all returned sequences; of a command that does not generate, those of the inputs."""
    metrics: dict[str, float]
    """The value of each metric that was asked for, by name, on the scale of the package that computes it."""
    metrics_samples: int
    """Records that the metrics are over."""
    seconds: dict[str, float]
    """`load`: imports and model; `generate`: from the first record read to the last batch out of the model;
    `model`: spent in calls of the model; `waiting_for_input` and `waiting_for_output`: the model stage had nothing
    to do, or could not hand over what it had done; `finish`: from then until the output was in place."""
    samples_per_second: float
    """Records of this run over the seconds of `generate`."""
    tokens_per_second: float
    """The same of tokens."""
    waiting_for_input_share: float
    """The part of `generate`, 0 to 1, in which the model waited for input."""
    waiting_for_output_share: float
    """The part in which it waited for what comes behind it."""
    resumed_samples: int
    """Records that an interrupted run had finished."""
    batches: int
    """Calls of the model."""
    batch_size: int
    """Rows in a batch, at most."""
    max_tokens: int | None
    """Input tokens in a batch, at most; None without a limit."""
    out_of_memory: int
    """How many batches did not fit in memory and were split."""
    truncated: int
    """How many inputs were cut to what the model takes, in a command that counts them."""
    peak_memory_bytes: int | None
    """The largest resident set of the process, worker processes not counted."""
    peak_device_memory_bytes: int | None
    """The most that torch had allocated on the GPU; None on a CPU."""
    model: str
    """The directory or name that it was loaded from."""
    device: str
    """Where it ran."""
    dtype: str
    """The type of its weights."""
    errors_file: str | None = None
    """The file of skipped records, or None if there are none."""
    notes: list[str] = field(default_factory=list)
    """What else there is to know, such as that the run was resumed in another environment."""
    versions: dict[str, str] = field(default_factory=dict)
    """Releases of Python, torch, Transformers and FastGen."""
    fastgen: dict[str, Any] = field(default_factory=dict)
    """What `fastgen.stats()` counted, under `stats`."""


@dataclass
class Job:
    """What a command does with its records: the parts of a run in which commands differ."""

    loaded: Loaded
    layout: Layout
    prepare: Callable[[Sequence[Record]], list[Prepared | BadRecord]]
    """Turns texts into token ids, in a thread ahead of the model."""
    stage: BatchStage[Any]
    post: Callable[[BatchResult[Any]], Results]
    """Begins to turn what the model returned into results, in a thread behind it. Failed rows are left out."""
    batch_size: Callable[[], tuple[int, int | None]]
    """Inputs of a batch, and their tokens where these are limited. A resumed run keeps those it began with."""
    rules: Mapping[str, Any]
    """How else batches are cut: arguments of `Rules`."""


def open_output(settings: DataOptions, inputs: Inputs, job: Job) -> Output:
    """The output that the settings name."""
    if settings.to_stdout:
        return StreamOutput(settings, job.layout)
    decides = identity(settings, inputs, job.loaded) | {"rules": dict(job.rules)}
    return FileOutput(settings, decides, environment(job.loaded.device), job.layout)


def run_through(settings: DataOptions, inputs: Inputs, job: Job, output: Output, start: float) -> RunReport:
    """All of a run from the first record to the report.

    Args:
        start: when the run began, by `time.perf_counter`.
    """
    import torch
    import transformers

    journal = output.journal
    decided = journal.plan if journal else None
    fresh = decided is None
    if decided is None:
        rows, tokens = job.batch_size()
        decided = {"batch_size": rows, "max_tokens": tokens}
    notes = []
    if journal:
        if journal.differences:
            notes.append(_RESUMED_ELSEWHERE.format("; ".join(journal.differences)))
            print(notes[0], file=sys.stderr)
        journal.begin(decided)
    rules = Rules(decided["batch_size"], decided["max_tokens"], **job.rules)
    resumed, already = (journal.resumed, journal.count) if journal else (Resumed(), 0)

    def on_bad(bad: BadRecord) -> None:
        if settings.strict:
            raise StrictError(f"{settings.input}, line {bad.line}: {bad.problem.message}")

    stage, device = job.stage, job.loaded.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    loading = time.perf_counter() - start
    progress = Progress("samples", inputs.total, already, settings.quiet)
    steps = Steps(job, output, progress, on_bad)
    try:
        timing = steps.run(plan(inputs, job.prepare, rules, resumed, on_bad))
        stage.finish()
    except SetupError:
        if fresh and steps.samples == 0:
            output.drop()
        raise
    finally:
        progress.close()
    finishing = time.perf_counter()
    totals = output.finish()
    finish = time.perf_counter() - finishing + timing.draining
    share = 1 / timing.wall if timing.wall else 0.0
    scores = totals.metrics.scores()
    report = RunReport(
        samples=totals.samples,
        skipped=totals.skipped,
        tokens=totals.tokens,
        metrics=scores,
        metrics_samples=totals.metrics.samples,
        seconds={
            "load": loading,
            "generate": timing.wall,
            "model": stage.seconds,
            "waiting_for_input": timing.waiting_for_input,
            "waiting_for_output": timing.waiting_for_output,
            "finish": finish,
        },
        samples_per_second=steps.samples * share,
        tokens_per_second=steps.tokens * share,
        waiting_for_input_share=timing.waiting_for_input * share,
        waiting_for_output_share=timing.waiting_for_output * share,
        resumed_samples=already,
        batches=steps.batches,
        batch_size=rules.batch_size,
        max_tokens=rules.max_tokens,
        out_of_memory=stage.out_of_memory,
        truncated=totals.truncated,
        peak_memory_bytes=_peak_memory(),
        peak_device_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        model=settings.model,
        device=str(device),
        dtype=str(job.loaded.model.dtype).removeprefix("torch."),
        errors_file=str(settings.errors_path) if totals.skipped and not settings.to_stdout else None,
        notes=notes,
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__),
        fastgen={"stats": fastgen.stats()},
    )
    if score_path := settings.written_beside().get("the score path"):
        counts = {"samples": totals.metrics.samples, "skipped": totals.skipped}
        write_json(score_path, counts | scores, journal)
    if settings.report:
        write_json(settings.report, dataclasses.asdict(report), journal)
    output.complete()
    return report


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # not POSIX
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class Steps:
    """What the stages of one run do, and what came out of them. A window goes through all of them as it is."""

    job: Job
    output: Output
    progress: Progress
    on_bad: Callable[[BadRecord], None]
    samples: int = 0
    tokens: int = 0
    batches: int = 0
    _start: float = field(default_factory=time.perf_counter)

    def run(self, plan: Iterator[Window | Batch]) -> Timing:
        return run_stages(plan, self._compute, self._post, self._record, self._report)

    def _compute(self, item: Window | Batch) -> Window | BatchResult[Any]:
        return item if isinstance(item, Window) else self.job.stage.run(item)

    def _report(self, item: Window | BatchResult[Any]) -> None:
        if isinstance(item, BatchResult):
            self.batches += 1
            for row, problem in item.failures:
                self.on_bad(row.record.skipped(problem))

    def _post(self, item: Window | BatchResult[Any]) -> Window | tuple[BatchResult[Any], Results]:
        return item if isinstance(item, Window) else (item, self.job.post(item))

    def _record(self, item: Window | tuple[BatchResult[Any], Results]) -> None:
        if isinstance(item, Window):
            self.output.window(item)
            self._add(len(item.bad))
            return
        done, waited_for = item
        results = waited_for()
        failed = [result for result in results if "error" in result]
        tokens = sum(self.job.layout.tokens(result) for result in results if "error" not in result)
        self.samples += len(results) - len(failed)
        self.tokens += tokens
        results += [row.record.skipped(problem).result() for row, problem in done.failures]
        self.output.batch(done.batch.window, done.batch.index, results)
        self._add(len(results))
        for result in failed:
            self.on_bad(BadRecord.of(result))

    def _add(self, samples: int) -> None:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self.progress.add(samples, f"{self.tokens / seconds:.0f} tokens/s")
