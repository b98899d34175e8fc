"""`fastgen.compare`: checks FastGen's promise on the user's own model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fastgen import counters, memory, patching
from fastgen.counters import CAPTURED_STEP, DRAFTS, GENERATE, Drafts
from fastgen.decoding.captured import graph
from fastgen.decoding.retrying import RandomState
from fastgen.quantization.layers import keeps_bits

# FastGen makes calls until there is nothing more to capture, and at most this many, before later calls are measured.
# Short calls are captured only after many of them, so at least this many are made, for up to this many seconds.
_MOST_SETTLING, _LEAST_SETTLING, _LEAST_SECONDS = 24, 12, 3.0
# Later calls of each side.
_LATER = 5
# No further calls of either kind are made once they have taken this many seconds together.
_SECONDS = 20.0


@dataclass(frozen=True)
class Run:
    """The calls of one side."""

    first: float
    """Seconds of the first call. FastGen may capture steps in it."""
    seconds: float
    """Median seconds of a later call, when nothing more is captured."""
    peak_memory: int | None
    """Peak bytes in use during a call beyond those in use before it: device memory on CUDA, resident memory of the
    process elsewhere; None if the system does not report it.
    """


@dataclass(frozen=True)
class Comparison:
    """The result of `fastgen.compare`. Prints as a table."""

    identical: bool
    """Whether all calls of both sides returned the same token ids; for a pipeline, the same results."""
    first_difference: tuple[int, int] | None
    """(row, position) of the first token that differs, or None. A position after the end of one of the results means
    that they have different lengths; (-1, -1), that they have different numbers of rows. For a pipeline, the position
    is -1: the result of that input differs.
    """
    original: Run
    fastgen: Run
    accelerated: bool
    """Whether FastGen accelerated the call; if not, both sides were the original code."""
    fallback: str | None
    """Why it was not accelerated, or None."""
    drafts: Drafts | None = None
    """Tokens that speculative decoding drafted and accepted in the last call, or None if there were none."""
    not_drafted: str | None = None
    """Why a call that could have had drafts went without them, or None."""
    settled: bool = True
    """Whether nothing more was captured in the later calls; if not, still later calls may be faster."""
    keeps_bits: bool = False
    """Whether the model has FastGen's low-bit layers, whose weights the original code unpacks in each call."""

    @property
    def speedup(self) -> float:
        """How many times faster FastGen's later calls were."""
        return self.original.seconds / self.fastgen.seconds

    @property
    def first_speedup(self) -> float:
        """How many times faster FastGen's first call was."""
        return self.original.first / self.fastgen.first

    def __str__(self) -> str:
        sides = self.original, self.fastgen
        rows: list[tuple[str, ...]] = [("", "original", "fastgen", "ratio")]
        rows.append(("first call", *(f"{side.first:.3f} s" for side in sides), f"{self.first_speedup:.2f}x"))
        rows.append(("later calls", *(f"{side.seconds:.3f} s" for side in sides), f"{self.speedup:.2f}x"))
        before, after = (side.peak_memory for side in sides)
        if before is not None and after is not None:
            # A ratio of a few MiB would mean nothing, and a larger one would be worse, unlike for the times.
            rows.append(("memory added", *(f"{size / 2**20:+.1f} MiB" for size in (before, after)), ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if not self.settled:
            lines.append("steps were still being captured: later calls may be faster, compare again")
        if self.keeps_bits:
            what = "low-bit layers, unpacked in each call"
            lines.append(f"original: {what}; compare the model in float for the gain")
        lines.append(f"tokens: {self._difference()}")
        lines.append(f"accelerated: {'yes' if self.accelerated else f'no ({self.fallback})'}")
        if self.drafts or self.not_drafted:
            lines.append(f"drafts: {self.drafts or f'none ({self.not_drafted})'}")
        return "\n".join(lines)

    def _difference(self) -> str:
        if self.first_difference is None:
            return "identical"
        row, position = self.first_difference
        if position >= 0:
            return f"DIFFERENT, first at row {row}, position {position}"
        return f"DIFFERENT, first in the result of input {row}" if row >= 0 else "DIFFERENT numbers of results"


def compare(model: Any, inputs: Any, tokenizer: Any, generate_kwargs: dict[str, Any]) -> Comparison:
    """See `fastgen.compare`."""
    work: _Generate | _Pipeline
    if hasattr(model, "preprocess") and hasattr(model, "postprocess"):
        work = _Pipeline(model, inputs, generate_kwargs)
    else:
        work = _Generate(model, inputs, tokenizer, generate_kwargs)
    original, fastgen = _Side(work, patching.suspended), _Side(work, contextlib.nullcontext)
    for side in (original, fastgen):
        side.warm_up()
        side.call()
    settled = fastgen.settle()
    start = time.perf_counter()
    for number in range(_LATER):
        if number and time.perf_counter() - start > _SECONDS:
            break
        original.call()
        fastgen.call()
    expected, *results = [*original.results, *fastgen.results]
    difference = next(filter(None, (work.differs(expected, result) for result in results)), None)
    before, after = fastgen.counted
    accelerated = _count(after, GENERATE, "accelerated") > _count(before, GENERATE, "accelerated")
    fallback = None if accelerated else _reasons(before, after, GENERATE, "fallback") or "FastGen is disabled"
    return Comparison(
        difference is None, difference, original.run(), fastgen.run(), accelerated, fallback,
        Drafts.between(before, after), _reasons(before, after, DRAFTS, "not used"), settled, keeps_bits(work.model),
    )  # fmt: skip


class _Side:
    """The calls of one side.

    Attributes:
        results: the results of all of its calls.
        counted: FastGen's counts before and after the last call.
    """

    def __init__(self, work: _Generate | _Pipeline, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._work, self._context = work, context
        self._random_state = RandomState(work.device)
        self._seconds: list[float] = []
        self._peaks: list[int | None] = []
        self.results: list[Any] = []
        self.counted: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    def warm_up(self) -> None:
        """Warms up: the first call of a process sets up threads, kernels and memory that later calls reuse."""
        with self._context():
            self._work.warm_up()

    def call(self) -> None:
        """Makes a measured call, from the common random state."""
        with self._context():
            seconds, peak, result = self._called()
        self._seconds.append(seconds)
        self._peaks.append(peak)
        self.results.append(result)

    def settle(self) -> bool:
        """Makes calls until one captures nothing and no later one will; returns whether that was reached."""
        start = time.perf_counter()
        for number in range(1, _MOST_SETTLING + 1):
            made = graph.made
            with self._context():
                self.results.append(self._called()[2])
            reasons = [_reasons(*self.counted, entry_point, "not used") for entry_point in (CAPTURED_STEP, DRAFTS)]
            seconds = time.perf_counter() - start
            captures = graph.made > made or any(counters.NOT_YET in (reason or "") for reason in reasons)
            may_capture = number < _LEAST_SETTLING and seconds < _LEAST_SECONDS
            if not (captures or may_capture):
                return True
            if seconds > _SECONDS:
                break
        return False

    def run(self) -> Run:
        """Returns the measurements."""
        first, *later = self._seconds
        peaks = [peak for peak in self._peaks if peak is not None]
        return Run(first, statistics.median(later), max(peaks, default=None))

    def _called(self) -> tuple[float, int | None, Any]:
        self._random_state.restore()
        arguments, before = self._work.arguments(), counters.snapshot()
        peak_memory = _peak_memory(self._work.device)
        start = time.perf_counter()
        result = self._work.call(arguments)
        if self._work.device.type == "cuda":
            torch.cuda.synchronize(self._work.device)
        seconds = time.perf_counter() - start
        self.counted = before, counters.snapshot()
        return seconds, peak_memory(), result


class _Generate:
    """`model.generate` with these inputs."""

    def __init__(self, model: Any, inputs: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self.model, self.device = model, model.device
        texts = [inputs] if isinstance(inputs, str) else inputs
        if isinstance(texts, (list, tuple)) and not texts:
            raise ValueError("fastgen.compare needs at least one text")
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            inputs = _tokenized(model, tokenizer, list(texts))
        self._arguments = {**(inputs if isinstance(inputs, Mapping) else {"inputs": inputs}), **options}
        self._arguments.pop("streamer", None)  # it would be fed several times

    def arguments(self) -> dict[str, Any]:
        return {name: _copied(value) for name, value in self._arguments.items()}

    def warm_up(self) -> None:
        """Generates two tokens."""
        lengths = ("max_length", "min_length", "min_new_tokens")
        short = {name: value for name, value in self.arguments().items() if name not in lengths}
        self.model.generate(**{**short, "max_new_tokens": 2})

    def call(self, arguments: dict[str, Any]) -> torch.Tensor:
        result = self.model.generate(**arguments)
        return result if isinstance(result, torch.Tensor) else result.sequences

    @staticmethod
    def differs(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int] | None:
        if first.shape[0] != second.shape[0]:
            return -1, -1
        common = min(first.shape[1], second.shape[1])
        different = (first[:, :common] != second[:, :common]).nonzero()
        if len(different):
            return int(different[0][0]), int(different[0][1])
        return None if first.shape == second.shape else (0, common)


class _Pipeline:
    """A Transformers pipeline with these inputs."""

    def __init__(self, pipeline: Any, inputs: Any, options: dict[str, Any]) -> None:
        if not pipeline.model.can_generate():
            raise ValueError(f"fastgen.compare takes pipelines that generate, which {type(pipeline).__name__} does not")
        self._pipeline, self._options = pipeline, options
        self._inputs = list(inputs) if isinstance(inputs, Iterator) else inputs  # each call takes all of them
        self.model, self.device = pipeline.model, pipeline.model.device

    def arguments(self) -> dict[str, Any]:
        return {name: _copied(value) for name, value in self._options.items()}

    def warm_up(self) -> None:
        """Makes a whole call of the original code: each pipeline has other options that would shorten one."""
        if not patching.is_active():
            self.call(self.arguments())

    def call(self, arguments: dict[str, Any]) -> Any:
        result = self._pipeline(copy.deepcopy(self._inputs), **arguments)
        return _plain(list(result) if isinstance(result, Iterator) else result)  # for a data set, it has yet to run

    @staticmethod
    def differs(first: Any, second: Any) -> tuple[int, int] | None:
        if not isinstance(first, list) or not isinstance(second, list):
            return None if first == second else (0, -1)
        if len(first) != len(second):
            return -1, -1
        return next(((row, -1) for row, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)


def _tokenized(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for texts, padded on the side that it generates from."""
    if tokenizer is None:
        raise TypeError("fastgen.compare needs tokenizer= to take texts")
    if len(texts) > 1 and tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    side = tokenizer.padding_side if model.config.is_encoder_decoder else "left"
    encoded = tokenizer(texts, padding=len(texts) > 1, padding_side=side, return_tensors="pt")
    known = inspect.signature(model.forward).parameters
    if "token_type_ids" not in known:  # tokenizers return it for models that refuse it
        encoded.pop("token_type_ids", None)
    return {name: value.to(model.device) for name, value in encoded.items()}


def _plain(result: Any) -> Any:
    """Returns the result of a pipeline with tensors and arrays as lists, which can be compared."""
    if isinstance(result, Mapping):
        return {name: _plain(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [_plain(value) for value in result]
    return result.tolist() if hasattr(result, "tolist") else result


def _count(stats: dict[str, Any], entry_point: str, what: str) -> Any:
    return stats.get(entry_point, {}).get(what, 0)


def _reasons(before: dict[str, Any], after: dict[str, Any], entry_point: str, what: str) -> str | None:
    """Returns the reasons that were counted between two snapshots."""
    known, found = (_count(stats, entry_point, what) or {} for stats in (before, after))
    return "; ".join(reason for reason, calls in found.items() if calls > known.get(reason, 0)) or None


def _copied(value: Any) -> Any:
    """Copies what a call changes: caches, encoder outputs, processors and criteria. Returns anything else unchanged."""
    if isinstance(value, Mapping):
        return copy.copy(value)
    if not (isinstance(value, list) or hasattr(value, "get_seq_length")):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):  # it holds a lock, or a tensor with gradient history: both sides share it
        return value


def _peak_memory(device: torch.device) -> Callable[[], int | None]:
    """Returns a function that later returns the peak memory since now, beyond the memory in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - allocated
    try:
        # Memory that earlier calls freed returns to the system first; it would hide what this call needs.
        memory.give_back_free()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident memory
        resident = psutil.Process().memory_info().rss
    except OSError:
        return lambda: None  # not Linux

    def since() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()  # psutil does not report it on Linux
        high_water_mark = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
        return max(high_water_mark - resident, 0)

    return since
