"""Runs batches through `generate`: padding, seeds, scores of sequences, and which steps are captured; or through the
engine, where a finished record makes room for the next one, if that gains anything.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen import memory
from fastgen import settings as process_settings
from fastgen.pipeline.batches import OUT_OF_MEMORY, Batch, BatchResult, BatchStage, Rules, cut, problem_of
from fastgen.pipeline.errors import Problem
from fastgen.pipeline.generation.loading import LoadedModel, depends_on_padding
from fastgen.pipeline.generation.options import RunOptions, captured_drafts
from fastgen.pipeline.inputs import Record


@dataclass
class RawOutput:
    """The model's output for some rows: all sequences of a row together, best first."""

    rows: list[Record]
    written: list[list[int]]
    """The tokens that the model wrote in each sequence, its end token included, without the padding after it."""
    scores: list[float] | None = None
    """The score of each sequence; None if there are none."""


class SequenceScores:
    """A stopping criterion that never stops: it reads the scores of each step and releases them.

    `generate` would keep the scores over the whole vocabulary of every step: gigabytes, for one number per sequence.
    This adds up the log-probability of each chosen token (beam search does its own sum) and empties the stored tensor.
    """

    releases_cache = True
    """FastGen need not fill the cache that a call returns: nobody reads it."""

    def __init__(self, beams: bool) -> None:
        self.releases_scores = beams
        """FastGen need not compute what would only be released."""
        self._beams = beams
        self._chosen: list[Any] = []
        self._usable = True

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        if isinstance(scores, tuple) and scores:
            last = scores[-1]
            if not self._beams:
                # One step, one token: anything else (speculation) has no scores here.
                if len(scores) == len(self._chosen) + 1 and last.shape[0] == input_ids.shape[0]:
                    logs = torch.log_softmax(last.float(), dim=-1)
                    self._chosen.append(logs.gather(1, input_ids[:, -1:]).squeeze(1))
                else:
                    self._usable = False
            last.set_()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def sums(self, lengths: Sequence[int]) -> list[float] | None:
        """Returns for each sequence the sum over its first `length` tokens; None if it could not be followed."""
        import torch

        if not self._usable or not self._chosen or len(self._chosen) < max(lengths):
            return None
        table = torch.stack(self._chosen, dim=1).double().cpu()
        return [float(row[:length].sum()) for row, length in zip(table, lengths, strict=True)]


