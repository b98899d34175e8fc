"""From text to token ids before the model, and from token ids to text after it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fastgen.pipeline.errors import one_line
from fastgen.pipeline.loading import LoadedModel
from fastgen.pipeline.model import Generated
from fastgen.pipeline.planner import Prepared
from fastgen.pipeline.records import BadRecord, Problem, Record, Result
from fastgen.pipeline.settings import RunOptions


class Encoder:
    """Turns records into token ids. Records that are too long for the model become bad records."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        self._tokenizer = loaded.tokenizer
        self._prefix = loaded.prefix
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

    def __call__(self, records: Sequence[Record]) -> list[Prepared | BadRecord]:
        texts = [self._prefix + record.text for record in records]
        try:
            encoded = self._tokenizer(texts, **self._options)["input_ids"] if texts else []
        except Exception as error:
            if len(records) == 1:
                return [records[0].skipped(Problem("tokenizer", f"the tokenizer refuses the text: {one_line(error)}"))]
            # Find the text that the tokenizer refuses; the others are kept.
            return [found for record in records for found in self([record])]
        return [self._checked(record, list(ids)) for record, ids in zip(records, encoded, strict=True)]

    def _checked(self, record: Record, ids: list[int]) -> Prepared | BadRecord:
        if not ids:
            return record.skipped(Problem("empty", "the text has no tokens"))
        if self._positions is not None and len(ids) > self._positions:
            message = f"{len(ids)} tokens, but the model has room for {self._positions}"
            return record.skipped(Problem("too-long", message))
        return Prepared(record, ids)


class Decoder:
    """Turns the model's sequences into texts and results."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        # Tokenizers are not safe in two threads, and another thread encodes at the same time.
        self._tokenizer = copy.deepcopy(loaded.tokenizer)
        self._loaded = loaded
        self._settings = settings

    def __call__(self, generated: Generated) -> list[tuple[Result, list[str], str | None]]:
        """For each row that succeeded: its result without texts, its texts, best first, and its reference."""
        rows: list[tuple[Result, list[list[int]], str | None]] = []
        with_prompt = self._settings.include_prompt and not self._loaded.encoder_decoder
        for piece in generated.pieces:
            each = len(piece.sequences) // len(piece.rows)
            sequences = piece.written(self._loaded)
            for number, row in enumerate(piece.rows):
                own = slice(number * each, (number + 1) * each)
                written = sequences[own]
                scores = piece.scores[own] if piece.scores else None
                shown = [row.ids + ids for ids in written] if with_prompt else written
                rows.append((self._result(row, written, scores), shown, row.record.reference))
        flat = self._tokenizer.batch_decode([ids for _, shown, _ in rows for ids in shown], skip_special_tokens=True)
        # Half of a surrogate pair has no UTF-8; it would spoil the file that it is written to.
        texts = (text.encode("utf-8", "replace").decode() for text in flat)
        return [(result, [next(texts) for _ in shown], reference) for result, shown, reference in rows]

    def _result(self, row: Prepared, written: list[list[int]], scores: list[float] | None) -> Result:
        record = row.record
        result: Result = {"position": record.position, "line": record.line, "id": record.id}
        if not self._settings.to_text:
            result |= {"input": record.text, "scores": scores, "input_tokens": len(row.ids)}
            if record.reference is not None:
                result["reference"] = record.reference
            if self._settings.token_ids:
                result["token_ids"] = written
        return result | {"output_tokens": [len(ids) for ids in written]}
