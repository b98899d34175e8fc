"""A run from end to end: check everything that can be checked, load the model, work, and sum up."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import BatchResult
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.layouts import Generation
from fastgen.pipeline.loading import LoadedModel, check_path, depends_on_padding, load, prepare
from fastgen.pipeline.memory import automatic_batch
from fastgen.pipeline.model import Decoder, Encoder, ModelStage, RawOutput
from fastgen.pipeline.postprocess import Outcome, PostprocessJob, PostProcessor, Processor, Texts, default_workers
from fastgen.pipeline.records import Result
from fastgen.pipeline.running import Job, Results, RunReport, open_output, run_through
from fastgen.pipeline.settings import RunOptions
from fastgen.pipeline.writers import check_free

_USUAL_LENGTH = 512  # tokens


def generate_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Runs a model over a data set and writes its outputs, in input order.

        generate_dataset("facebook/bart-large-cnn", "articles.jsonl", "summaries.jsonl", input_column="article",
                         generation={"num_beams": 4, "no_repeat_ngram_size": 3}, batch_size=16)

    Detokenising and metrics start worker processes, so a script that asks for them needs the usual
    `if __name__ == "__main__":` (or `workers=0`). After a KeyboardInterrupt, `resume=True` continues.

    Args:
        model: a directory or hub name, or a model in memory.
        input: a file, a data set, or "-" for standard input.
        output: the file to write, or "-" for standard output.
        tokenizer: that of a model in memory; otherwise it is loaded with the model.
        **options: the fields of `RunOptions`; `generation` holds options of `generate`.

    Returns:
        What the run did: counts, seconds, metrics.

    Raises:
        SetupError: something given cannot work.
        StrictError: the first bad record, under `strict`.
        PipelineError: a file cannot be written.
    """
    in_memory = not isinstance(model, str | os.PathLike)
    name = (getattr(model, "name_or_path", "") or type(model).__name__) if in_memory else os.fspath(model)
    settings = RunOptions(
        model=name, input=os.fspath(input), output=os.fspath(output), **process_settings.renamed(options)
    )
    if in_memory and tokenizer is None:
        raise SetupError("a model in memory needs its tokenizer")
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
    work = PostprocessJob(detokenizer, settings.lang or settings.tgt_lang or "en", settings.metrics)
    work.check()
    if model is None:
        check_path(settings.model, gguf=True)
    inputs = Inputs(settings)
    has_reference = bool(settings.reference or settings.reference_column)
    layout = Generation(inputs.kept, settings.output_column, has_reference, settings.token_ids)
    workers = default_workers() if settings.workers is None else settings.workers
    with closing(PostProcessor(partial(Processor, work), workers if work.any else 0)) as post:
        loaded = load(settings) if model is None else prepare(model, tokenizer, settings)
        begins()
        job = Job(
            loaded,
            layout,
            Encoder(loaded, settings),
            ModelStage(loaded, settings),
            _Texts(Decoder(loaded, settings), post),
            partial(_batch_size, loaded, settings),
            {"equal_lengths": depends_on_padding(loaded)},
        )
        with closing(open_output(settings, inputs, job)) as output:
            return run_through(settings, inputs, job, output, start)


def _batch_size(loaded: LoadedModel, settings: RunOptions) -> tuple[int, int | None]:
    """Inputs of a batch, and their tokens where memory is what limits them."""
    if settings.batch_size != "auto":
        return settings.batch_size, settings.max_tokens
    # Where the model does not say how long an input may be, memory is planned for those of a usual length.
    longest = min(loaded.positions or _USUAL_LENGTH, settings.max_source_length or sys.maxsize)
    rows, tokens = automatic_batch(loaded.model, loaded.generation, longest)
    return rows, settings.max_tokens or tokens


def resolve_metrics(settings: RunOptions) -> tuple[str, ...]:
    """The metrics asked for; with references alone, those that the example script of the task computes."""
    if settings.metrics or not (settings.reference or settings.reference_column):
        return settings.metrics
    usual = {"translation": ("bleu",), "summarization": ("rouge",)}
    return usual.get(settings.task.partition("_")[0], ("bleu", "rouge"))


class _Texts:
    """What `generate` returned, as texts, and through the worker processes."""

    def __init__(self, decoder: Decoder, workers: PostProcessor[Texts, list[Outcome]]) -> None:
        self._decoder, self._workers = decoder, workers

    def __call__(self, result: BatchResult[RawOutput]) -> Results:
        decoded = self._decoder(result)
        outcomes = self._workers.submit([(texts, reference) for _, texts, reference in decoded])
        return lambda: [
            _completed(result, outcome) for (result, _, _), outcome in zip(decoded, outcomes.result(), strict=True)
        ]


def _completed(result: Result, outcome: Outcome) -> Result:
    if outcome.error is not None:
        kept = {name: result[name] for name in ("position", "line", "id")}
        return kept | {"error": "post-processing", "message": outcome.error}
    complete = result | {"text": outcome.texts[0], "statistics": outcome.statistics}
    # An output of text lines has the best sequence only; a record with scores has them all.
    if "input" in result:
        complete["sequences"] = outcome.texts
    return complete