class ModelStage(BatchStage[RawOutput]):
    """Puts batches through `generate`."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        super().__init__(loaded.device, settings.weights | (captured_drafts() if loaded.asks_for_drafts else {}))
        self.loaded = loaded
        self._settings = settings

    def size(self, rows: Sequence[Record]) -> int:
        """Returns the memory size of a batch: padded input tokens, and the most new tokens, for each row."""
        return len(rows) * (max(len(row.ids) for row in rows) + self._new_tokens)

    @property
    def _new_tokens(self) -> int:
        generation = self.loaded.generation
        return generation.max_new_tokens or generation.max_length or 20

    def _captured_step(self, batch: Batch) -> dict[str, Any]:
        """Returns FastGen's setting for a batch, from the plan alone, so that a resumed run has the same bits.

        On a GPU, every step that can be captured is. With drafts, the number of drafted tokens decides about bits.
        """
        is_on_cpu = self.loaded.device.type == "cpu"
        if not is_on_cpu or self._drafts or process_settings.current().captured_step != "auto":
            return {}
        steps = batch.alike * batch.rounds * min(self._new_tokens, process_settings.STEPS_OF_A_CALL)
        return {"captured_step": "always" if steps >= process_settings.RECORDING_PAYS_FROM else "never"}

    @property
    def _drafts(self) -> bool:
        if not self._settings.to_text:  # with scores, batches run without drafts
            return False
        return self.loaded.asks_for_drafts or process_settings.current().self_speculation != "off"

    def forward(self, rows: list[Record], batch: Batch) -> RawOutput:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        loaded = self.loaded
        # Decoder-only models continue after the last column, so the padding must be on the left.
        side = "right" if loaded.encoder_decoder else "left"
        tokens = [torch.tensor(row.ids, dtype=torch.long) for row in rows]
        ids = pad_sequence(tokens, True, loaded.pad_id, side)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], True, 0, side)
        scores, options = self.options()
        if loaded.generation.do_sample:
            # Every batch has its own seed: a resumed run draws what an uninterrupted one would have.
            torch.manual_seed(self.seed(batch.window, batch.index, rows[0].position))
        with process_settings.changed(**self._captured_step(batch)):
            output = loaded.model.generate(
                input_ids=ids.to(loaded.device),
                attention_mask=mask.to(loaded.device),
                generation_config=loaded.generation,
                **options,
            )
        return self.raw(rows, output, ids.shape[1], scores)

    def options(self) -> tuple[SequenceScores | None, dict[str, Any]]:
        """Returns the object that follows scores, if the output has some, and the arguments of `generate` beside the
        config.
        """
        generation, options = self.loaded.generation, dict[str, Any]()
        scores = None if self._settings.to_text else SequenceScores((generation.num_beams or 1) > 1)
        if scores is not None:
            options["stopping_criteria"] = [scores]
        if generation.stop_strings is not None:
            options["tokenizer"] = self.loaded.tokenizer
        if self.loaded.grammar is not None:
            options["logits_processor"] = [self.loaded.grammar.processor()]
        return scores, options

    def seed(self, *of: int) -> int:
        """Returns a 56-bit seed, from that of the run and numbers that identify its use."""
        words = ":".join(map(str, (self._settings.seed, *of))).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")

    def raw(self, rows: list[Record], output: Any, width: int, scores: SequenceScores | None) -> RawOutput:
        """Converts the output of `generate` for some rows, whose inputs are `width` tokens long, padding included."""
        end = self.loaded.generation.eos_token_id
        ends = frozenset() if end is None else frozenset([end] if isinstance(end, int) else end)
        # Before the new tokens are the padded prompt (decoder-only) or the start token (encoder-decoder).
        new = getattr(output, "sequences", output)[:, 1 if self.loaded.encoder_decoder else width :].tolist()
        raw = RawOutput(rows, [tokens[: token_count(tokens, ends, self.loaded.pad_id)] for tokens in new])
        own = getattr(output, "sequences_scores", None)
        if scores is not None:
            raw.scores = own.tolist() if own is not None else scores.sums(list(map(len, raw.written)))
        return raw


def token_count(generated: Sequence[int], ends: frozenset[int], pad_id: int) -> int:
    """Returns how many tokens the model wrote, its end token included, without the padding after it."""
    for index, token in enumerate(generated):
        if token in ends:
            return index + 1
    count = len(generated)
    while count and generated[count - 1] == pad_id:
        count -= 1
    return count


# Static batches are good enough if they are filled to this part, or if there are at most this many.
FILLED, FEW_BATCHES = 0.75, 4
# A record that has failed, and why.
_Failure = tuple[Record, Problem]


class ContinuousStage(ModelStage):
    """Puts batches through the model as requests of the engine: a finished record makes room for the next.

    A continuous batch has many records for each slot. It begins and ends with all slots free, and within it the
    engine's schedule counts tokens. So a batch's result does not depend on earlier batches, on the clock, or on the
    process that runs it: a resumed run computes the same.
    """

    def run(self, batch: Batch) -> BatchResult[RawOutput]:
        begin, done = time.perf_counter(), BatchResult[RawOutput](batch)
        with process_settings.changed(**self._weights, **self._captured_step(batch)):
            refused = self._serve(batch.rows, batch.at_once, done)
        self.seconds += time.perf_counter() - begin
        self._refuse(done, refused)
        return done

    def _serve(self, rows: list[Record], at_once: int, done: BatchResult[RawOutput]) -> list[_Failure]:
        """Runs records in slots, and failed ones again with fewer beside them. Returns those that the engine
        refuses.
        """
        refused: list[_Failure] = []
        while rows:
            failed = self._tried_in_slots(rows, at_once, done, refused)
            # As for static batches: halves while memory is short; single records to find one that the model refuses.
            is_memory = any(problem.kind == OUT_OF_MEMORY for _, problem in failed)
            at_once = max(min(at_once, len(rows)) // 2, 1) if is_memory else 1
            again = {row.position for row, _ in failed}
            rows = [row for row in rows if row.position in again]
        return refused

    def _tried_in_slots(
        self, rows: list[Record], at_once: int, done: BatchResult[RawOutput], refused: list[_Failure]
    ) -> list[_Failure]:
        """Runs records in slots. Returns those that have failed and must be run again, beside fewer others.

        Args:
            refused: receives the records that the engine refuses.
        """
        from fastgen.engine.continuous import ContinuousBatches
        from fastgen.engine.waiting import turns

        generation = self.loaded.generation
        slots = at_once * max(generation.num_beams or 1, generation.num_return_sequences or 1)
        made: dict[Any, tuple[Record, SequenceScores | None]] = {}
        for row in rows:
            scores, options = self.options()
            try:
                made[self._request(row, options, slots)] = row, scores
            except ValueError as error:
                refused.append((row, problem_of(error)))
        # Without a stall limit, the order does not depend on a clock.
        executor, tokens_before = ContinuousBatches(self.loaded.model, slots, max_stall=None), self.tokens
        again: list[_Failure] = []
        for turn in turns(executor, list(made)):
            left = len(again)
            for request in turn.finished:
                again += self._take(done, request, *made[request], is_alone=at_once == 1)
            self.tokens = tokens_before + executor.counts["tokens"]
            self.state = f"{turn.busy} of {slots} slots busy, {turn.waiting} waiting"
            told = len(turn.finished) - (len(again) - left)
            done.told += told
            self.tell(told)
        if any(problem.kind == OUT_OF_MEMORY for _, problem in again):
            self.out_of_memory += 1
            memory.free_captured_steps()
        return again

    def _refuse(self, done: BatchResult[RawOutput], refused: list[_Failure]) -> None:
        for row, problem in refused:
            self._fail(done, row, problem)

    def _request(self, row: Record, options: dict[str, Any], slots: int) -> Any:
        import torch

        from fastgen.engine.options import make

        model, generation = self.loaded.model, self.loaded.generation
        ids = torch.tensor([row.ids], dtype=torch.long, device=self.loaded.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # Every record has its own seed, whatever it shares a batch with.
        seed = self.seed(row.position) if generation.do_sample else None
        return make(model, inputs, generation, options, seed, slots)

    def _take(
        self, done: BatchResult[RawOutput], request: Any, row: Record, scores: SequenceScores | None, is_alone: bool
    ) -> list[_Failure]:
        """Takes a record's result; returns the record if it must be run again."""
        error = request.future.exception()
        if error is None:
            self._succeeded = True
            done.outputs.append(self.raw([row], request.future.result(), len(row.ids), scores))
            return []
        problem = problem_of(error)
        # Others may have taken the memory. If a step fails, all records whose criteria have seen it fail, whatever the
        # cause.
        if not is_alone and (problem.kind == OUT_OF_MEMORY or request.failures):
            return [(row, problem)]
        self.out_of_memory += problem.kind == OUT_OF_MEMORY
        self._fail(done, row, problem)
        return []


