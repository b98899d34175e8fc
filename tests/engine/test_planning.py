"""Which requests run together, when, and which of them have room beside others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.engine import planning
from fastgen.engine.options import make
from fastgen.engine.planning import KVBudget
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured.slot import Slot
from tests.engine.conftest import PROMPTS
from tests.partitions import partitions

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=7)


@given(lengths=LENGTHS, most=st.integers(1, 4), new_tokens=st.integers(1, 60))
def test_no_other_batches_cost_less(lengths: list[int], most: int, new_tokens: int) -> None:
    """Against all of them, also those that mix lengths: so sorting loses nothing."""
    costs = planning.Costs()

    def total(batches: list[list[int]]) -> float:
        return sum(costs.of(max(lengths[i] for i in batch), len(batch), new_tokens) for batch in batches)

    made = planning.batches(lengths, lambda _: most, lambda length, rows, _: costs.of(length, rows, new_tokens))
    assert sorted(itertools.chain(*made)) == list(range(len(lengths)))
    assert max(map(len, made)) <= most
    others = (batches for batches in partitions(list(range(len(lengths)))) if max(map(len, batches)) <= most)
    assert total(made) <= min(map(total, others)) + 1e-9


def _waiting(lengths: list[int], rows: int = 1, new_tokens: int = 5) -> list[Request]:
    return [
        Request({}, {}, tokens=torch.ones(length, dtype=torch.long), new_tokens=new_tokens, rows=rows)
        for length in lengths
    ]


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), rows=st.integers(1, 5))
def test_the_oldest_runs(lengths: list[int], rows: int) -> None:
    waiting, seen = _waiting(lengths, rows), 0
    while waiting:
        chosen = planning.next_batch(waiting, 8, planning.Costs())
        assert waiting[0] in chosen and sum(request.rows for request in chosen) <= 8
        waiting = [request for request in waiting if request not in chosen]
        seen += len(chosen)
    assert seen == len(lengths)


def test_lengths_that_differ_much_do_not_share_a_batch() -> None:
    waiting = _waiting([10, 2000, 12, 1990, 11])
    chosen = planning.next_batch(waiting, 64, planning.Costs())
    assert sorted(request.length for request in chosen) == [10, 11, 12]


def test_few_are_not_kept_waiting_by_many() -> None:
    """Only so many are looked at: the others come later."""
    waiting = _waiting([5] * 3000)
    assert len(planning.next_batch(waiting, 4, planning.Costs())) == 4


def test_costs_are_those_that_calls_have_had() -> None:
    costs = planning.Costs()
    before = costs.of(100, 4, 20)
    costs.note(100, 4, 20, seconds=2.0)
    assert costs.of(100, 4, 20) == costs.of(101, 4, 20) == 2.0
    costs.note(100, 4, 20, seconds=6.0)
    assert 2.0 < costs.of(100, 4, 20) < 6.0
    # One that has not been there, in seconds as well: in proportion.
    assert costs.of(400, 4, 20) > costs.of(100, 4, 20) and before > 6.0


def test_what_a_call_costs_here_changes_the_batches() -> None:
    """Where calls of many rows turn out dear, few rows run together."""
    costs, waiting = planning.Costs(), _waiting([50] * 4)
    assert len(planning.next_batch(waiting, 4, costs)) == 4
    for rows, seconds in ((1, 1.0), (2, 9.0), (3, 90.0), (4, 90.0)):
        costs.note(50, rows, 5, seconds)
    assert len(planning.next_batch(waiting, 4, costs)) == 1


def test_sharing_decode_steps_outweighs_padding() -> None:
    assert [len(planning.next_batch(_waiting([10, 600], new_tokens=new), 64, planning.Costs())) for new in (1, 64)] == [
        1,
        2,
    ]


def _first_free(arrivals: planning.Arrivals, slots: int) -> int:
    """With how many free slots requests enter, when many wait and the last prefill was just now."""
    arrivals.note(has_all=True)
    return next(free for free in range(slots + 1) if arrivals.has_come(free, 1000, runs=True))


def _steps_without_room(arrivals: planning.Arrivals, rows: int) -> int:
    arrivals.note(has_all=True)
    return next(step for step in itertools.count(1) if arrivals.has_come(1, rows, runs=True))


@pytest.mark.parametrize("slots", [1, 2, 16, 64])
def test_small_models_wait_for_more_slots(slots: int) -> None:
    """A prefill takes them many steps, as it computes little: large ones read all weights in both."""
    small, large = planning.Arrivals(slots, 2**22), planning.Arrivals(slots, 2**33)
    assert 1 <= _first_free(large, slots) <= _first_free(small, slots) <= slots
    if slots == 64:
        assert _first_free(large, slots) < slots / 3 < slots / 2 < _first_free(small, slots)


@pytest.mark.parametrize("weight_bytes", [0, 2**22, 2**28, 2**33])
def test_nobody_waits_for_long(weight_bytes: int) -> None:
    arrivals = planning.Arrivals(64, weight_bytes)
    assert _steps_without_room(arrivals, rows=1) <= 8  # nobody comes whom it could share a prefill with
    assert 8 <= _steps_without_room(arrivals, rows=1000) <= 200
    assert arrivals.has_come(1, 1000, runs=False)
    arrivals.note(has_all=False)  # they were to be together: the rest comes behind the next step
    assert arrivals.has_come(1, 1000, runs=True)


def _prompt(cached: int, source: int = 0) -> Any:
    sizes = SimpleNamespace(source=source)
    return SimpleNamespace(inputs=1, cached=cached, sizes=sizes, bytes_per_position=(64, 64), bytes_of_states=0)


def _request(length: int, has_other_inputs: bool, new_tokens: int = 8) -> Request:
    tokens = torch.ones(length, dtype=torch.int64)
    return Request({}, {}, tokens=tokens, has_other_inputs=has_other_inputs, new_tokens=new_tokens)


def test_a_source_besides_tokens_is_estimated_by_what_is_besides() -> None:
    """Not by the longest source so far, which may have had many more tokens."""
    budget = KVBudget(None, has_encoder=True)
    budget.note(_prompt(1, source=1000), _request(1000, has_other_inputs=False))
    budget.note(_prompt(1, source=107), _request(100, has_other_inputs=True))
    for length in (5, 2000):
        request = _request(length, has_other_inputs=True)
        assert budget.needed(request, 8) == budget.needed(request, 8, _prompt(1, source=length + 7))


def test_a_prefilled_request_needs_what_its_prefill_has_shown() -> None:
    """A request whose picture is smaller than those before it leaves its room to others."""
    budget, others = KVBudget(None, has_encoder=False), _request(10, has_other_inputs=False)
    budget.note(_prompt(1000), _request(10, has_other_inputs=True))
    drawn = _request(10, has_other_inputs=True)
    drawn.config = SimpleNamespace(do_sample=True)
    assert not drawn.may_begin_again
    slot = Slot(drawn, 8, 0, lambda search, rows: None)
    slot.positions = 20
    slot.most_bytes = budget.needed(drawn, 8, _prompt(20))
    budget.most_bytes = slot.most_bytes + budget.needed(others, 8)
    assert budget.fitting([others], others, [slot]) == [others]
    budget.most_bytes -= 1
    assert budget.fitting([others], others, [slot]) == []


def test_the_oldest_has_room_first(llama: Any) -> None:
    """It must not wait for room that others, which came later, take."""
    requests = [make(llama, PROMPTS[0], None, {"max_new_tokens": 8}, None, 8) for _ in range(3)]
    budget = KVBudget(None, has_encoder=False)
    budget.note(_prompt(cached=len(PROMPTS[0])), requests[0])
    budget.most_bytes = 2 * budget.needed(requests[0], 8)
    assert budget.fitting(requests, requests[2], []) == [requests[2], requests[0]]
    budget.most_bytes = 1
    assert budget.fitting(requests, requests[2], []) == [requests[2]]
