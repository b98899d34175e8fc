"""When rows that have finished leave, by measured times, without a model; and which inputs stay."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import fastgen
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.speculation.costs import Costs
from fastgen.decoding.speculation.draft_length import DraftLength
from fastgen.decoding.speculation.speculative_search import SpeculativeSearch
from fastgen.optimizer.transformers.captured import any_batch, graph_cache
from fastgen.optimizer.transformers.captured.rewritten_processors import EncoderNoRepeatNGram, NoRepeatNGram
from fastgen.optimizer.transformers.speculation import batch_compaction
from fastgen.optimizer.transformers.speculation.drafting import LENGTHS, Drafting

CPU = torch.device("cpu")
RECORDING = 0.51


class Model:
    pass


class SmallDraft(NamedTuple):
    is_ragged: bool = False


class SmallKey(NamedTuple):
    rows: int
    draft: SmallDraft = SmallDraft()


def step(rows: int, seconds: dict[int, float]) -> Any:
    """A step of so many rows whose parts were measured to take so long, [positions] -> seconds."""
    made: Any = object.__new__(Drafting)
    made.key, made.lengths, made.costs = SmallKey(rows), LENGTHS, Costs(rows, LENGTHS)
    for part, found in seconds.items():
        made.costs.add(part, found)
        made.costs.add(part, found)
    made.seconds_of_first_runs, made.seconds_of_move = RECORDING, 0.02
    return made


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    steps: dict[Any, Any] = {}

    def find(model: Any, key: Any) -> Any:
        return SimpleNamespace(drafting=steps[key]) if key in steps else None

    monkeypatch.setattr(graph_cache, "kept", find)
    yield steps
    fastgen.enable(captured_step="auto")


EIGHT = {1: 0.020, 2: 0.025, 4: 0.035, 8: 0.055}  # 8, 16, 32 and 64 tokens: 0.015 and a 1600th of each token


def test_a_step_is_recorded_when_rounds_have_missed_what_that_takes(kept: dict[Any, Any]) -> None:
    """Checks of 32 tokens instead of 64 save 0.02 each, by the table."""
    model, large = Model(), step(8, EIGHT)
    answers = [batch_compaction.pays(model, large, SmallKey(4), 7, 100) for _ in range(60)]
    first = answers.index(True)
    assert first == int(RECORDING / 0.02)  # the 26th
    assert answers.index(True, first + 1) == 2 * first + 1  # from nothing again


def test_of_each_model_and_batch_it_is_missed_for_itself(kept: dict[Any, Any]) -> None:
    large, models = step(8, EIGHT), (Model(), Model())
    for _ in range(20):
        for model in models:
            for rows in (2, 4):
                assert not batch_compaction.pays(model, large, SmallKey(rows), 7 if rows == 4 else 1, 100)


def test_a_step_that_is_there_is_used_if_it_saves_more_than_the_way_to_it(kept: dict[Any, Any]) -> None:
    model, large = Model(), step(8, EIGHT)
    kept[SmallKey(4)] = step(4, {8: 0.045})
    assert batch_compaction.pays(model, large, SmallKey(4), 7, 100)
    assert not batch_compaction.pays(model, large, SmallKey(4), 7, 10)
    kept[SmallKey(4)] = step(4, {8: 0.056})
    assert not batch_compaction.pays(model, large, SmallKey(4), 7, 10**6)
    kept[SmallKey(4)] = step(4, {})  # then the table says it
    assert batch_compaction.pays(model, large, SmallKey(4), 7, 100)


def test_a_step_that_is_being_prepared_is_left_to_the_calls_that_do(kept: dict[Any, Any]) -> None:
    """Its parts would be recorded in this call, all at once."""
    model, large = Model(), step(8, EIGHT)
    kept[SmallKey(4)] = step(4, {4: 0.001})
    kept[SmallKey(4)].costs.only_timed = True
    assert not batch_compaction.pays(model, large, SmallKey(4), 7, 100)
    assert batch_compaction.pays(model, large, SmallKey(4), 3, 100)


def test_nothing_is_known_or_it_was_refused(kept: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    kept[SmallKey(4)] = step(4, {8: 0.001})
    assert not batch_compaction.pays(model, step(8, {}), SmallKey(4), 7, 1000)
    assert not batch_compaction.pays(model, step(8, {1: 0.1}), SmallKey(4), 7, 1000)
    fastgen.enable(captured_step="always")
    assert batch_compaction.pays(model, step(8, {}), SmallKey(4), 7, 1)
    monkeypatch.setattr(graph_cache, "is_refused", lambda *_: True)
    assert not batch_compaction.pays(model, step(8, EIGHT), SmallKey(4), 7, 1000)


def test_nothing_is_recorded_where_a_smaller_batch_saves_nothing(kept: dict[Any, Any]) -> None:
    model, large = Model(), step(8, dict.fromkeys(EIGHT, 0.05))
    assert not any(batch_compaction.pays(model, large, SmallKey(1), 7, 100) for _ in range(1000))


@pytest.mark.parametrize("positions", [(1, 2, 4, 8), ()])
def test_the_drafts_of_those_who_stay(positions: tuple[int, ...]) -> None:
    """Where drafts gained nothing for eight rows they do for one, timed or estimated from the larger step."""
    large, small = step(8, {1: 0.055, 2: 0.095, 4: 0.175, 8: 0.335}), step(1, dict.fromkeys(positions, 0.02))
    large.costs.plain, rows = 0.055, range(8)
    policy = DraftLength(large.costs, 8, 4096, has_model=False)
    assert policy.choose(rows, 100) == 0
    policy.observe(rows, 0, [0] * 8, [0] * 8)
    policy.keep(small.costs, [5])
    assert policy.choose([0], 100) > 0
    policy.observe([0], 7, [7], [7])
    assert policy.pays() is True


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("available", range(1, 8))
def test_the_lengths_of_those_who_stay(known: bool, available: int) -> None:
    """Rows that shared the tokens of a verify leave for a step of one row, whose lengths are others."""
    large, small = Costs(8, (0, 4, 8, 16), is_ragged=True), Costs(1, LENGTHS)
    for part, seconds in {1: 0.02, 5: 0.021, 9: 0.022, 17: 0.03}.items() if known else ():
        large.add(part, seconds)
        large.add(part, seconds)
    policy = DraftLength(large, 8, 4096, has_model=False)
    policy.keep(small, [5])
    for _ in range(6):
        length = policy.choose([0], 100, [available])
        assert length in LENGTHS
        policy.observe([0], length, [min(length, available)], [min(length, available)])


# ---- which inputs


def search(batch: int, per_input: int = 1, eos: tuple[int, ...] = (1,)) -> SpeculativeSearch:
    return SpeculativeSearch(batch, per_input, 3, 5, CPU, eos, width=3, together=False)


class OfSearch:
    """What is asked of a step besides its times."""

    def __init__(self, unfinished: list[list[bool]], processors: Any = ()) -> None:
        self.search = search(len(unfinished), len(unfinished[0]))
        self.search.unfinished.copy_(torch.tensor(unfinished))
        self.key: Any = _key(len(unfinished), processors)


def _key(batch: int, processors: Any) -> Any:
    from fastgen.optimizer.transformers.captured.key import Key
    from fastgen.optimizer.transformers.captured.sizes import Sizes

    return Key(
        batch=batch, per_input=1, sizes=Sizes(3, 3, 5, 0), width=3,
        encoder=None, source_in_front=False, early_stopping=None, samples=False, ends=1, processors=processors,
        has_criteria=False, kept=(), tensors=(), constants=(), kv=(), windows=(), draft=SmallDraft(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "unfinished, batch, inputs",
    [
        ([1, 0, 0, 1, 1, 0, 0, 0], 4, [0, 1, 3, 4]),
        ([0, 0, 0, 0, 0, 0, 0, 1], 1, [7]),
        ([0, 1, 0, 1, 0], 2, [1, 3]),
        ([1, 1, 1, 0, 0], None, None),  # four of them are more than half
        ([1, 1, 1, 1, 1, 0, 0, 0], None, None),
        ([1, 0, 1], None, None),
        ([1, 0, 1, 0], 2, [0, 2]),
        ([1], None, None),
    ],
)
def test_inputs_that_stay(unfinished: list[int], batch: int | None, inputs: list[int] | None) -> None:
    of: Any = OfSearch([[bool(each)] for each in unfinished])
    key = batch_compaction.smaller_key(of)
    assert (key and key.batch) == batch
    if batch is not None:
        assert batch_compaction.remaining(of, batch).tolist() == inputs


def test_an_input_stays_with_all_of_its_rows() -> None:
    of: Any = OfSearch([[False, False], [True, False], [False, False]])
    assert batch_compaction.smaller_key(of).batch == 1 and batch_compaction.remaining(of, 1).tolist() == [1]


@pytest.mark.parametrize("kind, leaves", [(NoRepeatNGram, True), (EncoderNoRepeatNGram, False)])
def test_processors_that_have_the_source_of_each_row(kind: Any, leaves: bool) -> None:
    of: Any = OfSearch([[True], [False]], processors=((kind, 2),))
    assert (batch_compaction.smaller_key(of) is not None) == leaves


def test_processors_that_have_a_number_of_each_row() -> None:
    given = [
        transformers.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([3, 0, 5])),
        transformers.RepetitionPenaltyLogitsProcessor(1.2, 2),
        transformers.NoRepeatNGramLogitsProcessor(2),
    ]
    found = any_batch.selected(given, torch.tensor([0, 2]))
    assert found[0].prompt_ignore_length.tolist() == [3, 5] and given[0].prompt_ignore_length.tolist() == [3, 0, 5]
    assert found[1:] == given[1:]


@pytest.mark.parametrize("per_input", [1, 2])
def test_a_search_goes_on_with_some_inputs_and_comes_back(per_input: int) -> None:
    """As the larger one goes on alone."""
    torch.manual_seed(0)
    batch, inputs, rows = 4, torch.tensor([1, 3]), 4 * per_input
    alone, large = search(batch, per_input), search(batch, per_input)
    prompt = torch.randint(2, 9, (batch, 3))
    chosen = torch.randint(2, 9, (rows, 3))
    chosen[:per_input, 1] = chosen[2 * per_input : 3 * per_input, 0] = 1  # inputs 0 and 2 end
    accepted, ties = torch.full((rows,), 1), torch.zeros((), dtype=torch.int64)
    for each in (alone, large):
        each.begin(prompt, 5, fill=7)
        each.commit(chosen, None, accepted, None, ties)
    small = search(2, per_input)
    small.begin(prompt[:1], 2, fill=3)  # what another call has left
    small.insert(large, inputs)
    of_inputs = torch.arange(rows).view(batch, -1)[inputs].flatten()
    for ends in (False, True):
        chosen = torch.randint(2, 9, (rows, 3))
        if ends:
            chosen[-1, 0] = 1
        alone.commit(chosen, None, accepted, None, ties)
        small.commit(chosen[of_inputs].contiguous(), None, accepted[of_inputs].contiguous(), None, ties)
    small.put_back(large, inputs)
    for name, buffer in vars(alone).items():
        if isinstance(buffer, torch.Tensor) and name != "taken":  # finished ones take nothing, then or now
            assert getattr(large, name).equal(buffer), name
    assert large.results(slice(batch), per_input).equal(alone.results(slice(batch), per_input))


def test_ancestors_of_rows_are_those_of_their_input() -> None:
    large, small = StepState(3, 2, 4, CPU), StepState(2, 2, 4, CPU)
    large.advance(torch.tensor([1, 1, 2, 2, 5, 4]))
    large.advance(torch.tensor([0, 0, 3, 2, 5, 5]))
    small.insert(large, torch.tensor([0, 2]), slice(None))
    assert small.ancestry is not None and large.ancestry is not None
    assert small.ancestry[:2].equal(large.ancestry[:2]) and small.ancestry[2:].equal(large.ancestry[4:] - 2)
    assert small.position_table.equal(large.position_table[:, [0, 1, 4, 5]])
