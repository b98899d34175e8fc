"""Decides which waiting inputs an encoder runs together, and when.

Waiting inputs are sorted by length and cut into the batches whose total cost is lowest (Algorithm 2 of Fang et al.,
"TurboTransformers: An Efficient GPU Serving System For Transformer Models", PPoPP 2021, section 5). The batch with the
oldest input runs; the others are planned again, together with inputs that have arrived meanwhile. Costs decide which
inputs share a batch, never their results.

Two strategies decide when a batch starts. Hungry: as soon as the encoder is idle. Lazy: when the oldest input has used
half of its latency budget, or a full batch waits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from fastgen.engine.planning import WINDOW, mean, oldest_batch
from fastgen.pipeline.encoding.run import PASS_COST
from fastgen_serve.settings import ServeSettings

Item = TypeVar("Item")
Clock = Callable[[], float]
Run = Callable[[int, int], object]

# Warm-up measures a length with more and more inputs, until a batch takes longer than this many seconds.
LONGEST_MEASURED = 0.25
# The shortest length that is measured.
SHORTEST = 8
# The largest factor by which one delayed batch changes the costs, before the moving average.
MOST_CORRECTION = 2.0


@dataclass(frozen=True)
class Limits:
    """The limits of a batch.

    Attributes:
        inputs: at most.
        tokens: at most, padding included; a longer input forms a batch by itself.
    """

    inputs: int = 64
    tokens: int = 4096

    def most(self, longest: int) -> int:
        """Returns the most inputs of a batch whose longest input has this many tokens."""
        return max(1, min(self.inputs, self.tokens // longest))

    def are_reached(self, lengths: Sequence[int]) -> bool:
        """Returns whether inputs of these lengths fill a batch."""
        return len(lengths) >= self.inputs or sum(lengths) >= self.tokens


class Costs:
    """Seconds of a batch by the length of its inputs and their number, from a grid of measurements.

    The cost is interpolated linearly between points of the grid, and grows in proportion beyond the last point. The
    measured times of served batches correct the points around them.

    Args:
        grid: seconds by length and number of inputs; the lengths may have different numbers.
    """

    def __init__(self, grid: Mapping[tuple[int, int], float]) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        for (length, inputs), seconds in sorted(grid.items()):
            self._seconds.setdefault(length, {})[inputs] = seconds
        self._lengths = list(self._seconds)
        self._inputs = {length: list(row) for length, row in self._seconds.items()}
        self._known: dict[tuple[int, int], float] = {}

    def of(self, length: int, inputs: int) -> float:
        """Returns the expected seconds of such a batch."""
        found = self._known.get((length, inputs))
        if found is None:
            found = sum(weight * self._seconds[point][number] for point, number, weight in self._near(length, inputs))
            self._known[length, inputs] = found
        return found

    def note(self, length: int, inputs: int, seconds: float) -> None:
        """Records the seconds of such a batch: `of` then returns the moving average."""
        times = min(max(seconds / self.of(length, inputs), 1 / MOST_CORRECTION), MOST_CORRECTION)
        for point, number, _ in self._near(length, inputs):
            before = self._seconds[point][number]
            self._seconds[point][number] = mean(before, before * times)
        self._known.clear()

    def _near(self, length: int, inputs: int) -> Iterator[tuple[int, int, float]]:
        """Yields the grid points around a batch, with their weights in its cost."""
        for point, weight in _between(self._lengths, length):
            for number, part in _between(self._inputs[point], inputs):
                yield point, number, weight * part


def _between(points: Sequence[int], value: int) -> tuple[tuple[int, float], ...]:
    """Returns the points on both sides of a value, with their weights in it."""
    above = bisect_left(points, value)
    if above == 0:
        return ((points[0], 1.0),)
    if above == len(points):
        return ((points[-1], value / points[-1]),)
    low, high = points[above - 1], points[above]
    part = (value - low) / (high - low)
    return (low, 1 - part), (high, part)


def measured(
    run: Callable[[int, int], object], longest: int, limits: Limits, clock: Clock = time.perf_counter
) -> Costs:
    """Measures the costs of batches. Runs each twice; the faster run counts.

    Args:
        run: runs a batch of inputs of one length, as `Encodes.run_some`.
        longest: length of the longest possible input, in tokens.
        limits: of a batch.
    """
    grid: dict[tuple[int, int], float] = {}
    for length in _doubled(min(SHORTEST, longest), longest):
        for inputs in _doubled(1, limits.most(length)):
            grid[length, inputs] = min(_seconds(run, length, inputs, clock) for _ in range(2))
            if grid[length, inputs] > LONGEST_MEASURED:
                break
    return Costs(grid)


def guessed(longest: int, limits: Limits) -> Costs:
    """Returns costs before any measurement, in an arbitrary unit of time until batches correct them."""
    lengths, numbers = (1, longest), (1, limits.inputs)
    return Costs({(length, inputs): PASS_COST + length * inputs for length in lengths for inputs in numbers})


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yields the first number, its doublings, and the last one."""
    while first < last:
        yield first
        first *= 2
    yield last


def _seconds(run: Run, length: int, inputs: int, clock: Clock) -> float:
    begin = clock()
    run(length, inputs)
    return clock() - begin


