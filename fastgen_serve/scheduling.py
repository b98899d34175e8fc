"""Which waiting inputs an encoder runs together, and when it begins.

What waits is sorted by length and cut into the batches that cost least together (Algorithm 2 of Fang et al.,
"TurboTransformers: An Efficient GPU Serving System For Transformer Models", PPoPP 2021, section 5). The batch with the
oldest input runs; the others are planned again, with what has come meanwhile. Costs decide which inputs share a batch,
never what an input gives.

Two strategies say when a batch begins. Hungry: as soon as nothing runs. Lazy: when the oldest input has used half of
its latency budget, or a full batch waits.
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

# At warm-up a length is measured with more and more inputs, up to a batch of so many seconds.
LONGEST_MEASURED = 0.25
# The shortest length that is measured.
SHORTEST = 8
# One batch that something has held up moves the costs by that factor at the most, before the moving average.
MOST_CORRECTION = 2.0


@dataclass(frozen=True)
class Limits:
    """What a batch may have.

    Attributes:
        inputs: at the most.
        tokens: padding included; an input that has more is a batch by itself.
    """

    inputs: int = 64
    tokens: int = 4096

    def most(self, longest: int) -> int:
        """How many inputs a batch may have whose longest one has so many tokens."""
        return max(1, min(self.inputs, self.tokens // longest))

    def are_reached(self, lengths: Sequence[int]) -> bool:
        """Whether inputs of these lengths are a full batch."""
        return len(lengths) >= self.inputs or sum(lengths) >= self.tokens


class Costs:
    """Seconds of a batch by the length of its inputs and their number, from those of a grid.

    Between two points of the grid, cost is a straight line; beyond the last one it grows in proportion. What batches
    take while serving corrects the points around them.

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
        """The seconds that such a batch will take."""
        found = self._known.get((length, inputs))
        if found is None:
            found = sum(weight * self._seconds[point][number] for point, number, weight in self._near(length, inputs))
            self._known[length, inputs] = found
        return found

    def note(self, length: int, inputs: int, seconds: float) -> None:
        """Such a batch took so long: what `of` says of it then is the moving average."""
        times = min(max(seconds / self.of(length, inputs), 1 / MOST_CORRECTION), MOST_CORRECTION)
        for point, number, _ in self._near(length, inputs):
            before = self._seconds[point][number]
            self._seconds[point][number] = mean(before, before * times)
        self._known.clear()

    def _near(self, length: int, inputs: int) -> Iterator[tuple[int, int, float]]:
        """The points of the grid around a batch, with their parts in its cost."""
        for point, weight in _between(self._lengths, length):
            for number, part in _between(self._inputs[point], inputs):
                yield point, number, weight * part


def _between(points: Sequence[int], value: int) -> tuple[tuple[int, float], ...]:
    """The points on both sides of a value, with their parts in it."""
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
    """The costs of batches, each of which is run twice; the faster one counts.

    Args:
        run: runs a batch of inputs of one length, as `Encodes.run_some`.
        longest: an input that there can be, in tokens.
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
    """Costs before anything has been measured, in no unit of time until batches correct them."""
    lengths, numbers = (1, longest), (1, limits.inputs)
    return Costs({(length, inputs): PASS_COST + length * inputs for length in lengths for inputs in numbers})


def _doubled(first: int, last: int) -> Iterator[int]:
    """The first number, twice that and so on, and the last one."""
    while first < last:
        yield first
        first *= 2
    yield last


def _seconds(run: Run, length: int, inputs: int, clock: Clock) -> float:
    begin = clock()
    run(length, inputs)
    return clock() - begin


class Plan(ABC):
    """Says which of the inputs that wait run now."""

    @abstractmethod
    def choose(self, lengths: Sequence[int]) -> list[int]:
        """Indices of those that run now into the lengths of all that wait, oldest first."""

    def note(self, lengths: Sequence[int], seconds: float) -> None:  # noqa: B027 - most plans learn nothing from it
        """A batch of inputs of these lengths took so long."""


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
    """Of the batches that cost least together, that with the oldest input.

    Args:
        limits: of a batch.
        costs: of a batch whose inputs are of one length.
        padded: inputs are computed as long as the longest of their batch. Otherwise padding is left out: a batch costs
            what one of its mean length costs.
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
        """That of all inputs of a batch that costs as much."""
        return longest if self._padded else -(-tokens // inputs)


@dataclass(frozen=True)
class _Waiting(Generic[Item]):
    item: Item
    length: int
    since: float


class Scheduler(Generic[Item]):
    """What waits for an encoder. Its owner takes care that one thread at a time calls it.

    Args:
        plan: says which of them run now.
        limits: of a batch.
        delay: seconds that the oldest waits for others, unless a full batch waits: 0 is hungry, half of the latency
            budget is lazy.
    """

    def __init__(self, plan: Plan, limits: Limits, delay: float = 0.0, clock: Clock = time.monotonic) -> None:
        self._plan, self._limits, self._delay, self._clock = plan, limits, delay, clock
        self._waiting: list[_Waiting[Item]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item, length: int) -> None:
        """Lets an input of so many tokens wait."""
        self._waiting.append(_Waiting(item, length, self._clock()))

    def discard(self, item: Item) -> bool:
        """Whether the input was waiting, which it is not any more."""
        for index, each in enumerate(self._waiting):
            if each.item is item:
                del self._waiting[index]
                return True
        return False

    def seconds_left(self) -> float | None:
        """Seconds until a batch is due: 0 for now, None while nothing waits."""
        if not self._waiting:
            return None
        if self._limits.are_reached([each.length for each in self._waiting]):
            return 0.0
        return max(0.0, self._waiting[0].since + self._delay - self._clock())

    def take(self) -> list[Item]:
        """The inputs of the batch to run now; they wait no more."""
        chosen = set(self._plan.choose([each.length for each in self._waiting]))
        batch = [each.item for index, each in enumerate(self._waiting) if index in chosen]
        self._waiting = [each for index, each in enumerate(self._waiting) if index not in chosen]
        return batch

    def take_all(self) -> list[Item]:
        """All that waits, which waits no more."""
        items = [each.item for each in self._waiting]
        self._waiting = []
        return items

    def note(self, lengths: Sequence[int], seconds: float) -> None:
        """A batch of inputs of these lengths took so long."""
        self._plan.note(lengths, seconds)


class Encodes(Protocol):
    """What a scheduler asks of a model that only encodes."""

    def run_some(self, length: int, inputs: int) -> None:
        """Runs so many inputs of one length."""

    def leaves_padding_out(self) -> bool:
        """Whether batches are computed without their padding."""


def make_scheduler(settings: ServeSettings, encoder: Encodes, longest: int, limits: Limits) -> Scheduler[Any]:
    """The scheduler that the settings ask for. It measures the model, if it is to be warmed up.

    Args:
        longest: an input that there can be, in tokens.
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
