"""A run from end to end: check everything that can be checked, load the model, work, and sum up."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fastgen
from fastgen import settings as switches
from fastgen.pipeline.errors import SetupError, StrictError
from fastgen.pipeline.identity import environment, identity
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.loading import LoadedModel, check_path, depends_on_padding, load, prepare
from fastgen.pipeline.memory import automatic_batch
from fastgen.pipeline.model import Decoder, Encoder, Generated, ModelStage
from fastgen.pipeline.planner import Batch, Resumed, Rules, Window, plan
from fastgen.pipeline.postprocess import Outcome, PostProcessor, Processor, Texts, Work, default_workers
from fastgen.pipeline.records import BadRecord, Result
from fastgen.pipeline.settings import RunOptions
from fastgen.pipeline.stages import Timing, run_stages
from fastgen.pipeline.writers import FileOutput, Output, StreamOutput, check_free, write_json

_USUAL_LENGTH = 512  # tokens
SECONDS_BETWEEN_LINES = 30.0
_RESUMED_ELSEWHERE = (
    "resumed in another environment ({}): the last digits of scores, and texts whose best two candidates are nearly "
    "equal, may not be those of a run without interruption"
)
# A batch on its way through post-processing.
_Pending = tuple[Generated, list[Result], Future[list[Outcome]]]


@dataclass
class RunReport:
    """What a run did. Counts are of the whole output; rates and seconds are of this run, which may have resumed one."""

    samples: int
    skipped: int
    tokens: int
    """Generated tokens, of all returned sequences."""
    metrics: dict[str, float]
    metrics_samples: int
    seconds: dict[str, float]
    """`load`: imports and model; `generate`: from the first record read to the last batch out of the model;
    `model`: spent in `generate` calls; `waiting_for_input` and `waiting_for_output`: the model stage had nothing
    to do, or could not hand over what it had done; `finish`: from then until the output was in place."""
    samples_per_second: float
    tokens_per_second: float
    waiting_for_input_share: float
    waiting_for_output_share: float
    resumed_samples: int
    batches: int
    batch_size: int
    max_tokens: int | None
    out_of_memory: int
    """How many batches did not fit in memory and were split."""
    peak_memory_bytes: int | None
    """The largest resident set of the process, worker processes not counted."""
    peak_device_memory_bytes: int | None
    model: str
    device: str
    dtype: str
    errors_file: str | None = None
    notes: list[str] = field(default_factory=list)
    """What else there is to know, such as that the run was resumed in another environment."""
    versions: dict[str, str] = field(default_factory=dict)
    fastgen: dict[str, Any] = field(default_factory=dict)
    """What `fastgen.stats()` counted, under `stats`."""


def generate_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Run a model over a data set and write its outputs, in input order.

    `model` is a directory or hub name, or a model in memory with its `tokenizer`. `options` are the fields of
    `RunOptions`; `generation` holds options of `generate`:

        generate_dataset("facebook/bart-large-cnn", "articles.jsonl", "summaries.jsonl", input_column="article",
                         generation={"num_beams": 4, "no_repeat_ngram_size": 3}, batch_size=16)

    Detokenising and metrics start worker processes, so a script that asks for them needs the usual
    `if __name__ == "__main__":` (or `workers=0`). Raises `SetupError` where something given cannot work and
    `StrictError` for the first bad record under `strict`; after a KeyboardInterrupt, `resume=True` continues.
    """
    in_memory = not isinstance(model, str | os.PathLike)
    name = (getattr(model, "name_or_path", "") or type(model).__name__) if in_memory else os.fspath(model)
    settings = RunOptions(model=name, input=os.fspath(input), output=os.fspath(output), **switches.renamed(options))
    if in_memory and tokenizer is None:
        raise SetupError("a model in memory needs its tokenizer")
    # Otherwise the last digits of scores would differ from run to run.
    with switches.changed(**switches.unless_explicit(linear_products="fixed")):
        return run(settings, model if in_memory else None, tokenizer)


