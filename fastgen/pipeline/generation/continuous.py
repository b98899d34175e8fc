"""Batches through the engine: a record that is done makes room for the next one, where that gains."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import OUT_OF_MEMORY, Batch, BatchResult, Rules, cut, problem_of, split_rows
from fastgen.pipeline.generation.loading import LoadedModel, depends_on_padding
from fastgen.pipeline.generation.model import ModelStage, RawOutput, SequenceScores
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.records import Problem, Record

# A record that enters a running step has a call of its own, which a small model's steps do not make up for: continuous
# batching is for models with so many weights at least.
LEAST_WEIGHTS = 30_000_000
# More rows are bound by arithmetic on a CPU: a static batch, which leaves out rows that are over, loses nothing then.
MOST_ROWS = 32
# Fewer static batches than this end before what continuous batching costs at the beginning has come in.
LEAST_BATCHES = 6
# The part of a static batch's row-steps that its outputs take, up to which making room for others gains.
UNEVEN = 0.75


class ContinuousStage(ModelStage):
    """Puts batches through the model as requests of the engine: a record that is done makes room for the next.

    A continuous batch has many records for each slot. It begins and ends with all slots free, and within it the
    engine's schedule counts tokens. So what a batch gives does not depend on the batches before, on the clock, or on
    the process that runs it: a run that is resumed does the same again.
    """

    def run(self, batch: Batch) -> BatchResult[RawOutput]:
        begin, slots = time.perf_counter(), batch.at_once * rows_of_a_record(self.loaded.generation)
        done: BatchResult[RawOutput] = BatchResult(batch)
        with process_settings.changed(**self._weights, **self._captured_step(batch)):
            refused = self._serve(batch.rows, slots, done)
        self.seconds += time.perf_counter() - begin
        self._refuse(done, refused)
        return done

    def _serve(self, rows: list[Record], slots: int, done: BatchResult[RawOutput]) -> list[tuple[Record, Problem]]:
        """Runs records in slots. Those that the engine refuses, and why."""
        from fastgen.engine.continuous import ContinuousBatches
        from fastgen.engine.foreground import turns

        made: dict[Any, tuple[Record, SequenceScores | None]] = {}
        refused: list[tuple[Record, Problem]] = []
        for row in rows:
            scores, options = self.options()
            try:
                made[self._request(row, options, slots)] = row, scores
            except ValueError as error:
                refused.append((row, problem_of(error)))
        # Without a limit for stalls the order depends on no clock.
        executor, tokens_before = ContinuousBatches(self.loaded.model, slots, max_stall=None), self.tokens
        for turn in turns(executor, list(made)):
            for request in turn.finished:
                self._take(done, *made[request], request.future)
            self.tokens = tokens_before + executor.counts["tokens"]
            self.state = f"{turn.busy} of {slots} slots busy, {turn.waiting} waiting"
            done.told += len(turn.finished)
            self.tell(len(turn.finished))
        return refused

    def _refuse(self, done: BatchResult[RawOutput], refused: list[tuple[Record, Problem]]) -> None:
        for row, problem in refused:
            self._fail(done, row, problem)

    def _request(self, row: Record, options: dict[str, Any], slots: int) -> Any:
        import torch

        from fastgen.engine.options import make

        model, generation = self.loaded.model, self.loaded.generation
        ids = torch.tensor([row.ids], dtype=torch.long, device=self.loaded.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # A seed of its own for every record, whatever it shares a batch with.
        seed = self.seed(row.position) if generation.do_sample else None
        return make(model, inputs, generation, options, seed, slots)

    def _take(self, done: BatchResult[RawOutput], row: Record, scores: SequenceScores | None, future: Any) -> None:
        error = future.exception()
        if error is not None:
            problem = problem_of(error)
            self.out_of_memory += problem.kind == OUT_OF_MEMORY
            self._fail(done, row, problem)
            return
        self._succeeded = True
        done.outputs.append(self.raw([row], future.result(), len(row.ids), scores))


class AdaptiveStage(ContinuousStage):
    """Goes on with static batches where they are good, and continuously where they are not.

    They are good where they are full, and where their outputs are about as long as each other. What the outputs of the
    first one say decides about the other records of a batch. So the same records give the same, whatever runs beside
    them, and a run that is resumed decides as it did before.
    """

    def run(self, batch: Batch) -> BatchResult[RawOutput]:
        of_one_length = depends_on_padding(self.loaded)
        parts = _static_parts(batch, of_one_length)
        gains, done = len(parts) >= LEAST_BATCHES and self._has_slots(batch), list[BatchResult[RawOutput]]()
        if of_one_length:
            gains &= len(batch.rows) <= UNEVEN * batch.at_once * len(parts)
        else:
            done.append(self._static(batch, parts.pop(0)))
            gains = gains and self._is_uneven(done[0].outputs)
        if gains:
            done.append(super().run(replace(batch, rows=list(itertools.chain.from_iterable(parts)))))
        else:
            done += [self._static(batch, part) for part in parts]
        return _joined(batch, done)

    def _static(self, batch: Batch, rows: list[Record]) -> BatchResult[RawOutput]:
        alike = batch.alike * batch.rounds
        done = ModelStage.run(self, replace(batch, rows=rows, alike=alike, at_once=sys.maxsize))
        done.told = len(rows)
        self.tell(done.told)
        return done

    def _refuse(self, done: BatchResult[RawOutput], refused: list[tuple[Record, Problem]]) -> None:
        """What the engine refuses, as positions that may not do, `generate` itself may take."""
        for row, _ in refused:
            alone = self._static(done.batch, [row])
            done.outputs += alone.outputs
            done.failures += alone.failures
            done.told += alone.told

    def _has_slots(self, batch: Batch) -> bool:
        from fastgen.engine.continuous import ContinuousBatches

        with process_settings.changed(**self._weights, **self._captured_step(batch)):
            return ContinuousBatches(self.loaded.model, batch.at_once, max_stall=None).has_slots

    def _is_uneven(self, outputs: Sequence[RawOutput]) -> bool:
        lengths = [
            max(map(len, sequences))
            for output in outputs
            for sequences in split_rows(output.written(self.loaded), len(output.rows))
        ]
        return bool(lengths) and sum(lengths) <= UNEVEN * len(lengths) * max(lengths)


def _static_parts(batch: Batch, equal_lengths: bool) -> list[list[Record]]:
    """The records of a batch as static ones have them."""
    rules = Rules(batch.at_once, equal_lengths=equal_lengths)
    return [[batch.rows[index] for index in part] for part in cut([len(row.ids) for row in batch.rows], rules)]


def _joined(batch: Batch, parts: Sequence[BatchResult[RawOutput]]) -> BatchResult[RawOutput]:
    whole: BatchResult[RawOutput] = BatchResult(batch)
    for part in parts:
        whole.outputs += part.outputs
        whole.failures += part.failures
        whole.told += part.told
    return whole


def rows_of_a_record(generation: Any) -> int:
    """Rows that a record takes in the model."""
    return max(generation.num_beams or 1, generation.num_return_sequences or 1)


def batching_of(loaded: LoadedModel, settings: RunOptions) -> str:
    """How records share the model: "static", "continuous", or "adaptive".

    It depends on the model and the options alone, since batches are cut by it: a run may be resumed elsewhere.
    """
    if settings.batching != "auto":
        return settings.batching
    rows, generation = settings.batch_size, loaded.generation
    if settings.max_tokens is not None or loaded.asks_for_drafts or settings.self_speculation != "off":
        return "static"
    if rows == "auto" or rows * rows_of_a_record(generation) > MOST_ROWS or _weights(loaded.model) < LEAST_WEIGHTS:
        return "static"
    return "adaptive"


def _weights(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def stage_for(loaded: LoadedModel, settings: RunOptions) -> ModelStage:
    stages = {"static": ModelStage, "continuous": ContinuousStage, "adaptive": AdaptiveStage}
    return stages[batching_of(loaded, settings)](loaded, settings)
