"""How many tokens are drafted: formulas against definitions, and simulated calls, whose time is counted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.speculation.draft_length import MOST_PAUSES, Costs, DraftLength, Pauses, Schedule, shares

# What FastGen takes for SmolLM2 on a CPU, relative to a plain step: the rows of a product, and a step in 8 bits.
VERIFY = {1: 1.0, 2: 1.08, 5: 1.2, 8: 1.45, 16: 1.9, 32: 3.2, 64: 6.0}
INT8 = {1: 0.3, 4: 0.4, 16: 0.8}
# For prompts of which nothing is known.
PLAIN = 0.97


def seconds(verify, draft, rows: int, k: int) -> float:
    return Costs(verify, draft).steps(rows, k)[k]


class Call:
    """A call of `generate` whose drafted tokens are accepted with probabilities that are given.

    Args:
        acceptance: by row and number of tokens so far.
        truth: seconds of a step by rows and k; what the tables say where nothing is given.
        found: tokens that a draft without a model finds, by a random number; everything where nothing is given.
    """

    def __init__(
        self, acceptance: Callable[[int, int], float], rows: int = 1, tokens: int = 128, draft=INT8, seed: int = 0,
        truth=None, found=None,
    ) -> None:  # fmt: skip
        self.acceptance, self.rows, self.tokens, self.draft = acceptance, rows, tokens, draft
        self.truth = truth or (lambda rows, k: seconds(VERIFY, draft, rows, k))
        self.found, self.random, self.lengths = found, random.Random(seed), []

    def run(self, schedule, timed: bool = False) -> float:
        """How many times as fast as without drafts."""
        generated, time, plain = [0] * self.rows, 0.0, 0.0
        while left := [row for row in range(self.rows) if generated[row] < self.tokens]:
            available = None if self.found is None else [self.found(self.random) for _ in left]
            k = schedule.choose(left, self.tokens - min(generated[row] for row in left) - 1, available)
            drafted = [k] * len(left) if available is None else [min(k, there) for there in available]
            accepted = [self.accepted(row, generated[row], count) for row, count in zip(left, drafted, strict=True)]
            took = self.truth(len(left), k)
            time += took
            schedule.observe(left, k, drafted, accepted, took if timed else None)
            for row, count in zip(left, accepted, strict=True):
                generated[row] += 1 + count
            self.lengths.append(k)
        plain = self.tokens * self.truth(self.rows, 0)
        return plain / time

    def accepted(self, row: int, done: int, count: int) -> int:
        kept = 0
        while kept < count and self.random.random() < self.acceptance(row, done + kept):
            kept += 1
        return kept


def new(rows: int = 1, draft=INT8, most: int = 8, tokens: int = 128, **options) -> DraftLength:
    return DraftLength(Costs(VERIFY, draft), rows, range(most + 1), horizon=min(64, tokens), **options)


# ---- costs


def test_costs():
    costs = Costs({1: 1.0, 4: 4.0, 8: 4.4}, {1: 0.5, 3: 0.7})
    assert costs.steps(1, 3) == pytest.approx([1.0, 2.5, 4.0, 5.5])
    assert costs.steps(2, 3) == pytest.approx([2.0, 4.6, 1.2 + 4.2, 1.8 + 4.4])
    assert costs.steps(4, 2)[2] == pytest.approx(2 * 0.8 + 4.8)
    assert Costs({2: 1.0}).steps(7, 2) == [1.0, 1.0, 1.0]
    assert Costs({2: 1.0, 3: 3.0}).steps(1, 0) == [0.5]  # in proportion, not -1
    assert Costs({4: 4.0, 8: 5.0}).steps(2, 0) == [3.5]
    assert Costs({2: 3.0, 3: 1.0}).steps(4, 0) == [1.0]  # as the cheapest, not -1


@pytest.mark.parametrize("verify, draft", [({}, None), ({1: 0.0}, None), ({0: 1.0}, None), ({1: 1.0}, {1: -1.0})])
def test_costs_that_cannot_be(verify, draft):
    with pytest.raises(ValueError, match="all positive"):
        Costs(verify, draft)


def test_observed_costs():
    costs = Costs({1: 1.0, 8: 1.0})
    for _ in range(50):
        costs.observe(1, 0, 1.5)
        costs.observe(1, 4, 3.0)
    assert costs.steps(1, 4) == pytest.approx([1.5, 1.5, 1.5, 3.0, 3.0], rel=1e-3)
    costs.observe(1, 4, 1000.0)  # the machine did something else
    assert costs.steps(1, 4)[4] < 4.0


# ---- choices


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5), st.lists(st.integers(0, 6), min_size=5, max_size=5),
    st.booleans(), st.integers(1, 6),
)  # fmt: skip
@settings(max_examples=200)
def test_the_choice_gives_most_tokens_per_second(rates, available, limited, most):
    """Against the formula, row by row, where losses are no concern."""
    rows = list(range(len(rates)))
    chooser = DraftLength(Costs(VERIFY, INT8), len(rates), range(most + 1), tolerance=1e9)
    chooser._rate = lambda row: min(rates[row], 0.995)
    available = available[: len(rates)] if limited else None

    def per_second(k: int) -> float:
        tokens = 0.0
        for row in rows:
            a, length = chooser._rate(row), k if available is None else min(k, available[row])
            tokens += (1 - a ** (length + 1)) / (1 - a)
        return tokens / seconds(VERIFY, INT8, len(rows), k)

    choice = chooser.choose(rows, available=available)
    limit = most if available is None else min(most, max(available))
    assert choice <= limit
    assert per_second(choice) == pytest.approx(max(map(per_second, range(limit + 1))), rel=1e-9)


def test_limits():
    chooser = new(2, acceptance=0.95, tolerance=0.05)
    assert chooser.choose([0, 1]) > 2
    assert chooser.choose([0, 1], most=2) == 2
    assert chooser.choose([0, 1], available=[0, 1]) <= 1
    assert chooser.choose([0, 1], most=0) == chooser.choose([0, 1], most=-1) == 0
    assert chooser.choose([0, 1], available=[0, 0]) == chooser.choose([]) == 0


def test_rows_leave():
    chooser = new(3)
    for _ in range(6):
        chooser.observe([0, 1, 2], 4, [4, 4, 4], [0, 4, 0])
    chooser.keep([1, 2])
    assert chooser._rate(0) > 0.8 > 0.4 > chooser._rate(1)


def test_rows_leave_for_other_costs():
    """Drafts are chosen by the costs that there are now; what they gain is told from the steps of before."""
    chooser = DraftLength(Costs({3: 2.0, 15: 2.5}), 3, (0, 4))
    chooser.observe([0, 1, 2], 4, [4, 4, 4], [4, 4, 4])
    assert chooser.gain == pytest.approx(7.5 / 10)
    chooser.keep([2], Costs({1: 1.0, 5: 9.0}))
    assert chooser.choose([0]) == 0
    chooser.observe([0], 0, [0], [0])
    assert chooser.gain == pytest.approx((7.5 + 1.0) / 12)
    chooser.keep([0], Costs({1: 1.0, 5: 1.5}))
    assert chooser.choose([0]) == 4
    chooser.observe([0], 4, [4], [0])
    assert chooser.gain == pytest.approx((7.5 + 1.0 + 0.5) / 14)


# ---- calls


@pytest.mark.parametrize("rate", [0.7, 0.85, 0.95, 0.99])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draft", [INT8, None])
def test_gains(rate, rows, draft):
    """Nearly what the best fixed length gains, which no one knows beforehand."""
    calls = range(10)
    ours = sum(Call(lambda *_: rate, rows, draft=draft, seed=s).run(new(rows, draft)) for s in calls)
    best = max(
        sum(Call(lambda *_: rate, rows, draft=draft, seed=s).run(Schedule(k)) for s in calls)
        for k in (1, 2, 3, 4, 6, 8)
    )
    assert ours > 0.92 * best


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("draft", [INT8, None, {1: 0.9}])
def test_never_slower(rate, rows, draft):
    """Whatever was expected. A single call, not an average."""
    for tokens, expected, seed in itertools.product((40, 64, 200), (0.3, 0.7, 0.9), range(2)):
        chooser = new(rows, draft, tokens=tokens, acceptance=expected)
        assert Call(lambda *_: rate, rows, tokens, draft, seed).run(chooser) > PLAIN


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 3])
def test_once_more_is_lost_if_everything_was_accepted_before(rate, rows):
    """The calls that follow expect less."""
    for tokens, seed in itertools.product((40, 64, 200), range(2)):
        acceptance, speeds = 0.99, []
        for _ in range(4):
            chooser = new(rows, tokens=tokens, acceptance=acceptance)
            speeds.append(Call(lambda *_: rate, rows, tokens, seed=seed).run(chooser))
            acceptance = chooser.acceptance
        assert speeds[0] > 0.955 and min(speeds[1:]) > PLAIN


# A plain step takes 8.5 ms, one of the draft 3.9: a single drafted token gains nothing.
NEAR_MEMORY = Costs({1: 8.5, 2: 13.3, 4: 12.5, 8: 15.0}, {1: 3.9})


def test_a_draft_that_is_sure_may_cost_more_than_another_one():
    """With 64 tokens, one of three is more than the tolerance has with a shorter one in reserve."""
    first = {
        acceptance: DraftLength(NEAR_MEMORY, 1, (0, 1, 3, 7), acceptance=acceptance, horizon=64).choose([0])
        for acceptance in (0.7, 0.9, 0.97)
    }
    assert first == {0.7: 0, 0.9: 0, 0.97: 3}
    # What the batch gains depends on all of its rows.
    many = DraftLength(Costs({4: 8.5, 16: 12.5}, {4: 3.9}), 4, (0, 3), acceptance=0.97, horizon=64)
    assert many.choose([0, 1, 2, 3]) == 0 and many.choose([0]) == 3


@pytest.mark.parametrize("lengths", [(0, 1, 3, 7), (0, 3)])
def test_a_sure_draft_that_is_rejected_is_the_last_sure_one(lengths):
    chooser = DraftLength(NEAR_MEMORY, 1, lengths, acceptance=0.97, horizon=64)
    assert chooser.choose([0]) == 3
    chooser.observe([0], 3, [3], [0])
    assert chooser.choose([0]) == 0 and chooser.acceptance < 0.7


@pytest.mark.parametrize("rows", [1, 4])
def test_adapts(rows):
    """Drafts become good, and bad again, within a call; each row at another time."""

    def changing(row: int, done: int) -> float:
        return 0.95 if 300 <= done + 20 * row < 600 else 0.0

    assert Call(changing, rows, tokens=900).run(new(rows)) > (1.05 if rows == 1 else 1.0)
    for good_first in (True, False):
        call = Call(lambda row, done, first=good_first: 0.95 * ((done < 300) == first), rows, tokens=600)
        assert call.run(new(rows)) > (1.1 if rows == 1 else 1.03)


def test_one_row_of_many():
    """The drafts of one row suit, the others' do not: it is not worth while, but with few rows."""
    few = Call(lambda row, _: 0.97 * (row == 0), 2, draft=None)
    assert few.run(new(2, None)) > PLAIN
    many = Call(lambda row, _: 0.97 * (row == 0), 16)
    assert many.run(new(16)) > PLAIN
    assert sum(many.lengths) / len(many.lengths) < 0.5


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_drafts_at_different_times(seed):
    """The slowest row gains nothing from many rounds, but is another one each time: the call gains."""
    costs = {8: 1.25, 16: 1.7, 24: 2.1, 40: 2.8, 72: 4.6}

    def run(rate: float) -> float:
        truth = Costs(costs).steps
        call = Call(
            lambda *_: rate, 8, seed=seed, truth=lambda rows, k: truth(8, k)[k], found=lambda x: 8 * (x.random() < 0.8)
        )
        return call.run(DraftLength(Costs(costs), 8, (0, 2, 4, 8), horizon=128))

    assert run(0.9) > 1.1
    assert run(0.0) > PLAIN


