"""Batches through a model, whatever happens on the way: memory that runs out, rows that the model refuses."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastgen import caches, memory
from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.planner import Batch, Prepared, split_rows
from fastgen.pipeline.records import Problem

Output = TypeVar("Output")
"""What a model returns for some rows."""
# With this many failures before the first success, the fault is not in the records.
MOST_FAILURES = 8
OUT_OF_MEMORY = "out-of-memory"


@dataclass
class BatchResult(Generic[Output]):
    """A batch after the model: raw outputs in the order of the batch, and the rows that failed."""

    batch: Batch
    outputs: list[Output] = field(default_factory=list)
    failures: list[tuple[Prepared, Problem]] = field(default_factory=list)


def free_captured_steps(device: Any) -> bool:
    """Gives back what FastGen keeps on a GPU for further batches of the same size; False where that was nothing."""
    import torch

    if device.type != "cuda":
        return False
    before = torch.cuda.memory_allocated(device)
    caches.free_captured_steps()
    gc.collect()
    freed = before - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return freed > 0


class BatchStage(ABC, Generic[Output]):
    """Puts batches through a model. Nothing a record does stops it; what stops it is the same for all records.

    Args:
        device: where the model is.
        weights: FastGen's settings for the weights of linear layers.
    """

    def __init__(self, device: Any, weights: Mapping[str, Any]) -> None:
        self.limit: int | None = None
        """The largest size that is still tried, once a larger one has not fitted in memory."""
        self.out_of_memory = 0
        self.seconds = 0.0
        self._device = device
        self._weights = weights
        self._failures = 0
        self._succeeded = False
        self._first_error = ""

    @abstractmethod
    def size(self, rows: Sequence[Prepared]) -> int:
        """The size of a batch as far as memory goes."""

    @abstractmethod
    def forward(self, rows: list[Prepared], batch: Batch) -> Output:
        """What the model makes of some rows of a batch, whose seconds are added to `seconds`."""

    def run(self, batch: Batch) -> BatchResult[Output]:
        """All of a batch: what the model returned, and the rows that it could not do."""
        done: BatchResult[Output] = BatchResult(batch)
        # A stack of row groups, worked on in the order of the batch.
        waiting = list(reversed(self._within_limit(batch.rows)))
        while waiting:
            rows = waiting.pop()
            made = self._tried(rows, batch)
            if isinstance(made, Problem) and made.kind == OUT_OF_MEMORY and free_captured_steps(self._device):
                made = self._tried(rows, batch)
            if not isinstance(made, Problem):
                done.outputs.append(made)
                continue
            out_of_memory = made.kind == OUT_OF_MEMORY
            if out_of_memory:
                self._remember(rows)
            if len(rows) > 1:
                # In halves while it is memory; one by one to find the row that the model does not take.
                waiting.extend(reversed(split_rows(rows, 2 if out_of_memory else len(rows))))
                continue
            done.failures.append((rows[0], made))
            self._failures += 1
            self._first_error = self._first_error or made.message
            if self._failures >= MOST_FAILURES:
                self.finish()
        return done

    def _tried(self, rows: list[Prepared], batch: Batch) -> Output | Problem:
        """What the model returns, or why not: an exception, its frames and their tensors do not outlive this."""
        try:
            with process_settings.changed(**self._weights):
                output = self.forward(rows, batch)
        except Exception as error:
            return Problem(OUT_OF_MEMORY if memory.is_out(error) else "model-error", one_line(error))
        self._succeeded = True
        return output

    def finish(self) -> None:
        """A SetupError where not one record succeeded and the model refused some."""
        if self._failures and not self._succeeded:
            raise SetupError(f"the model failed on every record: {self._first_error}")

    def _within_limit(self, rows: list[Prepared]) -> list[list[Prepared]]:
        """The batch, cut into parts no larger than what is known to fit."""
        if self.limit is None:
            return [rows]
        parts = 1
        while parts < len(rows) and any(self.size(part) > self.limit for part in split_rows(rows, parts)):
            parts += 1
        return split_rows(rows, parts)

    def _remember(self, rows: Sequence[Prepared]) -> None:
        import torch

        self.out_of_memory += 1
        if len(rows) > 1:
            self.limit = min(self.limit or self.size(rows), max(1, self.size(rows) // 2))
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use
