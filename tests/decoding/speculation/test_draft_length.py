"""How many tokens are drafted: by behaviour, in simulated calls whose time is counted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from fastgen.decoding.retrying import BackOff
from fastgen.decoding.speculation.draft_length import (
    DRAFT,
    HOST,
    MOST_CALLS,
    Chance,
    Costs,
    DraftLength,
    can_begin,
    of_calls,
)

LENGTHS = (0, 1, 3, 7)
# Seconds of verifies by positions, relative to a plain step, and of drafting a token (None: it is found in a text):
# SmolLM2 on a CPU with a draft in 8 bits; where memory is fast; and a small model, whose drafts can hardly pay.
CHEAP = {1: 1.0, 2: 1.08, 4: 1.17, 8: 1.45}, 0.3
NEAR_MEMORY = {1: 1.0, 2: 1.56, 4: 1.47, 8: 1.76}, 0.46
SMALL = {1: 1.0, 2: 1.6, 4: 2.2, 8: 2.4}, 0.9
FOUND = {1: 1.0, 2: 1.08, 4: 1.2, 8: 1.45}, None
FOUND_OF_MANY = {1: 1.0, 2: 1.4, 4: 2.2, 8: 3.7}, None
SHARED = {1: 1.0, 5: 1.24, 9: 1.4, 17: 2.0}, None  # eight rows that share 4, 8 or 16 drafted tokens
# What calls may take of plain ones' time, and what one of them may take.
MOST, MOST_OF_ONE = 1.02 + 1e-9, 1.04 + 1e-9


def timed(costs: Costs, parts: dict[int, float], draft: float | None = None, count: int = 2) -> Costs:
    """Adds timings as if each part had run so often."""
    for part, seconds in (parts if draft is None else {**parts, DRAFT: draft}).items():
        for _ in range(count):
            costs.add(part, seconds)
    return costs


class Calls:
    """Calls of `generate` on one step, one after the other.

    Args:
        acceptance: the probability that a token is accepted, by row and tokens so far.
        found: the probability that a row finds a draft.
        noise: a factor of a timing that the call itself did not take.
    """

    def __init__(
        self, machine: tuple[dict[int, float], float | None], rows: int = 1, tokens: int = 128, found: float = 1.0,
        seed: int = 0, noise: Callable[[], float] = lambda: 1.0, knows: bool = True,
    ) -> None:  # fmt: skip
        self.verify, self.draft = machine
        self.rows, self.tokens, self.found, self.noise = rows, tokens, found, noise
        self.is_ragged = machine is SHARED
        self.costs = Costs(rows, (0, 4, 8, 16) if self.is_ragged else LENGTHS, self.is_ragged)
        self.random, self.lengths, self.policy = random.Random(seed), [0], None
        if knows:
            self.costs.plain = 1.0
            timed(self.costs, self.verify, self.draft)

    def run(self, acceptance: Callable[[int, int], float], length: int | None = None) -> float:
        """Return the time of a call, relative to a plain one. `length` fixes how many tokens iterations draft."""
        self.costs.begin_call()
        self.policy = policy = DraftLength(self.costs, self.rows, self.tokens, self.draft is not None)
        generated, time, self.lengths = [0] * self.rows, 0.0, []
        while left := [row for row in range(self.rows) if generated[row] < self.tokens]:
            most, available = self.tokens - 1 - min(generated[row] for row in left), None
            if self.draft is None:
                there = [min(7, self.tokens - 1 - generated[row]) for row in left]
                available = [count * (self.random.random() < self.found) for count in there]
            k = policy.choose(left, most, available)
            if length is not None:
                k = max(each for each in LENGTHS if each <= min(length, most))
            drafted = policy.counts(left, [most] * len(left) if available is None else available, k)
            assert not self.is_ragged or sum(drafted) <= self.rows + k - len(left)
            for _ in range(k * (self.draft is not None)):
                self.costs.add(DRAFT, (self.draft or 0.0) * self.noise())
            self.costs.add(k + 1, self.verify[k + 1] * self.noise())
            time += self.verify[k + 1] + k * (self.draft or 0.0)
            accepted = [
                self._accepted(acceptance, row, generated[row], n) for row, n in zip(left, drafted, strict=True)
            ]
            hits = drafted, accepted
            if not k and available is not None:
                right = [self.random.random() < acceptance(row, generated[row]) for row in left]
                hits = [int(count > 0) for count in available], [int(each) for each in right]
            policy.observe(left, k, *hits)
            for row, count in zip(left, accepted, strict=True):
                generated[row] += 1 + count
            self.lengths.append(k)
        return time / self.tokens

    def _accepted(self, acceptance: Callable[[int, int], float], row: int, done: int, count: int) -> int:
        kept = 0
        while kept < count and self.random.random() < acceptance(row, done + kept):
            kept += 1
        return kept


def always(rate: float) -> Callable[[int, int], float]:
    return lambda *_: rate


# ---- calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machine", [CHEAP, NEAR_MEMORY, FOUND], ids=["cheap", "near memory", "found"])
@pytest.mark.parametrize("rate", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_calls_take_hardly_longer_than_with_the_best_length(machine, rate: float, rows: int) -> None:
    """The best length is not known beforehand. Later calls use what earlier ones have found."""
    calls = Calls(machine, rows)
    ours = sum(calls.run(always(rate)) for _ in range(8))
    best = min(sum(Calls(machine, rows, seed=seed).run(always(rate), k) for seed in range(8)) for k in LENGTHS)
    assert ours < 1.15 * best


@pytest.mark.parametrize("machine", [CHEAP, NEAR_MEMORY, SMALL, FOUND], ids=["cheap", "near memory", "small", "found"])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_calls_may_lose_two_per_cent(machine, rows: int) -> None:
    """Whatever acceptance was expected. Drafts found for other rows may cost more."""
    ahead = 0.05 if machine is FOUND and rows > 1 else 0.0
    for rate, tokens, expected in itertools.product((0.0, 0.3), (24, 130), (0.3, 0.8)):
        calls = Calls(machine, rows, tokens)
        calls.costs.acceptance = expected
        taken = [calls.run(always(rate)) for _ in range(3)]
        assert sum(taken) < 3 * (MOST + ahead) and max(taken) < MOST_OF_ONE + ahead


def test_what_calls_have_not_lost_others_may() -> None:
    """A short call of a draft that takes half as long as the model could not try any by itself. It may only once."""
    taken = {}
    for rate in (0.0, 0.97):
        calls = Calls(NEAR_MEMORY, tokens=64)
        calls.costs.acceptance = 0.97
        taken[rate] = [calls.run(always(rate)) for _ in range(6)]
    assert taken[0.97][0] < MOST and min(taken[0.97][1:]) < 0.8 and sum(taken[0.97][1:]) < 5 * 0.85
    assert sum(taken[0.0]) < 6 * MOST and 1 < max(taken[0.0]) < MOST_OF_ONE


def test_a_call_that_ends_early_leaves_what_its_tokens_do() -> None:
    costs = timed(Costs(1, LENGTHS), *CHEAP)
    policy = DraftLength(costs, 1, 1000, has_model=True)
    for _ in range(50):
        policy.observe([0], 0, [0], [0])
    assert costs.credit == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [1, 4])
def test_acceptance_that_changes(rows: int) -> None:
    """Within a call: drafts become good, or bad, or begin badly."""
    for good, most in ((range(300, 600), 0.95), (range(300), 0.9), (range(300, 10**6), 0.95), (range(40, 10**6), 0.8)):
        calls = Calls(CHEAP, rows, tokens=900)
        assert calls.run(lambda row, done, good=good: 0.95 * (done in good)) < most


def test_what_a_call_has_found_is_where_the_next_begins() -> None:
    calls = Calls(CHEAP)
    calls.run(always(0.0))
    assert calls.costs.acceptance < 0.3
    calls.run(always(0.0))
    assert calls.lengths[0] == 0
    calls.run(always(1.0))
    calls.run(always(1.0))
    assert calls.lengths[0] > 0


def test_trials_become_rare() -> None:
    calls = Calls(CHEAP, tokens=2000)
    assert calls.run(always(0.0)) < MOST
    tried = [place for place, k in enumerate(calls.lengths) if k and place > 20]
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps == sorted(gaps) and 64 < gaps[-1] <= 130


@pytest.mark.parametrize("rows", [2, 16])
def test_drafts_of_one_row_alone_suit(rows: int) -> None:
    """The call ends with the others."""
    calls = Calls(CHEAP, rows)
    assert calls.run(lambda row, _: 0.97 * (row == 0)) < MOST


@pytest.mark.parametrize("machine", [FOUND_OF_MANY, SHARED], ids=["each", "shared"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_find_drafts_at_different_times(machine, seed: int) -> None:
    """The slowest row gains nothing from many iterations, but is another one each time: the call gains.

    If it is always the same, it waits for the others by at most a twentieth of the call, beside what calls may lose.
    """
    calls = Calls(machine, 8, found=0.8, seed=seed)
    assert calls.run(always(0.95)) < 0.92
    assert Calls(machine, 8, found=0.8, seed=seed).run(always(0.0)) < MOST
    assert Calls(machine, 8, found=0.8, seed=seed).run(lambda row, _: 0.9 * (row > 0)) < MOST + 0.05


def test_drafts_that_are_seldom_found() -> None:
    calls = Calls(FOUND, tokens=500, found=0.1)
    assert calls.run(always(0.9)) < 0.85
    assert all(k in (0, 3, 7) for k in calls.lengths)


def test_what_is_found_needs_no_trial() -> None:
    """What it would have accepted is known of each row."""
    policy = DraftLength(timed(Costs(2, LENGTHS), {1: 1.0, 2: 1.3, 4: 1.5, 8: 2.0}), 2, 500, has_model=False)
    for _ in range(50):
        policy.observe([0, 1], 0, [1, 0], [0, 0])
    assert policy.choose([0, 1], 100, [3, 3]) == 0
    for _ in range(12):
        policy.observe([0, 1], 0, [0, 1], [0, 1])
    policy.observe([0, 1], 0, [0, 0], [0, 0])
    assert policy.choose([1], 100, [3]) == 3


# ---- what iterations take


def test_parts_are_timed_first() -> None:
    """A draft and its verify, and an iteration without a draft if no plain call says what that takes."""
    calls = Calls(CHEAP, tokens=200, knows=False)
    calls.run(always(0.95))
    assert calls.lengths[:4] == [3, 3, 0, 0] and max(calls.lengths) == 7
    calls.run(always(0.95))
    assert calls.lengths[0] > 0 and calls.policy.pays() is True


@pytest.mark.parametrize("rate", [0.0, 0.95])
def test_timings_that_vary(rate: float) -> None:
    """By a third to either side, sometimes by a factor of five. Half of the calls are on a busy machine."""
    noise, factor = random.Random(1), [1.0]
    calls = Calls(CHEAP, noise=lambda: factor[0] * noise.uniform(0.7, 1.3) * noise.choice([1] * 30 + [5]))
    taken = []
    for number in range(20):
        factor[0] = (1.0, 3.0)[number % 2]
        taken.append(calls.run(always(rate)))
    assert sum(taken) / 20 < (0.62 if rate else 1.04)


@pytest.mark.parametrize("only_timed", [False, True])
def test_a_verify_that_was_disturbed_is_tried_again(only_timed: bool) -> None:
    """Otherwise one slow timing would be the last. A verify that is always slow is tried rarely."""
    calls = Calls(CHEAP, knows=False)
    calls.costs.plain, calls.costs.only_timed = 1.0, only_timed
    timed(calls.costs, {1: 1.0, 2: 1.08, 4: 1.17, 8: 20.0}, 0.3)
    drafted = [(calls.run(always(1.0)), max(calls.lengths))[1] for _ in range(20)]
    assert drafted[0] == 3 and drafted[18:] == [7] * 2
    slow = Calls(({1: 1.0, 2: 1.08, 4: 1.17, 8: 6.0}, 0.3))
    tried = [number for number in range(100) if (slow.run(always(1.0)), 7 in slow.lengths)[1]]
    assert 2 <= len(tried) <= 7


def test_costs_follow_from_other_numbers_of_tokens() -> None:
    costs = timed(Costs(2, (0, 1, 3)), {1: 1.0, 4: 2.5}, 0.2)
    costs.add(HOST, 0.1)
    costs.add(HOST, 0.1)
    assert costs.iterations() == pytest.approx({0: 1.0, 1: 1.5 + 0.2 + 0.1, 3: 2.5 + 0.6 + 0.1})
    assert timed(Costs(2, (0, 1, 3)), {2: 4.0, 4: 9.0}).iterations()[0] == 2.0  # in proportion, and not less than none
    assert timed(Costs(2, (0, 1, 3)), {1: 3.0, 2: 1.0}).iterations()[3] == 1.0
    assert Costs(1, LENGTHS).iterations() == {}


@pytest.mark.parametrize(
    "plain, verify, host, seconds", [(1.0, 1.0, 0.2, 1.2), (1.0, 3.0, 0.2, 1.2), (2.0, 1.0, 1.2, 2.2)]
)
def test_an_iteration_without_a_draft_takes_longer_than_a_plain_step(plain, verify, host, seconds) -> None:
    """By the host's work. Any further difference is an accident: they were timed in different calls."""
    costs = timed(Costs(1, LENGTHS), {1: verify, HOST: host})
    costs.plain = plain
    assert costs.iterations()[0] == pytest.approx(seconds)


