"""Which batches are made of what waits, and when, with planted costs and a planted clock."""

from __future__ import annotations

import random

import pytest

from fastgen_serve import scheduling
from fastgen_serve.scheduling import Alone, Cheapest, Costs, InOrder, Limits, Scheduler, guessed, measured
from fastgen_serve.settings import ServeSettings
from tests.partitions import partitions
from tests.serve.servers import Clock

# Without an end, so that costs decide.
WIDE = Limits(inputs=1000, tokens=10**9)


class Encoder:
    """Takes planted seconds for a batch."""

    def __init__(self, clock: Clock, padded: bool = True) -> None:
        self.clock, self.padded, self.runs = clock, padded, list[tuple[int, int]]()

    def run_some(self, length: int, inputs: int) -> None:
        self.runs.append((length, inputs))
        # The first run of a shape is slow.
        self.clock.now += seconds(length, inputs) * (1 + (self.runs.count((length, inputs)) == 1))

    def leaves_padding_out(self) -> bool:
        return not self.padded


def seconds(length: int, inputs: int, fixed: float = 0.01, token: float = 0.001) -> float:
    return fixed + token * length * inputs


def costs(fixed: float, longest: int = 100) -> Costs:
    """Those of `seconds`, which has straight lines: a grid of its corners says all of it."""
    return Costs({(l, n): seconds(l, n, fixed) for l in (1, longest) for n in (1, 50)})  # noqa: E741


def least(lengths: list[int], fixed: float, most: int) -> float:
    """What the cheapest of all ways to batch them costs, padded to the longest of each."""
    fitting = (groups for groups in partitions(lengths) if all(len(group) <= most for group in groups))
    return min(sum(seconds(max(group), len(group), fixed) for group in groups) for groups in fitting)


@pytest.mark.parametrize("fixed", [0.0, 0.004, 0.02, 0.1, 1.0])
def test_the_batch_with_the_oldest_is_one_of_those_that_cost_least(fixed: float) -> None:
    numbers, sizes = random.Random(1), set()
    for _ in range(30):
        lengths = [numbers.randint(1, 100) for _ in range(numbers.randint(1, 7))]
        most = numbers.choice([2, 4, 50])
        chosen = Cheapest(Limits(most, 10**9), costs(fixed), padded=True).choose(lengths)
        assert 0 in chosen and len(set(chosen)) == len(chosen)
        batch = [lengths[index] for index in chosen]
        rest = [length for index, length in enumerate(lengths) if index not in chosen]
        found = seconds(max(batch), len(batch), fixed) + (least(rest, fixed, most) if rest else 0)
        assert found == pytest.approx(least(lengths, fixed, most))
        sizes.add(len(batch))
    assert len(sizes) > 1 or fixed == 0.0  # where nothing is fixed, one by one is as cheap


def test_without_padding_a_batch_costs_its_tokens() -> None:
    lengths = [100, 1, 1, 1, 1, 1]
    # Padded, the short ones are cheaper by themselves; otherwise one batch saves what is fixed of the other.
    assert Cheapest(WIDE, costs(0.1), padded=True).choose(lengths) == [0]
    assert sorted(Cheapest(WIDE, costs(0.1), padded=False).choose(lengths)) == [0, 1, 2, 3, 4, 5]


def test_batches_keep_within_their_limits() -> None:
    lengths = [10, 30, 10, 10, 10, 10, 30, 500]
    for plan in (InOrder(Limits(4, 100)), Cheapest(Limits(4, 100), costs(1.0, 1000), padded=True)):
        waiting = list(lengths)
        while waiting:
            batch = [waiting[index] for index in plan.choose(waiting)]
            assert len(batch) <= 4 and (len(batch) * max(batch) <= 100 or len(batch) == 1)
            for length in batch:
                waiting.remove(length)


def test_naive_batches_are_in_order_and_no_batches_are_single() -> None:
    assert InOrder(Limits(3, 4096)).choose([5, 90, 7, 8]) == [0, 1, 2]
    assert InOrder(Limits(3, 100)).choose([5, 90, 7, 8]) == [0]
    assert InOrder(Limits(3, 100)).choose([200, 1]) == [0]
    assert Alone().choose([5, 90, 7]) == [0]


def test_costs_between_and_beyond_what_was_measured() -> None:
    found = Costs({(10, 1): 1.0, (10, 3): 2.0, (20, 1): 2.0, (20, 3): 6.0, (20, 5): 8.0})
    assert found.of(10, 2) == pytest.approx(1.5)
    assert found.of(15, 1) == pytest.approx(1.5)
    assert found.of(15, 2) == pytest.approx((1.5 + 4.0) / 2)
    assert found.of(5, 1) == pytest.approx(1.0)  # not less than the least
    assert found.of(10, 6) == pytest.approx(4.0) and found.of(40, 1) == pytest.approx(4.0)