def run(
    settings: RunOptions, model: Any = None, tokenizer: Any = None, begins: Callable[[], None] = lambda: None
) -> RunReport:
    """Do what the settings say.

    Args:
        model, tokenizer: in memory; otherwise those that the settings name are loaded.
        begins: called when all is checked and loaded, and the first file is about to be written.
    """
    start = time.perf_counter()
    check_free(settings)
    settings = dataclasses.replace(settings, metrics=resolve_metrics(settings))
    detokenizer = None if settings.detokenizer == "none" else settings.detokenizer
    work = Work(detokenizer, settings.lang or settings.tgt_lang or "en", settings.metrics)
    work.check()
    if model is None:
        check_path(settings.model)
    inputs = Inputs(settings)
    workers = default_workers() if settings.workers is None else settings.workers
    with closing(PostProcessor(partial(Processor, work), workers if work.any else 0)) as post:
        loaded = load(settings) if model is None else prepare(model, tokenizer, settings)
        begins()
        output: Output
        if settings.to_stdout:
            output = StreamOutput(settings)
        else:
            output = FileOutput(settings, identity(settings, inputs, loaded), environment(loaded.device))
        with closing(output):
            return _generate(settings, inputs, loaded, post, output, start)


def _generate(
    settings: RunOptions,
    inputs: Inputs,
    loaded: LoadedModel,
    post: PostProcessor[Texts, list[Outcome]],
    output: Output,
    start: float,
) -> RunReport:
    """All of a run from the first record to the report."""
    import torch
    import transformers

    journal = output.journal
    decided = journal.plan if journal else None
    fresh = decided is None
    if decided is None:
        rows, tokens = _batch_size(loaded, settings)
        decided = {"batch_size": rows, "max_tokens": settings.max_tokens or tokens}
    notes = []
    if journal:
        if journal.differences:
            notes.append(_RESUMED_ELSEWHERE.format("; ".join(journal.differences)))
            print(notes[0], file=sys.stderr)
        journal.begin(decided)
    rules = Rules(decided["batch_size"], decided["max_tokens"], depends_on_padding(loaded))
    resumed, already = (journal.resumed, journal.count) if journal else (Resumed(), 0)

    def on_bad(bad: BadRecord) -> None:
        if settings.strict:
            raise StrictError(f"{settings.input}, line {bad.line}: {bad.problem.message}")

    progress = Progress(inputs.total, already, settings.quiet)
    stage = ModelStage(loaded, settings)
    on_gpu = loaded.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(loaded.device)
    loading = time.perf_counter() - start
    steps = Steps(stage, Decoder(loaded, settings), post, output, progress, on_bad)
    try:
        timing = steps.run(plan(inputs, Encoder(loaded, settings), rules, resumed, on_bad))
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
        peak_memory_bytes=_peak_memory(),
        peak_device_memory_bytes=torch.cuda.max_memory_allocated(loaded.device) if on_gpu else None,
        model=settings.model,
        device=str(loaded.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        errors_file=str(settings.errors_path) if totals.skipped and not settings.to_stdout else None,
        notes=notes,
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__),
        fastgen={"stats": fastgen.stats()},
    )
    if settings.score_path:
        counts = {"samples": totals.metrics.samples, "skipped": totals.skipped}
        write_json(settings.score_path, counts | scores, journal)
    if settings.report:
        write_json(settings.report, dataclasses.asdict(report), journal)
    output.complete()
    return report


def _batch_size(loaded: LoadedModel, settings: RunOptions) -> tuple[int, int | None]:
    """Inputs of a batch, and their tokens where memory is what limits them."""
    if settings.batch_size != "auto":
        return settings.batch_size, None
    # Where the model does not say how long an input may be, memory is planned for those of a usual length.
    longest = min(loaded.positions or _USUAL_LENGTH, settings.max_source_length or sys.maxsize)
    return automatic_batch(loaded.model, loaded.generation, longest)