def test_the_shortest_call_and_drafts_that_cannot_pay() -> None:
    costs = timed(Costs(1, (0, 1, 3)), {1: 1.0, 2: 1.1, 4: 1.2}, 0.4)
    assert not costs.cannot_pay
    assert [can_begin(costs, tokens) for tokens in (8, 24, 26, 200)] == [False, False, True, True]
    costs.forget()
    assert can_begin(costs, 8)  # nobody knows
    assert timed(Costs(1, LENGTHS), *SMALL).cannot_pay and not timed(Costs(1, LENGTHS), {1: 1.0}).cannot_pay
    calls = Calls(SMALL)
    calls.run(always(1.0))
    assert calls.costs.cannot_pay
    calls = Calls(CHEAP)
    calls.run(always(0.0))
    assert not calls.costs.cannot_pay and calls.policy.pays() is False


# ---- lengths


def test_only_lengths_that_there_are() -> None:
    policy = Calls(CHEAP, tokens=1000)
    policy.costs.acceptance = 0.98
    chooser = DraftLength(policy.costs, 1, 1000, has_model=True)
    assert [chooser.choose([0], most) for most in (-1, 0, 1, 2, 3, 4, 7, 12)] == [0, 0, 1, 1, 3, 3, 7, 7]
    assert chooser.choose([], 12) == 0
    found = Calls(FOUND, tokens=1000)
    found.costs.acceptance = 0.98
    chooser = DraftLength(found.costs, 1, 1000, has_model=False)
    assert [chooser.choose([0], 8, [there]) for there in (0, 1, 2, 3, 4, 9)] == [0, 1, 3, 3, 7, 7]