@pytest.mark.parametrize("rate", [0.8, 0.95, 1.0])
def test_a_row_of_which_nothing_is_accepted(rate):
    """What is found for the other rows makes the call slower by a tenth at the most: it ends with this row."""

    class OfAllRows(Costs):
        """A step works on those that are finished, too."""

        def _table(self, rows: int, most: int) -> list[float]:
            return super()._table(8, most)

    costs = OfAllRows({8: 1.25, 16: 1.7, 24: 2.1, 40: 2.8, 72: 4.6})
    truth = costs.steps(8, 8)
    call = Call(lambda row, _: rate if row else 0.0, 8, truth=lambda _, k: truth[k], found=lambda _: 8)
    assert call.run(DraftLength(costs, 8, (0, 2, 4, 8), horizon=128)) > 0.9


@pytest.mark.parametrize("expected", [0.7, 0.9, 0.95])
def test_an_unlucky_draft_is_not_the_last_of_the_call(expected):
    """A draft that takes most of what may be lost waits until others have gained something."""
    costs = Costs({1: 1.0, 3: 1.05, 5: 1.2, 9: 1.35}, {1: 0.39})
    for k in (2, 4, 8):
        chooser = DraftLength(costs, 1, (0, 2, 4, 8), acceptance=expected, horizon=128)
        first = chooser.choose([0], most=k)
        assert first > 0
        chooser.observe([0], first, [first], [0])
        chooser._all.add(100, 95)  # only what is left decides
        chooser._rows[0].add(100, 95)
        assert chooser.choose([0]) > 0


