"""The parts of a run specific to `fastgen-generate`: text to tokens, through `generate`, back to text, and metrics."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import Batch, BatchResult, Window
from fastgen.pipeline.errors import Problem, SetupError, check_installed
from fastgen.pipeline.generation import on_ray
from fastgen.pipeline.generation.loading import LoadedModel, depends_on_padding, load, prepare
from fastgen.pipeline.generation.model import RawOutput, batching_of, stage_for
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.inputs import Record, with_parts
from fastgen.pipeline.layouts import Generation, Result
from fastgen.pipeline.memory import USUAL_LENGTH, automatic_batch
from fastgen.pipeline.postprocess import Outcome, PostprocessJob, PostProcessor, Processor, default_workers
from fastgen.pipeline.run import DataRun, Results, RunReport


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
        tokenizer: the tokenizer of a model in memory; otherwise it is loaded with the model.
        **options: the fields of `RunOptions`; `generation` holds options of `generate`.

    Returns:
        What the run did: counts, seconds, metrics.

    Raises:
        SetupError: something given cannot work.
        StrictError: the first bad record, under `strict`.
        PipelineError: a file cannot be written.
    """
    return Generate.over(model, input, output, tokenizer, process_settings.renamed(options))


class Generate(DataRun):
    options = RunOptions
    settings: RunOptions
    loaded: LoadedModel

    def check(self) -> None:
        settings = self.settings = dataclasses.replace(self.settings, metrics=resolve_metrics(self.settings))
        detokenizer = None if settings.detokenizer == "none" else settings.detokenizer
        job = PostprocessJob(detokenizer, settings.lang or settings.tgt_lang or "en", settings.metrics)
        job.check()
        if settings.ray:
            check_installed("ray", "--ray", "pip install 'fastgen-transformers[ray]'")
            if self.model is not None:
                raise SetupError("a model in memory is not sent to the workers of Ray: give its folder")
        super().check()
        has_reference = bool(settings.reference or settings.reference_column)
        self.layout = Generation(self.inputs.kept, settings.output_column, has_reference, settings.token_ids)
        workers = default_workers() if settings.workers is None or settings.ray else settings.workers
        # They start while the model is loaded.
        processor = PostProcessor(partial(Processor, job), workers if job.any else 0)
        self._workers = self.closing.enter_context(closing(processor))

    def load(self) -> None:
        settings = self.settings
        loaded = load(settings) if self.model is None else prepare(self.model, self.tokenizer, settings)
        self.loaded, self.tokenise = loaded, Encoder(loaded, settings)
        self.stage = stage_for(loaded, settings)
        batching = batching_of(loaded, settings)
        static = {"equal_lengths": depends_on_padding(loaded)}
        self.rules = static if batching == "static" else {batching: True}
        self._decode = Decoder(loaded, settings)

    def planned(self) -> Iterator[Window | Batch | BatchResult[Any]]:
        planned, settings = super().planned(), self.settings
        if settings.ray is None or settings.workers is None:
            return planned
        self.closing.enter_context(on_ray.cluster(settings.ray, settings.workers))
        job = on_ray.Job.of(settings, self.loaded)
        return on_ray.computed(planned, job, settings.workers, self.stage)

    def results(self, done: BatchResult[RawOutput]) -> Results:
        """Turns the output of `generate` into texts, and submits these to the worker processes."""
        decoded = self._decode(done)
        outcomes = self._workers.submit([(texts, reference) for _, texts, reference in decoded])
        return lambda: [
            _completed(result, outcome) for (result, _, _), outcome in zip(decoded, outcomes.result(), strict=True)
        ]

    def automatic_batch(self) -> tuple[int, int | None]:
        settings, loaded = self.settings, self.loaded
        # If the model has no input limit, memory is planned for inputs of a usual length.
        longest = min(loaded.positions or USUAL_LENGTH, settings.max_source_length or sys.maxsize)
        rows, tokens = automatic_batch(loaded.model, loaded.generation, longest)
        return rows, settings.max_tokens or (None if settings.batching == "continuous" else tokens)