def test_only_lengths_that_were_timed() -> None:
    """The call would have to record others. Whether anything can be gained is judged with all of them."""
    costs = timed(Costs(1, LENGTHS), {1: 1.0, 4: 1.17}, 0.3)
    costs.only_timed, costs.acceptance = True, 0.99
    policy = DraftLength(costs, 1, 4096, has_model=True)
    assert [policy.choose([0], most) for most in (2, 3, 100)] == [0, 3, 3]


# ---- tokens that rows share


def test_the_most_probable_tokens_are_drafted() -> None:
    policy = DraftLength(timed(Costs(3, (0, 4, 8), is_ragged=True), {1: 1.0, 5: 1.1}), 3, 64, has_model=False)
    assert policy.counts([0, 1, 2], [8, 8, 8], 6) == [2, 2, 2]
    for _ in range(20):
        policy.observe([0, 1, 2], 0, [1, 1, 0], [1, 0, 0])
    assert policy.counts([0, 1, 2], [8, 8, 8], 4) in ([4, 0, 0], [3, 0, 1])
    assert policy.counts([0, 1, 2], [1, 8, 0], 4) == [1, 3, 0]
    assert policy.counts([0], [2], 9) == [2]
    for _ in range(20):
        policy.observe([0, 1], 0, [0, 0], [0, 0])
    assert policy.counts([0, 1, 2], [8, 8, 8], 4) == [0, 0, 4], "it has fewest tokens, and the call ends with it"