@pytest.mark.parametrize("rows", [1, 4])
def test_a_beginning_that_was_too_unlucky_does_not_end_drafts(rows):
    """Nothing is accepted of the first tokens, until all that may be lost is. It comes back with the tokens."""
    for later, least in ((0.97, 1.1), (0.0, PLAIN)):
        call = Call(lambda _, done, rate=later: rate * (done > 40), rows, tokens=200)
        chooser = DraftLength(Costs(VERIFY, INT8), rows, (0, 2, 4, 8), acceptance=0.95, horizon=200)
        assert call.run(chooser) > least


def test_steps_without_a_draft_may_take_longer_than_plain_ones():
    costs = Costs({1: 1.0, 5: 1.5})
    costs.idle = 0.25
    chooser = DraftLength(costs, 1, (0, 4))
    chooser.observe([0], 0, [0], [0])
    assert chooser.gain == -0.25
    chooser.observe([0], 4, [4], [4])
    assert chooser.gain == pytest.approx((3.5 - 0.25) / 6)


def test_only_lengths_that_there_are():
    """The best of them, though one that there is not would be better, and of what is available no more than serves."""
    chooser = DraftLength(Costs(VERIFY, INT8), 1, (0, 2, 4, 8), acceptance=0.9, horizon=1000)
    assert [chooser.choose([0], most) for most in (0, 1, 2, 3, 4, 7, 12)] == [0, 0, 2, 2, 4, 4, 4]
    free = DraftLength(Costs(VERIFY), 1, (0, 2, 4, 8), acceptance=0.9, horizon=1000)
    assert [free.choose([0], 8, [there]) for there in (0, 2, 3, 4, 5, 9)] == [0, 2, 4, 4, 4, 8]
    # Where drafting a single token would be best, and two are still better than none.
    costs = Costs({1: 1.0, 2: 1.2, 3: 1.9, 5: 4.0, 9: 8.0})
    assert DraftLength(costs, 1, range(9), acceptance=0.6, horizon=1000).choose([0]) == 1
    assert DraftLength(costs, 1, (0, 2, 4, 8), acceptance=0.6, horizon=1000).choose([0]) == 2