class Plan(ABC):
    """Decides which of the waiting inputs run now."""

    @abstractmethod
    def choose(self, lengths: Sequence[int]) -> list[int]:
        """Returns the indices of the inputs to run now, given the lengths of all waiting inputs, oldest first."""

    def note(self, lengths: Sequence[int], seconds: float) -> None:  # noqa: B027 - most plans learn nothing from it
        """Records the seconds of a batch of inputs of these lengths."""


class Alone(Plan):
    """No batches: the oldest input runs."""

    def choose(self, lengths: Sequence[int]) -> list[int]:
        return [0]


class InOrder(Plan):
    """Naive batches: the oldest inputs run, padded to the longest of them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def choose(self, lengths: Sequence[int]) -> list[int]:
        longest = accumulate(lengths[: self._limits.inputs], max)
        return [index for index, length in enumerate(longest) if index < self._limits.most(length)]


class Cheapest(Plan):
    """The batch with the oldest input, of the batches whose total cost is lowest.

    Args:
        limits: of a batch.
        costs: of a batch whose inputs have one length.
        padded: whether inputs are padded to the longest of their batch. Without padding, a batch costs what one of its
            mean length costs.
    """

    def __init__(self, limits: Limits, costs: Costs, padded: bool) -> None:
        self._limits, self._costs, self._padded = limits, costs, padded

    def choose(self, lengths: Sequence[int]) -> list[int]:
        def cost(longest: int, inputs: int, tokens: int) -> float:
            return self._costs.of(self._length(longest, inputs, tokens), inputs)

        return oldest_batch(lengths[: WINDOW * self._limits.inputs], self._limits.most, cost)

    def note(self, lengths: Sequence[int], seconds: float) -> None:
        self._costs.note(self._length(max(lengths), len(lengths), sum(lengths)), len(lengths), seconds)

    def _length(self, longest: int, inputs: int, tokens: int) -> int:
        """Returns the common length of a batch of equal cost whose inputs have one length."""
        return longest if self._padded else -(-tokens // inputs)


@dataclass(frozen=True)
class _Waiting(Generic[Item]):
    item: Item
    length: int
    since: float


class Scheduler(Generic[Item]):
    """The queue of an encoder. It is not thread-safe: its owner must serialise calls.

    Args:
        plan: decides which inputs run now.
        limits: of a batch.
        delay: seconds that the oldest input waits for others, unless a full batch waits: 0 is hungry, half of the
            latency budget is lazy.
    """

    def __init__(self, plan: Plan, limits: Limits, delay: float = 0.0, clock: Clock = time.monotonic) -> None:
        self._plan, self._limits, self._delay, self._clock = plan, limits, delay, clock
        self._waiting: list[_Waiting[Item]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item, length: int) -> None:
        """Queues an input of this many tokens."""
        self._waiting.append(_Waiting(item, length, self._clock()))

    def discard(self, item: Item) -> bool:
        """Removes an input from the queue. Returns whether it was waiting."""
        for index, each in enumerate(self._waiting):
            if each.item is item:
                del self._waiting[index]
                return True
        return False

    def seconds_left(self) -> float | None:
        """Returns the seconds until a batch is due: 0 for now, None if the queue is empty."""
        if not self._waiting:
            return None
        if self._limits.are_reached([each.length for each in self._waiting]):
            return 0.0
        return max(0.0, self._waiting[0].since + self._delay - self._clock())

    def take(self) -> list[Item]:
        """Removes and returns the inputs of the batch to run now."""
        chosen = set(self._plan.choose([each.length for each in self._waiting]))
        batch = [each.item for index, each in enumerate(self._waiting) if index in chosen]
        self._waiting = [each for index, each in enumerate(self._waiting) if index not in chosen]
        return batch

    def take_all(self) -> list[Item]:
        """Removes and returns all inputs."""
        items = [each.item for each in self._waiting]
        self._waiting = []
        return items

    def note(self, lengths: Sequence[int], seconds: float) -> None:
        """Records the seconds of a batch of inputs of these lengths."""
        self._plan.note(lengths, seconds)


class Encodes(Protocol):
    """The interface that a scheduler needs of an encoder model."""

    def run_some(self, length: int, inputs: int) -> None:
        """Runs this many inputs of one length."""

    def leaves_padding_out(self) -> bool:
        """Returns whether batches are computed without their padding."""


def make_scheduler(settings: ServeSettings, encoder: Encodes, longest: int, limits: Limits) -> Scheduler[Any]:
    """Creates the scheduler of the settings. Measures the model, if it is to be warmed up.

    Args:
        longest: length of the longest possible input, in tokens.
    """
    delay = settings.slo_ms / 2000 if settings.scheduler == "lazy" and settings.slo_ms else 0.0
    return Scheduler(_plan(settings, encoder, longest, limits), limits, delay)


def _plan(settings: ServeSettings, encoder: Encodes, longest: int, limits: Limits) -> Plan:
    if settings.scheduler == "none":
        return Alone()
    if settings.scheduler == "naive":
        return InOrder(limits)
    padded = not encoder.leaves_padding_out()
    costs = measured(encoder.run_some, longest, limits) if settings.warm_up else guessed(longest, limits)
    return Cheapest(limits, costs, padded)