def resolve_metrics(settings: RunOptions) -> tuple[str, ...]:
    """Returns the metrics asked for; with references alone, those that the task's example script computes."""
    if settings.metrics or not (settings.reference or settings.reference_column):
        return settings.metrics
    usual = {"translation": ("bleu",), "summarization": ("rouge",)}
    return usual.get(settings.task.partition("_")[0], ("bleu", "rouge"))


def _completed(result: Result, outcome: Outcome) -> Result:
    if outcome.error is not None:
        kept = {name: result[name] for name in ("position", "line", "id")}
        return kept | {"error": "post-processing", "message": outcome.error}
    complete = result | {"text": outcome.texts[0], "statistics": outcome.statistics}
    # An output of text lines has the best sequence only; a record with scores has them all.
    if "input" in result:
        complete["sequences"] = outcome.texts
    return complete


class Encoder:
    """Turns records into token ids. Records that are too long for the model become bad records."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        self._tokenizer = loaded.tokenizer
        self._prefix = loaded.prefix
        self._is_chat = settings.chat
        self._system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        self._positions = loaded.positions
        truncate_to = settings.max_source_length
        if settings.truncation and loaded.positions is not None:
            truncate_to = min(truncate_to or loaded.positions, loaded.positions)
        self._options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        if truncate_to is not None:
            self._options |= {"truncation": True, "max_length": truncate_to}
            if not loaded.encoder_decoder:
                # The model continues the end of a prompt.
                self._tokenizer.truncation_side = "left"

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        return [self._checked(record, list(ids)) for record, ids in zip(records, self._ids(records), strict=True)]

    def _ids(self, records: Sequence[Record]) -> list[Any]:
        if not self._is_chat:
            return self._tokenizer([self._prefix + record.text for record in records], **self._options)["input_ids"]
        conversations = [
            with_parts(
                self._tokenizer, [*self._system, *(record.messages or [{"role": "user", "content": record.text}])]
            )
            for record in records
        ]
        options = {name: self._options[name] for name in ("truncation", "max_length") if name in self._options}
        return self._tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=True, return_dict=True, **options
        )["input_ids"]

    def _checked(self, record: Record, ids: list[int]) -> Record:
        if not ids:
            return record.skipped(Problem("empty", "the text has no tokens"))
        if self._positions is not None and len(ids) > self._positions:
            message = f"{len(ids)} tokens, but the model takes at most {self._positions}"
            return record.skipped(Problem("too-long", message))
        return replace(record, ids=ids)


class Decoder:
    """Turns the model's sequences into texts and results."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        # Tokenizers are not thread-safe, and another thread encodes at the same time.
        self._tokenizer = copy.deepcopy(loaded.tokenizer)
        self._with_prompt = settings.include_prompt and not loaded.encoder_decoder
        self._settings = settings

    def __call__(self, generated: BatchResult[RawOutput]) -> list[tuple[Result, list[str], str | None]]:
        """Returns, for each row that succeeded, its result without texts, its texts, best first, and its reference."""
        rows: list[tuple[Result, list[list[int]], str | None]] = []
        for output in generated.outputs:
            each = len(output.written) // len(output.rows)
            for number, row in enumerate(output.rows):
                own = slice(number * each, (number + 1) * each)
                written = output.written[own]
                scores = output.scores[own] if output.scores else None
                shown = [[*row.ids, *ids] for ids in written] if self._with_prompt else written
                rows.append((self._result(row, written, scores), shown, row.reference))
        flat = self._tokenizer.batch_decode([ids for _, shown, _ in rows for ids in shown], skip_special_tokens=True)
        # Half of a surrogate pair has no UTF-8 form; it would make the output file invalid.
        texts = (text.encode("utf-8", "replace").decode() for text in flat)
        return [(result, [next(texts) for _ in shown], reference) for result, shown, reference in rows]

    def _result(self, record: Record, written: list[list[int]], scores: list[float] | None) -> Result:
        result = record.named()
        if not self._settings.to_text:
            result |= {"input": record.text, "scores": scores, "input_tokens": len(record.ids)}
            if record.kept is not None:
                result["kept"] = list(record.kept)
            if record.reference is not None:
                result["reference"] = record.reference
            if self._settings.token_ids:
                result["token_ids"] = written
        return result | {"output_tokens": [len(ids) for ids in written]}