def test_gain():
    """As a part of what plain steps would have taken."""
    chooser = DraftLength(Costs({1: 1.0, 5: 1.5}), 1, (0, 4))
    chooser.observe([0], 4, [4], [4])
    assert chooser.gain == pytest.approx(3.5 / 5)
    chooser.observe([0], 0, [0], [0])
    assert chooser.gain == pytest.approx(3.5 / 6)


def test_most_gain():
    """If everything were accepted, with the best of the lengths that there are."""
    assert DraftLength(Costs({1: 1.0, 5: 1.5}), 1, (0, 4)).most_gain == pytest.approx(0.7)
    # A small model, whose steps in few bits hardly take less time.
    assert DraftLength(Costs({1: 0.37, 5: 0.8, 9: 0.9}, {1: 0.33}), 1, (0, 2, 4, 8)).most_gain < 0.07


@pytest.mark.parametrize("tokens, can", [(8, False), (24, False), (25, True), (200, True)])
def test_the_first_round_may_lose_two_per_cent_of_the_call(tokens, can):
    """The shortest draft takes half a plain step more than one."""
    chooser = DraftLength(Costs({1: 1.0, 2: 1.1, 4: 1.2}, {1: 0.4}), 1, (0, 1, 3), horizon=tokens)
    assert chooser.can_begin is can
    assert (chooser.choose([0]) > 0) is can


