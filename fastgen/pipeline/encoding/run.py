"""The parts of a run specific to `fastgen-embed` and `fastgen-classify`: text to tokens, through a model, to
numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import Batch, BatchResult, BatchStage
from fastgen.pipeline.encoding.loading import (
    LoadedEncoder,
    load_classifier,
    load_embedder,
    lowered,
    prepare_classifier,
    prepare_embedder,
)
from fastgen.pipeline.encoding.modules import read_modules
from fastgen.pipeline.errors import Problem, explained
from fastgen.pipeline.inputs import Record
from fastgen.pipeline.layouts import Labels, Result, Vectors
from fastgen.pipeline.memory import USUAL_LENGTH, automatic_batch
from fastgen.pipeline.run import DataRun, Results, RunReport
from fastgen.pipeline.settings import ClassifyOptions, DataOptions, EmbedOptions

# Fixed cost of a forward pass beside its tokens, in tokens: measured with all-MiniLM-L6-v2 on two cores.
PASS_COST = 128


def embed_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Writes a vector for every text of a data set, in input order.

        embed_dataset("sentence-transformers/all-MiniLM-L6-v2", "texts.txt", "vectors.npy")

    Args:
        model: a directory or hub name, or a model in memory.
        input: a file, a data set, or "-" for standard input.
        output: the file to write. A .npy file holds [records, size] numbers in `output_dtype`, float32 by default.
        tokenizer: the tokenizer of a model in memory; otherwise it is loaded with the model.
        **options: the fields of `EmbedOptions`.

    Returns:
        What the run did: counts and seconds.

    Raises:
        SetupError: something given cannot work.
        StrictError: the first bad record, under `strict`.
        PipelineError: a file cannot be written.
    """
    return Embed.over(model, input, output, tokenizer, process_settings.renamed(options))


def classify_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Writes labels and scores for every text of a data set, in input order.

    The model has a classification head, and `options` are the fields of `ClassifyOptions`. Everything else is as for
    `embed_dataset`.
    """
    return Classify.over(model, input, output, tokenizer, process_settings.renamed(options))


class _Encode(DataRun):
    loaded: LoadedEncoder
    layout: Vectors | Labels
    rules = {"pass_cost": PASS_COST}
    with_input = True
    """Whether results include the input."""

    def automatic_batch(self) -> tuple[int, int]:
        rows, tokens = automatic_batch(self.loaded.model, None, self.loaded.longest or USUAL_LENGTH)
        return rows, min(tokens, self.settings.max_tokens or tokens)

    def results(self, done: BatchResult[Values]) -> Results:
        import numpy

        found: list[Result] = []
        for output in done.outputs:
            with numpy.errstate(over="ignore"):  # numbers beyond the type's range become infinite
                values = output.values.astype(self.layout.dtype)
            found += [self._result(row, numbers) for row, numbers in zip(output.rows, values, strict=True)]
        return lambda: found

    def _result(self, record: Record, numbers: Any) -> Result:
        import numpy

        if not numpy.isfinite(numbers).all():
            return record.skipped(Problem("not-finite", "the model returned numbers that are not finite")).error()
        result = record.named()
        if self.with_input:
            result["input"] = record.text
            if record.pair is not None:
                result["pair"] = record.pair
        result |= {"input_tokens": len(record.ids), "truncated": record.truncated}
        return result | self.layout.of_row(numbers)


class Embed(_Encode):
    options = EmbedOptions
    settings: EmbedOptions

    def load(self) -> None:
        settings = self.settings
        if self.model is None:
            loaded = load_embedder(settings)
        else:
            modules = read_modules(getattr(self.model, "name_or_path", ""), settings)
            loaded = prepare_embedder(self.model, self.tokenizer, settings, modules)
        if not (loaded.modules.said or settings.quiet):
            told = "the model's files do not say how a text becomes a vector: its tokens' vectors are averaged"
            print(f"{told} (--pooling chooses)", file=sys.stderr)
        stage = EncodingStage(loaded, settings)
        with explained(f"model {settings.model} gives no vector"), process_settings.changed(**settings.weights):
            size = stage.dimension()
        self.loaded, self.tokenise, self.stage = loaded, Tokens(loaded), stage
        self.layout = Vectors(size, settings.output_dtype)
        self.with_input = settings.resolved_output_format != "npy"


class Classify(_Encode):
    options = ClassifyOptions
    settings: ClassifyOptions

    def load(self) -> None:
        settings, model = self.settings, self.model
        loaded = load_classifier(settings) if model is None else prepare_classifier(model, self.tokenizer, settings)
        self.loaded, self.tokenise, self.stage = loaded, Tokens(loaded), EncodingStage(loaded, settings)
        self.layout = Labels(loaded.labels, settings.top_k, settings.pair_column is not None)


class Tokens:
    """Converts records into the model's inputs. Texts that are too long are cut, and marked as truncated."""

    def __init__(self, loaded: LoadedEncoder) -> None:
        self._loaded = loaded
        self._cut = {} if loaded.longest is None else {"truncation": True, "max_length": loaded.longest}
        self._lower = lowered if loaded.lower_case else str

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        encoded = self._encoded(records, self._cut)
        ids = encoded["input_ids"]
        # For a text of exactly the greatest length, the tokenizer does not tell whether it was cut.
        full = [row for row, found in enumerate(ids) if len(found) == self._loaded.longest]
        whole = self._encoded([records[row] for row in full], {})["input_ids"] if full else []
        truncated = {row for row, found in zip(full, whole, strict=True) if len(found) > len(ids[row])}
        others = {name: values for name, values in encoded.items() if name not in ("input_ids", "attention_mask")}
        return [
            replace(
                record,
                ids=list(ids[row]),
                others={name: list(values[row]) for name, values in others.items()},
                truncated=row in truncated,
            )
            if len(ids[row])
            else record.skipped(Problem("empty", "the text has no tokens"))
            for row, record in enumerate(records)
        ]

    def _encoded(self, records: Sequence[Record], options: dict[str, Any]) -> Any:
        texts = [self._loaded.prompt + self._lower(record.text) for record in records]
        pairs = [self._lower(record.pair) for record in records if record.pair is not None]
        return self._loaded.tokenizer(texts, pairs or None, verbose=False, **options)