def resolve_metrics(settings: RunOptions) -> tuple[str, ...]:
    """The metrics asked for; with references alone, those that the example script of the task computes."""
    if settings.metrics or not (settings.reference or settings.reference_column):
        return settings.metrics
    usual = {"translation": ("bleu",), "summarization": ("rouge",)}
    return usual.get(settings.task.partition("_")[0], ("bleu", "rouge"))


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

    model: ModelStage
    decoder: Decoder
    workers: PostProcessor[Texts, list[Outcome]]
    output: Output
    progress: Progress
    on_bad: Callable[[BadRecord], None]
    samples: int = 0
    tokens: int = 0
    batches: int = 0

    def run(self, plan: Iterator[Window | Batch]) -> Timing:
        return run_stages(plan, self._generate, self._post, self._record, self._report)

    def _generate(self, item: Window | Batch) -> Window | Generated:
        return item if isinstance(item, Window) else self.model.run(item)

    def _report(self, item: Window | Generated) -> None:
        if isinstance(item, Generated):
            self.batches += 1
            for row, problem in item.failures:
                self.on_bad(row.record.skipped(problem))

    def _post(self, item: Window | Generated) -> Window | _Pending:
        if isinstance(item, Window):
            return item
        decoded = self.decoder(item)
        outcomes = self.workers.submit([(texts, reference) for _, texts, reference in decoded])
        return item, [result for result, _, _ in decoded], outcomes

    def _record(self, item: Window | _Pending) -> None:
        if isinstance(item, Window):
            self.output.window(item)
            self.progress.add(len(item.bad), 0)
            return
        generated, decoded, outcomes = item
        results = [_completed(result, outcome) for result, outcome in zip(decoded, outcomes.result(), strict=True)]
        failed = [result for result in results if "error" in result]
        tokens = sum(sum(result["output_tokens"]) for result in results if "error" not in result)
        self.samples += len(results) - len(failed)
        self.tokens += tokens
        results += [row.record.skipped(problem).result() for row, problem in generated.failures]
        self.output.batch(generated.batch.window, generated.batch.index, results)
        self.progress.add(len(results), tokens)
        for result in failed:
            self.on_bad(BadRecord.of(result))


def _completed(result: Result, outcome: Outcome) -> Result:
    if outcome.error is not None:
        kept = {name: result[name] for name in ("position", "line", "id")}
        return kept | {"error": "post-processing", "message": outcome.error}
    complete = result | {"text": outcome.texts[0], "statistics": outcome.statistics}
    # An output of text lines has the best sequence only; a record with scores has them all.
    if "input" in result:
        complete["sequences"] = outcome.texts
    return complete


class Progress:
    """Shows rates and the time left on standard error: a bar on a terminal, otherwise a line every 30 seconds."""

    def __init__(self, total: int | None, already: int = 0, quiet: bool = False) -> None:
        from tqdm import tqdm

        self._total, self._already, self._done, self._tokens = total, already, already, 0
        self._start = self._last_line = time.perf_counter()
        self._lines = not (quiet or sys.stderr.isatty())
        hidden = quiet or self._lines
        options = {"unit": " samples", "dynamic_ncols": True, "smoothing": 0.1}
        self._bar = tqdm(total=total, initial=already, disable=hidden, **options)

    def add(self, samples: int, tokens: int) -> None:
        self._done += samples
        self._tokens += tokens
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        rate = f"{self._tokens / seconds:.0f} tokens/s"
        self._bar.set_postfix_str(rate, refresh=False)
        self._bar.update(samples)
        if self._lines and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            counts = {"n": self._done, "total": self._total, "initial": self._already}
            line = self._bar.format_meter(**counts, elapsed=seconds, ncols=0, unit=" samples", postfix=rate)
            print(line.strip(), file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