def test_pauses_where_nothing_can_be_gained():
    """The first such call is the last for long."""
    pauses = Pauses()
    pauses.give_up()
    assert [pauses.pauses() for _ in range(MOST_PAUSES + 1)] == [True] * MOST_PAUSES + [False]
    pauses.give_up()
    assert pauses.pauses()


def test_pauses():
    """Twice as many and one after each call without a gain, but the first of them; none after one with a gain."""
    pauses, said = Pauses(), []
    for _ in range(20):
        said.append(pauses.pauses())
        if not said[-1]:
            pauses.observe(gains=False)
    assert "".join("-p"[said] for said in said) == "--p-ppp-ppppppp-pppp"
    while pauses.pauses():
        pass
    pauses.observe(gains=True)
    assert not pauses.pauses()
    for _ in range(20):
        pauses.observe(gains=False)
    assert sum(pauses.pauses() for _ in range(100)) == 63


def test_probes_are_rare():
    call = Call(lambda *_: 0.0, tokens=4000)
    assert call.run(new(acceptance=0.9)) > 0.98
    tried = [place for place, k in enumerate(call.lengths) if k and place > 20]
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    # At first the tolerance limits them, then the intervals double: up to what gives back what a trial loses (0.38).
    assert min(gaps) > 16 and gaps[-1] == 48
    assert 50 < len(tried) < 90


def test_what_drafts_would_have_come_to():
    """Where they are found, that is known without a trial, of each row."""
    costs = Costs({2: 1.0, 4: 1.3, 8: 1.5})
    chooser = DraftLength(costs, 2, (0, 1, 3), acceptance=0.1, horizon=500)
    for _ in range(100):
        assert chooser.choose([0, 1], available=[3, 3]) == 0
        chooser.observe([0, 1], 0, [0, 0], [0, 0])
        chooser.learn([0, 1], [False, None])
    assert chooser.acceptance < 0.01
    for _ in range(12):
        chooser.learn([0, 1], [None, True])
    assert chooser._rate(1) > 0.85 > 0.3 > chooser._rate(0)
    chooser.learn([0, 1], [None, None])
    assert chooser.choose([1], available=[3]) == 3


def test_probes_that_cost_nothing_come_soon():
    call = Call(lambda *_: 0.0, draft=None, truth=lambda rows, k: 1.0 + 0.01 * (k > 0), tokens=400)
    assert call.run(DraftLength(Costs({1: 1.0, 2: 1.01}), 1, (0, 1))) > 0.99
    tried = [place for place, k in enumerate(call.lengths) if k and place > 40]
    assert {after - before for before, after in itertools.pairwise(tried)} == {9}