@dataclass
class Values:
    """The model's output for some rows: an array [rows, size] in float32, of vectors or of the labels' numbers."""

    rows: list[Record]
    values: Any


class EncodingStage(BatchStage[Values]):
    def __init__(self, loaded: LoadedEncoder, settings: DataOptions) -> None:
        # Whether a short forward pass is recorded depends on earlier ones, which a resumed run does not repeat.
        super().__init__(loaded.device, settings.weights | process_settings.unless_explicit(captured_step="never"))
        self._loaded = loaded

    def size(self, rows: Sequence[Record]) -> int:
        """Padded tokens."""
        return len(rows) * max(len(row.ids) for row in rows)

    def forward(self, rows: list[Record], batch: Batch) -> Values:
        import torch

        with torch.no_grad():
            return Values(rows, self._numbers(self._inputs(rows), rows).cpu().numpy())

    def _numbers(self, inputs: dict[str, Any], rows: Sequence[Record]) -> Any:
        return self._loaded.numbers(inputs)

    def dimension(self) -> int:
        """Returns how many numbers a text yields, by running one."""
        ids = self._loaded.tokenizer(self._loaded.prompt + "a")
        others = {name: list(ids[name]) for name in ids if name not in ("input_ids", "attention_mask")}
        record = Record(0, 1, 0, "a", ids=list(ids["input_ids"]), others=others)
        return int(self.forward([record], Batch(0, 0, [])).values.shape[1])

    def _inputs(self, rows: list[Record]) -> dict[str, Any]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tokenizer = self._loaded.tokenizer
        columns = {"input_ids": ([row.ids for row in rows], self._loaded.pad_id)}
        columns["attention_mask"] = ([[1] * len(row.ids) for row in rows], 0)
        for name in rows[0].others:
            fill = tokenizer.pad_token_type_id if name == "token_type_ids" else 0
            columns[name] = ([row.others[name] for row in rows], fill)
        return {
            name: pad_sequence([torch.tensor(row) for row in values], True, fill, tokenizer.padding_side).to(
                self._loaded.device
            )
            for name, (values, fill) in columns.items()
        }
