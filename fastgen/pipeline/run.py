"""One run of any command: checks everything that can be checked, loads the model, works in stages, and sums up.

    Run       these steps in their order, and the report
    DataRun   a run over the records of a data set, which keeps a journal

What differs between commands is in `generation/`, `encoding/` and `fairseq/`: each has subclasses of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fastgen
from fastgen.pipeline.batches import Batch, BatchResult, BatchStage, Resumed, Rules, Window, plan
from fastgen.pipeline.errors import SetupError, StrictError
from fastgen.pipeline.inputs import Inputs, Record
from fastgen.pipeline.journal import environment, identity
from fastgen.pipeline.layouts import Layout, Result
from fastgen.pipeline.loading import Loaded, check_path
from fastgen.pipeline.settings import DataOptions
from fastgen.pipeline.stages import Progress, Timing, run_stages
from fastgen.pipeline.writers import FileOutput, Output, StreamOutput, check_free, write_json

_RESUMED_ELSEWHERE = (
    "resumed in another environment ({}): the last digits of numbers, and outputs whose best two candidates are nearly "
    "equal, may not be those of a run without interruption"
)
Results = Callable[[], list[Result]]
"""Waits for the results of a batch, and returns them."""


@dataclass
class RunReport:
    """What a run did. Counts cover the whole output; rates and seconds cover this run, which may have resumed one."""

    samples: int = 0
    """Records in the output."""
    skipped: int = 0
    """Bad records, which are in the error file."""
    tokens: int = 0
    """Generated tokens, of all returned sequences; for a command that does not generate, those of the inputs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The value of each metric asked for, by name, on the scale of the package that computes it."""
    metrics_samples: int = 0
    """Number of records that the metrics cover."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`load`: imports and model; `generate`: from the first record read to the last batch leaving the model; `model`:
    spent in calls of the model; `waiting_for_input` and `waiting_for_output`: the model stage had nothing to do, or
    could not hand over its results; `finish`: from then until the output was in place.
    """
    samples_per_second: float = 0.0
    """Records of this run over the seconds of `generate`."""
    tokens_per_second: float = 0.0
    """Tokens of this run over the seconds of `generate`."""
    waiting_for_input_share: float = 0.0
    """The part of `generate`, 0 to 1, in which the model waited for input."""
    waiting_for_output_share: float = 0.0
    """The part in which it waited for the stages after it."""
    resumed_samples: int = 0
    """Records that an interrupted run had finished."""
    batches: int = 0
    """Number of batches, each a call of the model or, in continuous batching, a series of records."""
    batch_size: int = 0
    """The most records in the model at the same time."""
    batching: str = "static"
    """"static"; "continuous": a finished record made room for the next; or "adaptive": continuous if static batches
    would have been far from full.
    """
    max_tokens: int | None = None
    """The most input tokens of a batch; None without a limit."""
    out_of_memory: int = 0
    """How many batches did not fit in memory and were split."""
    truncated: int = 0
    """How many inputs were cut to the model's limit, for a command that counts them."""
    peak_memory_bytes: int | None = None
    """The largest resident set of the process, without worker processes."""
    peak_device_memory_bytes: int | None = None
    """The most that torch had allocated on the GPU; None on a CPU."""
    model: str = ""
    """The directory or name that the model was loaded from."""
    device: str = ""
    """The device on which it ran."""
    dtype: str = ""
    """The type of its weights."""
    errors_file: str | None = None
    """The file of skipped records, or None if there are none."""
    notes: list[str] = field(default_factory=list)
    """Further notes, such as that the run was resumed in another environment."""
    versions: dict[str, str] = field(default_factory=dict)
    """Releases of Python, torch, Transformers and FastGen."""
    fastgen: dict[str, Any] = field(default_factory=dict)
    """What `fastgen.stats()` counted, under `stats`."""


