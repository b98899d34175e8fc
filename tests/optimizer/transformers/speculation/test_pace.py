"""How many tokens rounds draft, by measured times, without a model."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.decoding.speculation.draft_length import Schedule
from fastgen.optimizer.transformers.speculation.drafting import Drafting
from fastgen.optimizer.transformers.speculation.pace import Pace
from fastgen.optimizer.transformers.speculation.times import Times, begin_call

# Seconds of a draft of one token, and of checks, by positions.
TIMES = {0: 0.1, 1: 1.0, 3: 1.1, 5: 1.2, 9: 1.4}


class Step:
    """What is measured of a step of so many rows; its parts take `factor` times as long as `TIMES` says."""

    def __init__(self, rows: int = 1, factor: float = 1.0, parts: tuple[int, ...] = (0, 1, 3, 5, 9)) -> None:
        self.key = SimpleNamespace(rows=rows, draft=SimpleNamespace(is_ragged=False))
        self.times = {part: factor * TIMES[part] for part in parts}
        self.seconds = self.times.get
        self.host_times: list[float] = []
        self.acceptance = 0.9

    lengths = (0, 2, 4, 8)
    seconds_of_round, tokens_of = Drafting.seconds_of_round, Drafting.tokens_of

    def serves(self, length: int) -> bool:
        return length + 1 in self.times

    def is_old(self, part: int) -> bool:
        return False


class Measured(Step):
    """Its parts are measured as those of a step are: what a call has timed counts in the next ones."""

    times: Any

    def __init__(self) -> None:
        super().__init__()
        self.times = {part: Times() for part in TIMES}
        self.seconds = lambda part: self.times[part].seconds

    is_old = Drafting.is_old

    def run(self, seconds: dict[int, float], tokens: int = 128) -> set[int]:
        """A call in which parts take so long and all is accepted; what its rounds have drafted."""
        step: Any = self
        begin_call(self.times)
        pace, found = Pace(step, 1, tokens, has_model=True, plain=1.0), set()
        while tokens > 0:
            length = pace.choose(step, [0], tokens)
            found.add(length)
            tokens -= length + 1
            self.times[length + 1].append(seconds[length + 1])
            self.times[0].extend([seconds[0]] * length)
            pace.observe(step, [0], length, [length], [length])
        return found


def rounds(plain: float | None, count: int, tokens: int = 4096) -> list[int]:
    """What the first rounds of a call of so many tokens draft, in which everything is accepted."""
    step: Any = Step()
    pace, found = Pace(step, 1, tokens, has_model=True, plain=plain), []
    for _ in range(count):
        found.append(pace.choose(step, [0], tokens))
        pace.observe(step, [0], found[-1], [found[-1]], [found[-1]])
    return found


@pytest.mark.parametrize("plain", [None, 1.0])
def test_plain_steps_are_measured_now_and_then(plain: float | None) -> None:
    """Where no plain call has said what they take: otherwise nothing comes of it."""
    found = rounds(plain, 200)
    assert all(found[:60])
    assert (0 in found) == (plain is None)


def test_what_plain_calls_take_decides() -> None:
    assert all(rounds(1.0, 20, 64)) and not any(rounds(0.1, 20, 64))


def test_plain_steps_are_what_plain_calls_take() -> None:
    """Rounds with a draft that are slower or faster than the tables say do not change it."""
    step: Any = Step()
    pace = Pace(step, 1, 64, has_model=True, plain=1.0)
    step.times = {part: seconds / 2 for part, seconds in TIMES.items()}
    step.seconds = step.times.get
    for _ in range(20):
        pace.observe(step, [0], 4, [4], [4])
    # A round takes 0.8 seconds, and at first 1.6.
    chooser: Any = pace._chooser
    assert chooser._costs.steps(1, 4)[0] == 1.0
    assert 0.8 < chooser.gain == pytest.approx(1 - chooser._costs.steps(1, 4)[4] / 5, abs=0.1)


def test_only_lengths_that_are_recorded() -> None:
    """Though a longer draft would gain more, and whether anything can be gained is told with all of them."""
    step: Any = Step(parts=(0, 1, 5))
    pace, found = Pace(step, 1, 4096, has_model=True, plain=1.0), []
    for _ in range(20):
        found.append(pace.choose(step, [0], 4096))
        pace.observe(step, [0], found[-1], [found[-1]], [found[-1]])
    assert set(found) == {4}
    assert pace.choose(step, [0], 3) == 0
    slow: Any = Step(parts=(0, 1, 5))
    slow.times |= {0: 0.5, 5: 2.55}  # five tokens in 4.55 seconds gain 9 %, four more would take 3.55
    assert not Pace(slow, 1, 4096, has_model=True, plain=1.0).is_hopeless
    slow.times[5] = 3.0
    assert Pace(slow, 1, 4096, has_model=True, plain=1.0).is_hopeless


def test_a_schedule_of_one_token_drafts() -> None:
    """The shortest draft is of two. A heuristic schedule gets there by itself, and would never leave again."""
    step: Any = Step()
    schedule = Schedule(1, "heuristic")
    pace = Pace(step, 1, 64, has_model=True, schedule=schedule)
    assert pace.choose(step, [0], 10) == 2
    pace.observe(step, [0], 2, [2], [2])
    assert schedule.length == 3
    assert [pace.choose(step, [0], most) for most in (0, 1, 2)] == [0, 0, 2]


def test_rounds_without_a_draft_take_longer_than_plain_steps() -> None:
    """That counts among what is lost."""
    gains = []
    # In a plain step that takes longer than a check, the host does as much. What a check takes more is an accident.
    for plain, check, host in ((1.0, 1.0, 0.0), (1.0, 1.3, 0.1), (2.0, 1.0, 1.2)):
        step: Any = Step()
        pace = Pace(step, 1, 64, has_model=True, plain=plain)
        step.times = {**TIMES, 1: check}
        step.seconds = step.times.get
        step.host_times = [host, host, 5.0]
        for _ in range(10):
            pace.observe(step, [0], 0, [0], [0])
        chooser: Any = pace._chooser
        gains.append(chooser.gain)
    assert gains == pytest.approx([0.0, -0.1, -0.1])


def test_a_call_that_was_disturbed_does_not_end_drafts() -> None:
    """For its parts would never be measured again: they count by the best of some calls, as plain steps do."""

    step: Any = Measured()
    for factor in (1.0, 10.0):
        begin_call(step.times)
        for part, known in step.times.items():
            known.extend([factor * TIMES[part]] * 20)
    begin_call(step.times)
    pace, found = Pace(step, 1, 128, has_model=True, plain=1.0), []
    for _ in range(5):
        found.append(pace.choose(step, [0], 128))
        pace.observe(step, [0], found[-1], [found[-1]], [found[-1]])
    assert all(found)


def test_times() -> None:
    """None before there are two; then the lower quartile of each call, the least of the last ones."""
    times = Times()
    assert times.seconds is None
    times.append(5.0)
    times.begin_call()
    assert times.seconds is None
    times.extend([9.0, 4.0, 3.0, 8.0])
    assert times.seconds == 4.0
    times.begin_call()
    times.append(1.0)
    assert times.seconds == 4.0
    times.append(2.0)
    assert times.seconds == 1.0
    for _ in range(5):  # what was long ago does not count
        times.begin_call()
        times.extend([6.0, 6.0])
    assert times.seconds == 6.0


def test_a_part_that_ran_long_ago_does_not_stand_for_others() -> None:
    times = {1: Times(), 3: Times(), 5: Times()}
    times[3].append(1.0)  # too few to count
    times[5].extend([2.0, 2.0])
    for _ in range(10):
        begin_call(times)
    assert not times[5].is_old


def test_a_check_that_was_disturbed_is_tried_again() -> None:
    """It is not chosen because of what it took once, and would never be measured again."""
    step = Measured()
    for part, known in step.times.items():
        known.extend([(10.0 if part > 3 else 1.0) * TIMES[part]] * 2)
    calls = [step.run(TIMES) for _ in range(8)]
    assert 8 not in calls[0] and 4 not in calls[0]
    assert all(8 in drafted for drafted in calls[4:])


def test_a_check_that_is_slow_is_tried_in_fewer_and_fewer_calls() -> None:
    slow = {**TIMES, 9: 6.0}
    step = Measured()
    for part, known in step.times.items():
        known.extend([slow[part]] * 2)
    tried = [number for number in range(200) if 8 in step.run(slow)]
    waited = [after - before for before, after in itertools.pairwise(tried)]
    assert 4 <= len(tried) <= 8 and waited == sorted(waited)