def test_costs_follow_what_batches_take() -> None:
    found = Costs({(l, n): seconds(l, n) for l in (10, 20) for n in (1, 3)})  # noqa: E741
    before, far = found.of(15, 2), found.of(10, 1)
    found.note(15, 2, before * 1.4)
    assert found.of(15, 2) == pytest.approx(before * 1.1)  # a quarter of the way
    for _ in range(40):
        found.note(15, 2, before / 5)
    assert found.of(15, 2) == pytest.approx(before / 5, rel=0.01)
    assert found.of(10, 1) != pytest.approx(far)
    now = found.of(15, 2)
    found.note(15, 2, now * 1000)  # something else ran
    assert found.of(15, 2) == pytest.approx(now * 1.25)


def test_what_is_measured_at_warm_up() -> None:
    clock = Clock()
    encoder = Encoder(clock)
    found = measured(encoder.run_some, 48, Limits(8, 10**9), clock)
    assert {length for length, _ in encoder.runs} == {8, 16, 32, 48}
    assert {number for _, number in encoder.runs} == {1, 2, 4, 8}
    for length, inputs in ((8, 1), (48, 8), (24, 3), (40, 6)):
        assert found.of(length, inputs) == pytest.approx(seconds(length, inputs))


def test_warm_up_ends_where_batches_take_long() -> None:
    clock = Clock()
    encoder = Encoder(clock)
    found = measured(encoder.run_some, 512, Limits(64, 10**9), clock)
    assert (512, 1) in encoder.runs and (512, 2) not in encoder.runs
    assert all(
        seconds(length, inputs // 2) <= scheduling.LONGEST_MEASURED for length, inputs in encoder.runs if inputs > 1
    )
    assert found.of(512, 4) == pytest.approx(4 * seconds(512, 1))


def test_guessed_costs_make_batches() -> None:
    limits = Limits()
    assert len(Cheapest(limits, guessed(512, limits), padded=True).choose([20] * 10)) == 10


def taken(scheduler: Scheduler[str]) -> list[str]:
    assert scheduler.seconds_left() == 0
    return scheduler.take()


def test_hungry_begins_at_once() -> None:
    clock = Clock()
    scheduler: Scheduler[str] = Scheduler(InOrder(Limits(2)), Limits(2), clock=clock)
    assert scheduler.seconds_left() is None
    for item in "abc":
        scheduler.put(item, 5)
    assert taken(scheduler) == ["a", "b"] and len(scheduler) == 1
    assert taken(scheduler) == ["c"] and scheduler.seconds_left() is None


def test_lazy_waits_for_half_of_the_budget_or_a_full_batch() -> None:
    clock = Clock()
    scheduler: Scheduler[str] = Scheduler(InOrder(Limits(3)), Limits(3), delay=0.1, clock=clock)
    scheduler.put("a", 5)
    clock.now = 0.06
    scheduler.put("b", 5)
    assert scheduler.seconds_left() == pytest.approx(0.04)
    clock.now = 0.1
    assert taken(scheduler) == ["a", "b"]
    scheduler.put("c", 5)
    scheduler.put("d", 5)
    assert scheduler.seconds_left() == pytest.approx(0.1)
    scheduler.put("e", 5)
    assert taken(scheduler) == ["c", "d", "e"]
    scheduler.put("f", 4096)
    assert taken(scheduler) == ["f"]


def test_who_leaves_is_not_waited_for() -> None:
    clock = Clock()
    scheduler: Scheduler[str] = Scheduler(Alone(), Limits(), delay=0.1, clock=clock)
    scheduler.put("a", 5)
    clock.now = 0.06
    scheduler.put("b", 5)
    assert scheduler.discard("a") and not scheduler.discard("a")
    assert scheduler.seconds_left() == pytest.approx(0.1)
    assert scheduler.take_all() == ["b"] and len(scheduler) == 0


def made(clock: Clock, **options: object) -> Scheduler[int]:
    settings = ServeSettings(**options)
    return scheduling.make_scheduler(settings, Encoder(clock, padded=True), 128, Limits(8))


def test_the_scheduler_of_the_settings() -> None:
    clock = Clock()
    lengths = {"hungry": 1, "naive": 6, "none": 1}
    for name, expected in lengths.items():
        scheduler = made(clock, scheduler=name, warm_up=False)
        for number, length in enumerate([128, 2, 2, 2, 2, 2]):
            scheduler.put(number, length)
        assert scheduler.seconds_left() == 0
        assert len(scheduler.take()) == expected, name
        scheduler.note([128], 1.0)
    scheduler = made(clock, scheduler="lazy", slo_ms=60_000.0, warm_up=False)
    scheduler.put(0, 3)
    assert 29 < (scheduler.seconds_left() or 0) <= 30