class Run(ABC):
    """A run of a command, once. A subclass defines each step."""

    def __init__(self) -> None:
        # What this run has done, without what a run that it resumes had done before.
        self.samples = self.tokens = self.batches = 0
        self.model_seconds = 0.0
        self.closing = contextlib.ExitStack()
        """Closed at the end, however the run ends."""

    def run(self, begins: Callable[[], None] = lambda: None) -> RunReport:
        """Runs everything, from the checks to the report. What is finished is kept whatever happens to the rest.

        Args:
            begins: called when everything is checked and loaded, before the first output is written.
        """
        start = time.perf_counter()
        with self.closing:
            self.check()
            self.load()
            begins()
            self.begin()
            loading = time.perf_counter() - start
            timing = self.process()
            finishing = time.perf_counter()
            self.finish()
            finish = time.perf_counter() - finishing + timing.draining
            share = 1 / timing.wall if timing.wall else 0.0
            report = dataclasses.replace(
                self.report(),
                seconds={
                    "load": loading,
                    "generate": timing.wall,
                    "model": self.model_seconds,
                    "waiting_for_input": timing.waiting_for_input,
                    "waiting_for_output": timing.waiting_for_output,
                    "finish": finish,
                },
                samples_per_second=self.samples * share,
                tokens_per_second=self.tokens * share,
                waiting_for_input_share=timing.waiting_for_input * share,
                waiting_for_output_share=timing.waiting_for_output * share,
                batches=self.batches,
                peak_memory_bytes=_peak_memory(),
            )
            self.complete(report)
        return report

    @abstractmethod
    def check(self) -> None:
        """Raises `SetupError` if the run cannot work, as far as that is known before anything slow is imported."""

    @abstractmethod
    def load(self) -> None:
        """Loads the model, and prepares what works with it. Raises `SetupError` if it cannot be used."""

    @abstractmethod
    def begin(self) -> None:
        """Opens the output, and starts what works on it."""

    @abstractmethod
    def process(self) -> Timing:
        """Puts everything through the stages, and counts it."""

    def finish(self) -> None:
        """Does what remains when all batches are recorded."""
        return

    @abstractmethod
    def report(self) -> RunReport:
        """Returns what the run did, without what `run` adds."""

    def complete(self, report: RunReport) -> None:
        """Writes the last files."""
        return


