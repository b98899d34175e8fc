"""Every record in exactly one batch, batches within their bounds, and the same plan every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.pipeline.batches import Batch, Resumed, Rules, Window, cut, plan, split_rows
from fastgen.pipeline.errors import Problem, SetupError
from fastgen.pipeline.inputs import Record
from tests.partitions import cuts

LENGTHS = st.lists(st.integers(1, 50), max_size=80)
RULES = st.builds(Rules, st.integers(1, 9), st.none() | st.integers(1, 200), st.booleans())


@given(LENGTHS, RULES)
def test_batches_hold_every_row_once_and_keep_their_bounds(lengths, rules):
    batches = cut(lengths, rules)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[index] for index in batch)
        assert len(batch) <= rules.batch_size
        assert rules.max_tokens is None or len(batch) == 1 or len(batch) * width <= rules.max_tokens
        assert not rules.equal_lengths or {lengths[index] for index in batch} == {width}
    flat = [lengths[index] for batch in batches for index in batch]
    assert flat == sorted(lengths, reverse=True)
    if rules.max_tokens is None and not rules.equal_lengths:
        assert len(batches) == -(-len(lengths) // rules.batch_size)


def records(lengths):
    """Records whose text is their length; 0 stands for a bad one."""
    for position, length in enumerate(lengths):
        if length:
            yield Record(position, position + 1, position, str(length))
        else:
            yield Record(position, position + 1, position, problem=Problem("empty", "the text is empty"))


def prepare(chunk):
    return [replace(record, ids=[7] * int(record.text)) for record in chunk]


@given(st.lists(st.integers(0, 20), max_size=300), st.integers(1, 3), st.data())
def test_a_resumed_plan_is_the_rest_of_the_whole_one(lengths, batch_size, data):
    rules = Rules(batch_size)
    whole = list(plan(records(lengths), prepare, rules, Resumed()))
    position = 0
    for item in whole:
        if isinstance(item, Window):
            assert item.start == position
            assert [bad["position"] for bad in item.bad] == [
                p for p in range(position, position + item.count) if lengths[p] == 0
            ]
            position += item.count
    assert position == len(lengths)
    seen = [row.position for item in whole if isinstance(item, Batch) for row in item.rows]
    assert sorted(seen) == [p for p, length in enumerate(lengths) if length]

    done = data.draw(st.integers(0, len(whole)))
    resumed = Resumed()
    for item in whole[:done]:
        if isinstance(item, Window):
            resumed.windows[item.index] = item
        else:
            resumed.done.setdefault(item.window, set()).add(item.index)
    assert list(plan(records(lengths), prepare, rules, resumed)) == whole[done:]


def test_a_resumed_plan_refuses_another_input():
    rules = Rules(2)
    resumed = Resumed({0: next(iter(plan(records([1, 2, 3]), prepare, rules, Resumed())))})
    with pytest.raises(SetupError, match="not the one"):
        list(plan(records([1, 2]), prepare, rules, resumed))


def test_a_complete_window_is_not_tokenised_again():
    rules = Rules(2)
    whole = list(plan(records([1, 2, 3]), prepare, rules, Resumed()))
    resumed = Resumed()
    resumed.windows[0] = whole[0]
    resumed.done[0] = {0, 1}
    assert list(plan(records([1, 2, 3]), lambda chunk: pytest.fail("tokenised"), rules, resumed)) == []


@given(st.integers(1, 30), st.integers(1, 30))
def test_splitting_keeps_rows_and_their_order(count, parts):
    rows = prepare(records([1] * count))
    pieces = split_rows(rows, parts)
    assert [row for piece in pieces for row in piece] == rows
    assert len(pieces) == min(parts, count)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def cost(lengths, batches, pass_cost):
    return sum(len(batch) * max(lengths[index] for index in batch) + pass_cost for batch in batches)


@given(st.lists(st.integers(1, 12), max_size=9), st.integers(1, 5), st.none() | st.integers(1, 40), st.integers(0, 20))
def test_batches_by_cost_are_the_cheapest_that_are_allowed(lengths, batch_size, max_tokens, pass_cost):
    rules = Rules(batch_size, max_tokens, pass_cost=pass_cost)
    found = cut(lengths, rules)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    assert [index for batch in found for index in batch] == order

    def allowed(batch):
        tokens = len(batch) * max(lengths[index] for index in batch)
        return len(batch) == 1 or (len(batch) <= batch_size and (max_tokens is None or tokens <= max_tokens))

    assert all(map(allowed, found))
    least = min(cost(lengths, parts, pass_cost) for parts in cuts(order) if all(map(allowed, parts)))
    assert cost(lengths, found, pass_cost) == least


def test_a_window_of_many_rows_is_cut_by_cost_at_jumps():
    lengths = [40] * 10 + [3] * 30
    assert [len(batch) for batch in cut(lengths, Rules(64, None, pass_cost=64))] == [10, 30]
    assert [len(batch) for batch in cut(lengths, Rules(64, None, pass_cost=100000))] == [40]
