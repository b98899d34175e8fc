"""Batches: which records share one, and how they go through a model, even if memory runs out or rows are refused.

Records are read in windows, in input order. Each window is sorted by length and cut into batches, so that the rows of a
batch have similar lengths and need little padding. The plan depends only on the lengths and the settings; therefore a
seeded run can be repeated, and an interrupted one resumed. `Collector` puts the results back in input order.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastgen import memory
from fastgen import settings as process_settings
from fastgen.partition import cheapest
from fastgen.pipeline.errors import Problem, SetupError, one_line
from fastgen.pipeline.inputs import Record
from fastgen.pipeline.layouts import Result

Output = TypeVar("Output")
"""What a model returns for some rows."""
# With this many failures before the first success, the fault is not in the records.
MOST_FAILURES = 8
OUT_OF_MEMORY = "out-of-memory"
# What to do about a damaged journal.
START_OVER = "move it away or restore it, or start over with --overwrite"
WINDOW_BATCHES = 64
# A window is held in memory, and a streamed output appears window by window: of large batches, a window has fewer.
WINDOW_RECORDS = 8192
# In a continuous batch, this many records share a row of the model, one after another. Rows idle at the end of the
# batch, which costs less with more records; an interrupt loses the batch.
RECORDS_OF_A_ROW = 32
# Lengths count as similar if they are equal when rounded up to a multiple of this many tokens.
_ABOUT = 128


@dataclass(frozen=True)
class Window:
    """Consecutive records: the position of the first one, their number, their batches, and results of those skipped."""

    index: int
    start: int
    count: int
    batches: int
    bad: list[Result] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Records that go through the model together, longest first; in continuous batching, `at_once` at a time."""

    window: int
    index: int
    rows: list[Record]
    alike: int = 1
    """The number of batches of its window, done ones included, with as many rows of similar length; this one counts."""
    at_once: int = sys.maxsize
    """The most records that are in the model at the same time."""

    @property
    def rounds(self) -> int:
        """The number of records that a row of the model processes, one after another."""
        return max(1, -(-len(self.rows) // self.at_once))


@dataclass(frozen=True)
class Rules:
    """How batches are cut."""

    batch_size: int
    max_tokens: int | None = None
    equal_lengths: bool = False
    """Only rows of equal length share a batch: for options whose effect depends on padding."""
    pass_cost: int | None = None
    """Fixed cost of a batch beside its padded tokens, in tokens. With it, batches are those of the least total cost."""
    continuous: bool = False
    """A finished record makes room for another one of its batch, which has more than `batch_size` records."""
    adaptive: bool = False
    """Records may do so, in the same batches."""

    @property
    def batching(self) -> str:
        return "continuous" if self.continuous else "adaptive" if self.adaptive else "static"

    @property
    def batch_records(self) -> int:
        """The most records of a batch."""
        return self.batch_size * (RECORDS_OF_A_ROW if self.continuous or self.adaptive else 1)

    @property
    def window_records(self) -> int:
        """The number of records in a window: a multiple of the batch size, unless that is too many."""
        return max(self.batch_size, min(WINDOW_BATCHES * self.batch_size, WINDOW_RECORDS))


def cut(lengths: Sequence[int], rules: Rules) -> list[list[int]]:
    """Cuts rows into batches of indices into `lengths`, longest rows first.

    A batch has at most `batch_records` rows and, with padding, `max_tokens` tokens. A longer row is a batch by itself.
    """
    # Longest first, so that a lack of memory shows at once. Rows of equal length keep the input order.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if rules.pass_cost is not None:
        return _cheapest([lengths[index] for index in order], order, rules, rules.pass_cost)
    batches: list[list[int]] = []
    for index in order:
        batch = batches[-1] if batches else []
        width = lengths[batch[0]] if batch else 0
        if (
            0 < len(batch) < rules.batch_records
            and (rules.max_tokens is None or (len(batch) + 1) * width <= rules.max_tokens)
            and (not rules.equal_lengths or lengths[index] == width)
        ):
            batch.append(index)
        else:
            batches.append([index])
    return batches


def _cheapest(lengths: Sequence[int], order: list[int], rules: Rules, pass_cost: int) -> list[list[int]]:
    """Cuts rows that are sorted by length into the batches of the least total cost.

    Args:
        lengths: lengths of the rows, longest first.
        order: the rows' own indices.
    """

    def starts(end: int) -> Iterator[int]:
        for first in range(end - 1, max(end - rules.batch_size, 0) - 1, -1):
            if first < end - 1 and rules.max_tokens is not None and (end - first) * lengths[first] > rules.max_tokens:
                return  # further rows are longer, and there are more of them
            yield first

    def cost(first: int, end: int) -> int:
        return (end - first) * lengths[first] + pass_cost

    return [order[start:end] for start, end in cheapest(range(1, len(lengths) + 1), starts, cost)[1]]


@dataclass
class Resumed:
    """What an interrupted run has done: its windows, and the finished batches of each. Empty for a new run."""

    windows: dict[int, Window] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)


def plan(
    records: Iterable[Record],
    prepare: Callable[[Sequence[Record]], list[Record]],
    rules: Rules,
    resumed: Resumed,
) -> Iterator[Window | Batch]:
    """Yields each window, followed by those of its batches that are not done yet.

    Raises `SetupError` if the input is not the one that the interrupted run read.
    """
    stream = iter(records)
    for index in itertools.count():
        chunk = list(itertools.islice(stream, rules.window_records))
        if not chunk:
            _check_same(index >= len(resumed.windows))
            return
        known, done = resumed.windows.get(index), resumed.done.get(index, set())
        if known and len(done) == known.batches:
            # All is done: no need to tokenise the window.
            _check_same(known.start == chunk[0].position and known.count == len(chunk))
            continue
        encoded = _one_by_one([record for record in chunk if not record.problem], prepare)
        prepared = [record for record in encoded if not record.problem]
        bad = [record.error() for record in (*chunk, *encoded) if record.problem]
        bad.sort(key=lambda result: result["position"])
        lengths = [len(row.ids) for row in prepared]
        batches = cut(lengths, rules)
        sizes = [(len(rows), -(-lengths[rows[0]] // _ABOUT)) for rows in batches]
        alike = Counter(sizes)
        window = Window(index, chunk[0].position, len(chunk), len(batches), bad)
        if known:
            _check_same(known == window)
        else:
            yield window
        for number, (rows, size) in enumerate(zip(batches, sizes, strict=True)):
            if number not in done:
                yield Batch(index, number, [prepared[row] for row in rows], alike[size], rules.batch_size)


def _check_same(same: bool) -> None:
    if not same:
        raise SetupError("cannot resume: the input is not the one that the interrupted run read")


def split_rows(rows: list[Record], parts: int) -> list[list[Record]]:
    """Splits rows into consecutive parts of nearly equal size. Rows of similar length stay together."""
    size, more = divmod(len(rows), parts)
    ends = [part * size + min(part, more) for part in range(parts + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends) if start < end]


def _one_by_one(records: Sequence[Record], tokenised: Callable[[Sequence[Record]], list[Record]]) -> list[Record]:
    """Tokenises records together. If the tokenizer refuses a text, tokenises them one by one, and skips that one."""
    try:
        return tokenised(records) if records else []
    except Exception as error:
        if len(records) == 1:
            return [records[0].skipped(Problem("tokenizer", f"the tokenizer refuses the text: {one_line(error)}"))]
        return [found for record in records for found in _one_by_one([record], tokenised)]


@dataclass
class BatchResult(Generic[Output]):
    """A batch after the model: raw outputs in the order in which they were done, and results of failed rows."""

    batch: Batch
    outputs: list[Output] = field(default_factory=list)
    failures: list[Result] = field(default_factory=list)
    told: int = 0
    """Rows that the progress display has counted already."""


def problem_of(error: Exception) -> Problem:
    """Returns why the model failed on a record."""
    return Problem(OUT_OF_MEMORY if memory.is_out(error) else "model-error", one_line(error))


def free_captured_steps(device: Any) -> bool:
    """Frees what FastGen keeps on a GPU for further batches of the same size; returns whether that freed any memory."""
    import torch

    if device.type != "cuda":
        return False
    before = torch.cuda.memory_allocated(device)
    memory.free_captured_steps()
    gc.collect()
    freed = before - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return freed > 0


class BatchStage(ABC, Generic[Output]):
    """Puts batches through a model. No single record can stop it; only faults that affect all records do.

    Args:
        device: the model's device.
        weights: FastGen's settings for the weights of linear layers.
    """

    def __init__(self, device: Any, weights: Mapping[str, Any]) -> None:
        self.limit: int | None = None
        """The largest size that is still tried, after a larger one did not fit in memory."""
        self.out_of_memory = 0
        self.seconds = 0.0
        self.tell: Callable[[int], object] = lambda done: None
        """Called with a number of finished rows while their batch runs, to show progress."""
        self.tokens, self.state = 0, ""
        """What the progress shows then: the tokens generated so far, and a text beside their rate."""
        self.may_give_up = True
        """The stage stops after many failures without a success: all records belong to one run."""
        self._device = device
        self._weights = weights
        self._failures = 0
        self._succeeded = False
        self._first_error = ""

    @abstractmethod
    def size(self, rows: Sequence[Record]) -> int:
        """Returns the size of a batch as far as memory is concerned."""

    @abstractmethod
    def forward(self, rows: list[Record], batch: Batch) -> Output:
        """Returns the model's output for some rows of a batch."""

    def run(self, batch: Batch) -> BatchResult[Output]:
        """Runs a whole batch: returns the model's outputs, and the rows on which it failed."""
        done: BatchResult[Output] = BatchResult(batch)
        # A stack of row groups, processed in the order of the batch.
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
                # Halves while memory is short; single rows to find the one that the model refuses.
                waiting.extend(reversed(split_rows(rows, 2 if out_of_memory else len(rows))))
                continue
            self._fail(done, rows[0], made)
        return done

    def adopt(self, done: BatchResult[Output], seconds: float, out_of_memory: int) -> BatchResult[Output]:
        """Counts a batch that another process ran, and the seconds that it took."""
        self.seconds += seconds
        self.out_of_memory += out_of_memory
        self._succeeded |= bool(done.outputs)
        for failure in done.failures:
            self._count_failure(failure["message"])
        return done

    def _fail(self, done: BatchResult[Output], row: Record, problem: Problem) -> None:
        done.failures.append(row.skipped(problem).error())
        self._count_failure(problem.message)

    def _count_failure(self, message: str) -> None:
        self._failures += 1
        self._first_error = self._first_error or message
        if self.may_give_up and self._failures >= MOST_FAILURES:
            self.finish()

    def _tried(self, rows: list[Record], batch: Batch) -> Output | Problem:
        """Returns the model's output, or why there is none: no exception outlives this call, with its frames and
        tensors.
        """
        start = time.perf_counter()
        try:
            with process_settings.changed(**self._weights):
                output = self.forward(rows, batch)
        except Exception as error:
            return problem_of(error)
        finally:
            self.seconds += time.perf_counter() - start
        self._succeeded = True
        return output

    def finish(self) -> None:
        """Raises SetupError if no record succeeded and the model refused some."""
        if self._failures and not self._succeeded:
            raise SetupError(f"the model failed on every record: {self._first_error}")

    def _within_limit(self, rows: list[Record]) -> list[list[Record]]:
        """Splits the batch into parts no larger than what is known to fit."""
        if self.limit is None:
            return [rows]
        parts = 1
        while parts < len(rows) and any(self.size(part) > self.limit for part in split_rows(rows, parts)):
            parts += 1
        return split_rows(rows, parts)

    def _remember(self, rows: Sequence[Record]) -> None:
        import torch

        self.out_of_memory += 1
        if len(rows) > 1:
            self.limit = min(self.limit or self.size(rows), max(1, self.size(rows) // 2))
        gc.collect()
        torch.cuda.empty_cache()  # does nothing if CUDA is not in use


class Collector:
    """Turns batches, which come in the order in which they are processed, into records in input order.

    Every method raises `SetupError` if windows and batches do not fit together, because records would be lost.

    Args:
        source: the origin of the batches, for messages.
    """

    def __init__(self, source: object = "the output") -> None:
        self._source = source
        self._window: Window | None = None
        self.end = 0  # the position after the last window
        self._complete = True
        self._batches: set[int] = set()
        self._results: dict[int, Result] = {}

    def take(self, entry: Mapping[str, Any]) -> list[Result]:
        """Takes an entry of the journal; returns the records of the window that it completes."""
        if "window" in entry:
            return self.open(Window(**entry["window"]))
        if "batch" in entry:
            return self.add(*(entry["batch"][name] for name in ("window", "index", "results")))
        return []

    def open(self, window: Window) -> list[Result]:
        """Begins a window; returns its records at once if it has no batches."""
        self.close(window.start)
        self.end = window.start + window.count
        self._window, self._complete, self._batches, self._results = window, False, set(), {}
        return self._keep(window, window.bad)

    def add(self, window: int, index: int, results: list[Result]) -> list[Result]:
        """Takes the results of a batch; returns all records of the window with its last batch."""
        if self._window is None or self._window.index != window:
            raise self._damaged("a batch is without its window")
        if index in self._batches:  # a batch that is in the journal twice counts once
            return []
        self._batches.add(index)
        return self._keep(self._window, results)

    def close(self, end: int) -> None:
        """Ends the input: checks that the window has all batches, and that the windows reach to this position."""
        if not self._complete:
            raise self._damaged("a window lacks a batch")
        if self.end != end:
            raise self._damaged("a window is missing")

    def _keep(self, window: Window, results: list[Result]) -> list[Result]:
        positions = range(window.start, window.start + window.count)
        self._results |= {result["position"]: result for result in results}
        if any(result["position"] not in positions for result in results):
            raise self._damaged("a record is not of its window")
        if len(self._batches) < window.batches:
            return []
        if len(self._results) < window.count:
            raise self._damaged("a window lacks records")
        self._complete = True
        return [self._results.pop(position) for position in positions]

    def _damaged(self, fault: str) -> SetupError:
        return SetupError(f"{self._source} is damaged: {fault} ({START_OVER})")