def test_drafts_that_are_seldom_there():
    """Steps for which nothing was found are no steps without drafts by choice, and nothing is learned from them."""
    call = Call(lambda *_: 0.9, draft=None, found=lambda random: 8 * (random.random() < 0.1), tokens=500)
    assert call.run(new(draft=None)) > 1.2
    assert all(k == 0 or k > 2 for k in call.lengths)


def test_acceptance_is_handed_on():
    """What a call has found is where the next one begins."""
    first = new(acceptance=0.95)
    Call(lambda *_: 0.0).run(first)
    assert first.acceptance < 0.3
    second = Call(lambda *_: 0.0)
    assert second.run(new(acceptance=first.acceptance)) > 0.98
    assert second.lengths[0] == 0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_tables_that_are_wrong(rate):
    """Verifying takes three times what the table says: times that are observed put it right."""

    def truth(rows: int, k: int) -> float:
        return seconds(VERIFY, INT8, rows, k) * (3.0 if k else 1.0)

    costs, speeds = Costs(VERIFY, INT8), []
    for seed in range(6):
        chooser = DraftLength(costs, 1, range(9), acceptance=rate)
        speeds.append(Call(lambda *_: rate, tokens=300, truth=truth, seed=seed).run(chooser, timed=True))
    assert speeds[-1] > PLAIN
    assert sum(speeds) / len(speeds) > 0.95


def test_timings_that_vary():
    """Timings off by a third to either side, and sometimes by a factor of five, and a context that makes all slower."""
    noise, steps = random.Random(1), [0]

    def truth(rows: int, k: int) -> float:
        steps[0] += 1
        return (
            seconds(VERIFY, INT8, rows, k)
            * (1 + steps[0] / 200)
            * noise.uniform(0.7, 1.3)
            * noise.choice([1] * 30 + [5])
        )

    call = Call(lambda *_: 0.95, tokens=1000)
    spent, chooser = 0.0, new()
    call.truth = truth
    call.run(chooser, timed=True)
    # Counted with true times: noise and context are the same for a plain call.
    spent = sum(seconds(VERIFY, INT8, 1, k) for k in call.lengths)
    assert 1000 / spent > 1.5


def test_plain_steps_are_measured_again():
    """The context makes plain steps slower, which steps with drafts do not show."""
    call = Call(lambda *_: 1.0, tokens=3000)
    call.run(new(acceptance=0.95), timed=True)
    plain = [place for place, k in enumerate(call.lengths) if k == 0]
    assert len(call.lengths) / 80 < len(plain) < len(call.lengths) / 50
    call = Call(lambda *_: 1.0, tokens=3000)
    call.run(new(acceptance=0.95))
    assert 0 not in call.lengths[:-1]


# ---- the library's schedules


def test_schedules():
    constant, heuristic = Schedule(5), Schedule(5, "heuristic")
    for schedule in (constant, heuristic):
        assert schedule.choose([0]) == 5 and schedule.choose([0], most=3) == 3 and schedule.choose([]) == 0
        assert schedule.choose([0], most=0) == 0 and schedule.choose([0, 1], available=[1, 2]) == 2
        schedule.observe([0], 5, [5], [5])
    assert (constant.length, heuristic.length) == (5, 7)
    heuristic.observe([0], 3, [3], [3])  # less than it might have been: the sequence was nearly full
    assert heuristic.length == 9
    heuristic.observe([0, 1], 9, [9, 4], [9, 3])
    assert heuristic.length == 8
    heuristic.observe([0, 1], 8, [8, 0], [8, 0])
    assert heuristic.length == 10
    heuristic.observe([0], 0, [0], [0])
    assert heuristic.length == 10
    for _ in range(20):
        heuristic.observe([0], 1, [1], [0])
    assert heuristic.length == 1


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20),
    st.sampled_from(["heuristic", "heuristic_transient", "constant"]),
)
@settings(max_examples=50)
def test_schedules_are_the_librarys(steps, name):
    library = pytest.importorskip("transformers.generation.candidate_generator")
    from types import SimpleNamespace

    generator = library.AssistedCandidateGenerator.__new__(library.AssistedCandidateGenerator)
    generator.num_assistant_tokens = 5
    generator.assistant_generation_config = SimpleNamespace(
        num_assistant_tokens_schedule=name, assistant_confidence_threshold=None
    )
    ours = Schedule(5, name)
    for drafted, accepted in steps:
        accepted = min(drafted, accepted)
        generator.update_candidate_strategy(None, [range(drafted + 1)], accepted)
        ours.observe([0], drafted, [drafted], [accepted])
        assert ours.length == generator.num_assistant_tokens


