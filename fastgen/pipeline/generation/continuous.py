"""Continuous batching: each record is a request of the engine, and one that is done makes room for the next.

A continuous batch has many records for each slot. It begins and ends with all slots free, and within it the engine's
schedule counts tokens. So what a batch gives does not depend on the batches before, on the clock, or on the process
that runs it: a run that is resumed does the same again.
"""

from __future__ import annotations

import time
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import OUT_OF_MEMORY, Batch, BatchResult, problem_of
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.generation.model import ModelStage, RawOutput, SequenceScores
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.records import Problem, Record


def is_continuous(settings: RunOptions) -> bool:
    """Whether a run batches continuously: so far only if it is asked to.

    `auto` is static. A run knows its inputs, and puts those of about the same length together; on a small model that is
    faster, as each request that enters has a call of `generate` of its own.
    """
    return settings.batching == "continuous"


def stage_for(loaded: LoadedModel, settings: RunOptions, continuous: bool) -> ModelStage:
    return ContinuousStage(loaded, settings) if continuous else ModelStage(loaded, settings)


class ContinuousStage(ModelStage):
    """Puts batches through the model as requests of the engine."""

    def run(self, batch: Batch) -> BatchResult[RawOutput]:
        generation, begin = self.loaded.generation, time.perf_counter()
        slots = batch.at_once * max(generation.num_beams or 1, generation.num_return_sequences or 1)
        done: BatchResult[RawOutput] = BatchResult(batch)
        with process_settings.changed(**self._weights, **self._captured_step(batch)):
            self._serve(batch.rows, slots, done)
        self.seconds += time.perf_counter() - begin
        return done

    def _serve(self, rows: list[Record], slots: int, done: BatchResult[RawOutput]) -> None:
        from fastgen.engine import foreground

        made: dict[Any, tuple[Record, SequenceScores | None]] = {}
        refused: list[tuple[Record, Problem]] = []
        for row in rows:
            scores, options = self.options()
            try:
                made[self._request(row, options, slots)] = row, scores
            except ValueError as error:
                refused.append((row, problem_of(error)))
        executor, tokens_before = foreground.executor_for(self.loaded.model, slots), self.tokens
        for turn in foreground.turns(executor, list(made)):
            for request in turn.finished:
                self._take(done, *made[request], request.future)
            self.tokens = tokens_before + executor.counts["tokens"]
            self.state = f"{turn.busy} of {slots} slots busy, {turn.waiting} waiting"
            done.told += len(turn.finished)
            self.tell(len(turn.finished))
        for row, problem in refused:
            self._fail(done, row, problem)

    def _request(self, row: Record, options: dict[str, Any], slots: int) -> Any:
        import torch

        from fastgen.engine import requests

        model, generation = self.loaded.model, self.loaded.generation
        ids = torch.tensor([row.ids], dtype=torch.long, device=self.loaded.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # A seed of its own for every record, whatever it shares a batch with.
        seed = self.seed(row.position) if generation.do_sample else None
        return requests.make(model, inputs, generation, options, seed, slots)

    def _take(self, done: BatchResult[RawOutput], row: Record, scores: SequenceScores | None, future: Any) -> None:
        error = future.exception()
        if error is not None:
            problem = problem_of(error)
            self.out_of_memory += problem.kind == OUT_OF_MEMORY
            self._fail(done, row, problem)
            return
        self._succeeded = True
        done.outputs.append(self.raw([row], future.result(), len(row.ids), scores))