class DataRun(Run):
    """A run over the records of a data set. Its output and its journal are `Output`, its records `Record`.

    Args:
        model, tokenizer: objects in memory; otherwise those that the settings name are loaded.
    """

    options: ClassVar[type[DataOptions]]
    """The class of its settings."""

    # Set by a subclass when it has checked and loaded.
    loaded: Loaded
    layout: Layout
    tokenise: Callable[[Sequence[Record]], list[Record]]
    """Turns texts into token ids, in a thread ahead of the model."""
    stage: BatchStage[Any]
    rules: Mapping[str, Any]
    """How batches are cut, beside their size: arguments of `Rules`."""

    def __init__(self, settings: Any, model: Any = None, tokenizer: Any = None) -> None:
        super().__init__()
        self.settings, self.model, self.tokenizer = settings, model, tokenizer
        self._notes: list[str] = []

    @classmethod
    def over(cls, model: Any, input: Any, output: Any, tokenizer: Any, options: dict[str, Any]) -> RunReport:
        """Runs for a function of the library: paths may be objects, and the model may be in memory."""
        in_memory = not isinstance(model, str | os.PathLike)
        name = (getattr(model, "name_or_path", "") or type(model).__name__) if in_memory else os.fspath(model)
        settings = cls.options(model=name, input=os.fspath(input), output=os.fspath(output), **options)
        if in_memory and tokenizer is None:
            raise SetupError("a model in memory needs its tokenizer")
        return cls(settings, model if in_memory else None, tokenizer).run()

    def check(self) -> None:
        check_free(self.settings)
        if self.model is None:
            check_path(self.settings.model, gguf=True)
        self.inputs = Inputs(self.settings)

    @abstractmethod
    def automatic_batch(self) -> tuple[int, int | None]:
        """Returns inputs and tokens of a batch that fit into free memory; None if tokens are not limited."""

    @abstractmethod
    def results(self, done: BatchResult[Any]) -> Results:
        """Starts turning the model's output into results, in a thread after the model. Failed rows are left out."""

    def begin(self) -> None:
        import torch

        settings, device = self.settings, self.loaded.device
        if settings.to_stdout:
            output: Output = StreamOutput(settings, self.layout)
        else:
            decides = identity(settings, self.inputs, self.loaded) | {"rules": dict(self.rules)}
            output = FileOutput(settings, decides, environment(device), self.layout)
        self._output = self.closing.enter_context(contextlib.closing(output))
        journal = output.journal
        # A resumed run keeps the size of batches that it began with.
        decided = journal.plan if journal else None
        self._is_new = decided is None
        if decided is None:
            fixed = settings.batch_size, settings.max_tokens
            rows, tokens = self.automatic_batch() if settings.batch_size == "auto" else fixed
            decided = {"batch_size": rows, "max_tokens": tokens}
        if journal:
            self._check_strict(journal.errors)  # of a run that was not strict
            if journal.differences:
                self._notes.append(_RESUMED_ELSEWHERE.format("; ".join(journal.differences)))
                print(self._notes[0], file=sys.stderr)
            journal.begin(decided)
        self._rules = Rules(decided["batch_size"], decided["max_tokens"], **self.rules)
        self._resumed, self._already = (journal.resumed, journal.count) if journal else (Resumed(), 0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._progress = Progress("samples", self.inputs.total, self._already, settings.quiet)
        self._start = time.perf_counter()
        self.stage.tell = self._advance

    def process(self) -> Timing:
        try:
            timing = run_stages(self.planned(), self._compute, self._post, self._record)
            self.stage.finish()
        except SetupError:
            if self._is_new and not self.samples:
                self._output.drop()
            raise
        finally:
            self._progress.close()
        self.model_seconds = self.stage.seconds
        return timing

    def planned(self) -> Iterator[Window | Batch | BatchResult[Any]]:
        """Yields the windows and batches that are to be done, or that other processes have done."""
        return plan(self.inputs, self.tokenise, self._rules, self._resumed)

    # The stages. A window passes through all of them unchanged.

    def _compute(self, item: Window | Batch | BatchResult[Any]) -> Window | BatchResult[Any]:
        return self.stage.run(item) if isinstance(item, Batch) else item

    def _post(self, item: Window | BatchResult[Any]) -> Window | tuple[BatchResult[Any], Results]:
        return item if isinstance(item, Window) else (item, self.results(item))

    def _record(self, item: Window | tuple[BatchResult[Any], Results]) -> None:
        if isinstance(item, Window):
            self._check_strict(item.bad)
            self._output.window(item)
            self._advance(len(item.bad))
            return
        done, waited_for = item
        results = waited_for()
        good = [result for result in results if "error" not in result]
        self.batches += 1
        self.samples += len(good)
        self.tokens += sum(map(self.layout.tokens, good))
        results += done.failures
        self._output.batch(done.batch.window, done.batch.index, results)
        self._advance(len(results) - done.told)
        self._check_strict(results)

    def _advance(self, samples: int) -> None:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = f"{max(self.tokens, self.stage.tokens) / seconds:.0f} tokens/s"
        self._progress.add(samples, ", ".join(filter(None, [rate, self.stage.state])))

    def _check_strict(self, results: Iterable[Result]) -> None:
        for result in results if self.settings.strict else ():
            if "error" in result:
                raise StrictError(f"{self.settings.input}, line {result['line']}: {result['message']}")

    def finish(self) -> None:
        self._totals = self._output.finish()

    def report(self) -> RunReport:
        import torch
        import transformers

        totals, settings, device = self._totals, self.settings, self.loaded.device
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return RunReport(
            samples=totals.samples,
            skipped=totals.skipped,
            tokens=totals.tokens,
            metrics=totals.metrics.scores(),
            metrics_samples=totals.metrics.samples,
            resumed_samples=self._already,
            batch_size=self._rules.batch_size,
            max_tokens=self._rules.max_tokens,
            batching=self._rules.batching,
            out_of_memory=self.stage.out_of_memory,
            truncated=totals.truncated,
            peak_device_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            model=settings.model,
            device=str(device),
            dtype=str(self.loaded.model.dtype).removeprefix("torch."),
            errors_file=str(settings.errors_path) if totals.skipped and not settings.to_stdout else None,
            notes=self._notes,
            versions={"python": platform.python_version()} | versions,
            fastgen={"stats": fastgen.stats()},
        )

    def complete(self, report: RunReport) -> None:
        journal = self._output.journal
        if score_path := self.settings.written_beside().get("the score path"):
            counts = {"samples": report.metrics_samples, "skipped": report.skipped}
            write_json(score_path, counts | report.metrics, journal)
        if self.settings.report:
            write_json(self.settings.report, dataclasses.asdict(report), journal)
        self._output.complete()


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # not POSIX
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