# ---- tokens that rows share


def test_the_most_probable_tokens_are_drafted():
    assert shares([0.9, 0.5, 0.8], [8, 8, 8], 5) == [4, 0, 1]
    assert shares([0.9, 0.5, 0.8], [1, 8, 0], 5) == [1, 4, 0]
    assert shares([0.9, 0.9], [8, 8], 4, weights=[1.0, 0.1]) == [4, 0]
    assert shares([0.9], [2], 9) == [2]


def test_rows_that_have_fewest_tokens_come_first():
    chooser = DraftLength(Costs({4: 1.0, 8: 1.1}, is_ragged=True), 4, (0, 4))
    assert chooser.shares([0, 1, 2, 3], [8] * 4, 4) == [1, 1, 1, 1]
    for _ in range(5):
        chooser.observe([0, 1, 2], 0, [0] * 3, [0] * 3)
    assert chooser.shares([0, 1, 2, 3], [8] * 4, 4) == [0, 0, 0, 4]


def test_what_finished_rows_leave_over_is_drafted():
    """Four tokens that are likely enough do not pay the longer check, six do."""
    chooser = DraftLength(Costs({2: 1.0, 6: 1.8}, is_ragged=True), 4, (0, 4), acceptance=0.5)
    assert chooser.choose([0, 1], available=[8, 8], idle=0) == 0
    assert chooser.choose([0, 1], available=[8, 8], idle=2) == 4
    assert chooser.choose([0, 1], available=[0, 0], idle=2) == 0


def shared_call(rate: Callable[[int], float], seed: int = 0, rows: int = 8, tokens: int = 128) -> float:
    """How many times as fast as without drafts a call is whose rows share tokens; drafts are found at random."""
    costs = {8: 1.25, 12: 1.55, 16: 1.75, 24: 2.5}
    chooser = DraftLength(Costs(costs, is_ragged=True), rows, (0, 4, 8, 16), horizon=tokens)
    generated, time, draw = [0] * rows, 0.0, random.Random(seed)
    while left := [row for row in range(rows) if generated[row] < tokens]:
        available = [8 * (draw.random() < 0.8) for _ in left]
        k = chooser.choose(left, available=available, idle=rows - len(left))
        drafted = chooser.shares(left, available, rows + k - len(left)) if k else [0] * len(left)
        accepted = [
            next((n for n in range(count) if draw.random() > rate(row)), count)
            for row, count in zip(left, drafted, strict=True)
        ]
        chooser.observe(left, k, drafted, accepted)
        time += costs[rows + k]
        for row, count in zip(left, accepted, strict=True):
            generated[row] += 1 + count
    return tokens * costs[rows] / time


@pytest.mark.parametrize("seed", range(4))
def test_calls_whose_rows_share_tokens(seed):
    assert shared_call(lambda _: 0.9, seed) > 1.2
    assert shared_call(lambda _: 0.0, seed) > PLAIN
    assert shared_call(lambda row: 0.9 if row else 0.0, seed) > 0.9, "all wait for a row of which nothing is accepted"
