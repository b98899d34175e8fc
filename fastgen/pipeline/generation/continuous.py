"""Runs batches through the engine: a finished record makes room for the next one, if that gains anything."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from fastgen import caches
from fastgen import settings as process_settings
from fastgen.pipeline.batches import OUT_OF_MEMORY, Batch, BatchResult, Rules, cut, problem_of
from fastgen.pipeline.generation.loading import LoadedModel, depends_on_padding
from fastgen.pipeline.generation.model import ModelStage, RawOutput, SequenceScores
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.records import Problem, Record

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
            caches.free_captured_steps()
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
