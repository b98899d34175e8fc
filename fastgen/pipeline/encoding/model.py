"""The stages of a model that only encodes: from text to tokens, through the model, and to results."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import BatchResult, BatchStage
from fastgen.pipeline.encoding.loading import LoadedClassifier, LoadedEmbedder, LoadedEncoder, lowered
from fastgen.pipeline.errors import one_line
from fastgen.pipeline.planner import Batch, Prepared
from fastgen.pipeline.records import BadRecord, Problem, Record, Result
from fastgen.pipeline.running import Results
from fastgen.pipeline.settings import DataOptions


class Tokens:
    """Turns records into what the model gets. Texts that are too long are cut, and say so."""

    def __init__(self, loaded: LoadedEncoder) -> None:
        self._loaded = loaded
        self._cut = {} if loaded.longest is None else {"truncation": True, "max_length": loaded.longest}
        self._lower = lowered if loaded.lower_case else str

    def __call__(self, records: Sequence[Record]) -> list[Prepared | BadRecord]:
        try:
            return self._prepared(records) if records else []
        except Exception as error:
            if len(records) == 1:
                return [records[0].skipped(Problem("tokenizer", f"the tokenizer refuses the text: {one_line(error)}"))]
            # Find the text that the tokenizer refuses; the others are kept.
            return [found for record in records for found in self([record])]

    def _prepared(self, records: Sequence[Record]) -> list[Prepared | BadRecord]:
        encoded = self._encoded(records, self._cut)
        ids = encoded["input_ids"]
        # Whether a text of just the greatest length was longer is not said.
        full = [row for row, found in enumerate(ids) if len(found) == self._loaded.longest]
        whole = self._encoded([records[row] for row in full], {})["input_ids"] if full else []
        truncated = {row for row, found in zip(full, whole, strict=True) if len(found) > len(ids[row])}
        others = {name: values for name, values in encoded.items() if name not in ("input_ids", "attention_mask")}
        return [
            Prepared(record, list(ids[row]), {name: list(values[row]) for name, values in others.items()},
                     row in truncated)
            if len(ids[row]) else record.skipped(Problem("empty", "the text has no tokens"))
            for row, record in enumerate(records)
        ]  # fmt: skip

    def _encoded(self, records: Sequence[Record], options: dict[str, Any]) -> Any:
        texts = [self._loaded.prompt + self._lower(record.text) for record in records]
        pairs = [self._lower(record.pair) for record in records if record.pair is not None]
        return self._loaded.tokenizer(texts, pairs or None, verbose=False, **options)


@dataclass
class Values:
    """What the model made of some rows: an array [rows, size] in float32, a vector or the numbers of the labels."""

    rows: list[Prepared]
    values: Any


class EncodingStage(BatchStage[Values]):
    """Puts batches through a model that only encodes."""

    def __init__(self, loaded: LoadedEncoder, settings: DataOptions) -> None:
        # Whether a short forward pass is recorded depends on those before it, which a resumed run does not repeat.
        super().__init__(loaded.device, settings.weights | process_settings.unless_explicit(captured_step="never"))
        self._loaded = loaded

    def size(self, rows: Sequence[Prepared]) -> int:
        """Padded tokens."""
        return len(rows) * max(len(row.ids) for row in rows)

    def forward(self, rows: list[Prepared], batch: Batch) -> Values:
        import torch

        start = time.perf_counter()
        try:
            with torch.no_grad():
                return Values(rows, self._values(self._inputs(rows)).cpu().numpy())
        finally:
            self.seconds += time.perf_counter() - start

    def _inputs(self, rows: list[Prepared]) -> dict[str, Any]:
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

    def _values(self, inputs: dict[str, Any]) -> Any:
        """What the model makes of a padded batch, in float32."""
        raise NotImplementedError


class EmbeddingStage(EncodingStage):
    """Vectors of texts."""

    _loaded: LoadedEmbedder

    def _values(self, inputs: dict[str, Any]) -> Any:
        with process_settings.changed(**process_settings.unless_explicit(padding="zero")):  # the modules mask it
            states = self._loaded.model(**inputs)[0]
        return self._loaded.modules(states, inputs["attention_mask"], self._loaded.prompt_length)

    def dimension(self) -> int:
        """The length of a vector, found by making one."""
        ids = self._loaded.tokenizer(self._loaded.prompt + "a")
        record = Record(0, 1, 0, "a")
        others = {name: list(ids[name]) for name in ids if name not in ("input_ids", "attention_mask")}
        return int(self.forward([Prepared(record, list(ids["input_ids"]), others)], Batch(0, 0, [])).values.shape[1])


class ClassificationStage(EncodingStage):
    """A score for each label."""

    _loaded: LoadedClassifier

    def _values(self, inputs: dict[str, Any]) -> Any:
        numbers = self._loaded.model(**inputs).logits.float()
        if self._loaded.scores == "raw":
            return numbers
        return numbers.softmax(dim=-1) if self._loaded.scores == "softmax" else numbers.sigmoid()


class Encoded:
    """Makes results of what the model returned: each row's own fields, or an error where it is no finite numbers.

    Args:
        with_input: results hold the input.
        dtype: the type of the numbers in the output.
        of_row: the fields, of the numbers of a row in that type.
    """

    def __init__(self, with_input: bool, dtype: str, of_row: Callable[[Any], dict[str, Any]]) -> None:
        self._with_input, self._dtype, self._of_row = with_input, dtype, of_row

    def __call__(self, batch: BatchResult[Values]) -> Results:
        results = [
            self._result(row, values)
            for output in batch.outputs
            for row, values in zip(output.rows, _as(self._dtype, output.values), strict=True)
        ]
        return lambda: results

    def _result(self, row: Prepared, values: Any) -> Result:
        import numpy

        record = row.record
        result: Result = {"position": record.position, "line": record.line, "id": record.id}
        if not numpy.isfinite(values).all():
            return record.skipped(Problem("not-finite", "the model returned numbers that are not finite")).result()
        if self._with_input:
            result["input"] = record.text
            if record.pair is not None:
                result["pair"] = record.pair
        result |= {"input_tokens": len(row.ids), "truncated": row.truncated}
        return result | self._of_row(values)


def _as(dtype: str, values: Any) -> Any:
    """An array in another type; what does not fit becomes infinite."""
    import numpy

    with numpy.errstate(over="ignore"):
        return values.astype(dtype)


def vector_fields(vector: Any) -> dict[str, Any]:
    """Of a vector, its bytes, little-endian, in base64: what the journal keeps is exact, and short."""
    little = vector.astype(vector.dtype.newbyteorder("<"))
    return {"vector": base64.b64encode(little.tobytes()).decode("ascii")}


def label_fields(labels: Sequence[str], count: int) -> Callable[[Any], dict[str, Any]]:
    """The best `count` labels with their scores, best first; of equal ones the first of the model comes first."""

    def fields(values: Any) -> dict[str, Any]:
        scores = values.tolist()
        best = sorted(range(len(scores)), key=lambda label: (-scores[label], label))[:count]
        return {"labels": [labels[label] for label in best], "scores": [scores[label] for label in best]}

    return fields