def test_places_of_finished_rows_are_used() -> None:
    """Four tokens that are likely enough do not pay the longer verify, six do."""
    for rows, chosen in ((2, 0), (4, 4)):
        costs = timed(Costs(rows, (0, 4), is_ragged=True), {1: 1.0, 5: 1.8})
        costs.acceptance = 0.5
        policy = DraftLength(costs, rows, 500, has_model=False)
        assert policy.choose([0, 1], 100, [8, 8]) == chosen and policy.choose([0, 1], 100, [0, 0]) == 0


# ---- back-off


def test_waits_of_calls_double() -> None:
    """The first call that does not pay may have been disturbed; one that pays ends them."""
    back_off, said = of_calls(), []
    for _ in range(20):
        said.append(back_off.waits())
        if not said[-1]:
            back_off.fail()
    assert "".join("-p"[waits] for waits in said) == "--p-pp-pppp-pppppppp"
    for _ in range(10):
        back_off.fail()
    assert sum(back_off.waits() for _ in range(100)) == MOST_CALLS
    back_off.succeed()
    back_off.fail()
    assert not back_off.waits()
    back_off.give_up()
    assert sum(back_off.waits() for _ in range(100)) == MOST_CALLS
    assert [BackOff(2, 8).waits() for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("machine", [CHEAP, FOUND, SHARED], ids=["cheap", "found", "shared"])
def test_a_draft_of_which_all_was_wrong_or_right_is_one_that_is_known(machine) -> None:
    """An acceptance of 0, after many misses, does not end the policy. One of 1 does not make drafts free."""
    for rate in (0.0, 1.0):
        calls = Calls(machine, rows=8 if machine is SHARED else 1)
        calls.costs.acceptance = rate
        assert calls.run(always(0.0)) <= 1.06 + 0.05 * (machine is SHARED)


# ---- acceptance


def test_a_chance_is_what_was_right() -> None:
    everyone = Chance(0.5, 0.02)
    one = Chance(everyone.value, 0.2, of_all=everyone)
    for _ in range(40):
        one.note(verified=4, right=4)
    assert one.value > 0.99 and 0.5 < everyone.value < one.value
    for _ in range(40):
        one.note(verified=4, right=0)  # nothing is known of those behind the first
    assert one.value < 0.01


def test_those_behind_the_first_that_is_wrong_say_nothing() -> None:
    some, more = Chance(0.5, 0.2), Chance(0.5, 0.2)
    some.note(verified=9, right=2)
    more.note(verified=3, right=2)
    assert some.value == more.value


def test_the_first_trials_count_as_many_as_there_are() -> None:
    chance = Chance(0.5, 0.1, trials=2)
    for right, value in ((True, 2 / 3), (True, 3 / 4), (False, 3 / 5)):
        chance.note(1, right)
        assert chance.value == pytest.approx(value)
    chance.fade()
    chance.note(1, 1)
    assert chance.value == pytest.approx((3 / 5 + 1) / 2)