class AdaptiveStage(ContinuousStage):
    """Runs records continuously if static batches, which need equal lengths here, would be far from full.

    Only their lengths decide, so a resumed run does the same as before.
    """

    def run(self, batch: Batch) -> BatchResult[RawOutput]:
        parts = self._static_parts(batch)
        is_full = len(batch.rows) > FILLED * batch.at_once * len(parts)
        if not is_full and len(parts) > FEW_BATCHES and self._has_slots(batch):
            return super().run(batch)
        whole: BatchResult[RawOutput] = BatchResult(batch)
        for part in parts:
            self._static(part, whole)
        return whole

    def _static_parts(self, batch: Batch) -> list[list[Record]]:
        """Cuts the records of a batch into static batches."""
        rules = Rules(batch.at_once, equal_lengths=depends_on_padding(self.loaded))
        return [[batch.rows[index] for index in part] for part in cut([len(row.ids) for row in batch.rows], rules)]

    def _static(self, rows: list[Record], whole: BatchResult[RawOutput]) -> None:
        """Adds the results of a static batch. Steps are captured, or not, as for the whole batch."""
        batch = whole.batch
        alike = batch.alike * batch.rounds
        done = ModelStage.run(self, replace(batch, rows=rows, alike=alike, at_once=sys.maxsize))
        whole.outputs += done.outputs
        whole.failures += done.failures
        whole.told += len(rows)
        self.tokens += sum(len(tokens) for output in done.outputs for tokens in output.written)
        self.state = ""  # there are no slots now
        self.tell(len(rows))

    def _refuse(self, done: BatchResult[RawOutput], refused: list[_Failure]) -> None:
        """Runs what the engine refuses, for example for its positions, by `generate` itself, which may accept it."""
        for part in self._static_parts(replace(done.batch, rows=[row for row, _ in refused])):
            self._static(part, done)

    def _has_slots(self, batch: Batch) -> bool:
        from fastgen.engine.continuous import ContinuousBatches

        with process_settings.changed(**self._weights, **self._captured_step(batch)):
            return ContinuousBatches(self.loaded.model, batch.at_once, max_stall=None).has_slots


def batching_of(loaded: LoadedModel, settings: RunOptions) -> str:
    """Returns how records share the model: "static", "continuous", or "adaptive".

    This depends only on the model and the options, because it decides how batches are cut: a run may be resumed
    elsewhere.
    """
    if settings.batching != "auto":
        return settings.batching
    drafts = loaded.asks_for_drafts or settings.self_speculation != "off"
    return "static" if drafts or settings.max_tokens is not None or not depends_on_padding(loaded) else "adaptive"


def stage_for(loaded: LoadedModel, settings: RunOptions) -> ModelStage:
    stages = {"static": ModelStage, "continuous": ContinuousStage, "adaptive": AdaptiveStage}
    return stages[batching_of(loaded, settings)](loaded, settings)
