"""Inputs that have finished leave a captured step, and the others go on: nobody sees it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

import fastgen
from fastgen import releases
from fastgen.decoding.captured import graph, part, program, symbolic_batch
from fastgen.decoding.captured.part import CapturedPart
from fastgen.optimizer.transformers.captured import any_batch, compaction, graph_cache, pays, sizes
from fastgen.optimizer.transformers.captured.any_batch import SymbolicStep
from fastgen.optimizer.transformers.captured.compaction import Compaction
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.pays import Ledger
from tests import near_ties
from tests.equivalence.captured import FAMILIES, build, captures, every, leave_at_once, reasons, record_programs
from tests.equivalence.check import check, run
from tests.equivalence.models import BY_NAME, EOS, FIRST_WORD, LONG, Family, padded
from tests.equivalence.user_code import Listens
from tests.noting import noted

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.7},
    "all returned": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True},
    "processors": {"num_beams": 2, "repetition_penalty": 1.3, "min_new_tokens": 3},
}

LEAVING = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [EOS, *range(20, 32)]}


@pytest.fixture(autouse=True)
def inputs_of_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many inputs programs run; inputs leave whatever that costs."""
    record_programs(device, monkeypatch)
    leave_at_once(monkeypatch)
    return noted(monkeypatch, CapturedPart, "use", lambda part, inputs: inputs)


@pytest.mark.sampled(2, each=("family", "way"))
@every
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_those_that_go_on_are_what_they_were(
    family: Family, way: dict[str, Any], inputs_of_programs: list[int]
) -> None:
    """Inputs end at any step; the next calls begin with all of them again. Buffers grow meanwhile."""
    model, _ = build(family, CPU)
    given = family.make_inputs(6, LONG)
    ends = torch.randperm(90, generator=torch.Generator().manual_seed(3))[: 4 if "num_beams" in way else 12].tolist()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [EOS, *ends], **way}
    for _ in range(2):
        check(model, given, options)
    assert captures() == 2, reasons()
    assert max(inputs_of_programs) == 6
    assert min(inputs_of_programs) < 6 or family.name == "bart", "whose inputs all end at once here"


def test_when_inputs_leave_depends_on_no_clock_if_all_is_captured(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on what other calls have left: the number of rows decides about the bits of products."""
    model, _ = build(BY_NAME["llama"], CPU)
    given, found = padded([3, 4, 5, 90, 91, 92, 93, 94], side="left", words=(FIRST_WORD, 60)), []
    with fastgen.settings.changed(captured_step="always"):
        for seconds in (1000.0, 0.0, 1000.0):
            monkeypatch.setattr(Ledger, "specializing", seconds)
            monkeypatch.setattr(pays, "_RECORDINGS", seconds)
            inputs_of_programs.clear()
            model.generate(**given, **LEAVING)
            found.append([*inputs_of_programs])
    assert captures() == 3 and min(found[0]) < 8
    assert len({tuple(dict.fromkeys(each)) for each in found}) == 1 and len({len(each) for each in found}) <= 2


def test_inputs_may_leave_behind_any_step_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether buffers grow in this call, or are as large as the one before has left them."""
    monkeypatch.setattr(sizes, "_MAX_FIRST_NEW_ON_CPU", 64)
    model, inputs = build(BY_NAME["llama"], CPU)

    def place(compaction: Compaction, step: Any, seconds: float) -> int:
        return int(step.search.length.max()) - step.search.prompt_capacity

    asked = noted(monkeypatch, Compaction, "after", place)
    with fastgen.settings.changed(captured_step="always"):
        for _ in range(2):
            asked.clear()
            model.generate(**inputs, max_new_tokens=80, min_new_tokens=80)
            assert asked == [*range(2, 81)]
    assert captures() == 2, reasons()


@pytest.mark.parametrize("beams", [1, 2])
def test_what_the_penalty_leaves_out_moves_with_its_rows(beams: int, inputs_of_programs: list[int]) -> None:
    """The library leaves padding out of it. Here the first inputs have most: those behind are not to take that over."""
    model, _ = build(BY_NAME["llama"], CPU)
    given = padded([3, 4, 5, 90, 91, 92, 93, 94], side="left", words=(FIRST_WORD, 60))
    options = {**LEAVING, "num_beams": beams, "repetition_penalty": 1.8}
    check(model, given, options)
    assert captures() == 1 and min(inputs_of_programs) < 8


def test_a_larger_step_goes_on_with_the_order_of_the_inputs(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of fixed sizes is exchanged for a larger one behind its first tokens, when inputs have left."""
    monkeypatch.setattr(sizes, "_MAX_FIRST_NEW_ON_CPU", 8)
    left_by = noted(monkeypatch, Decoding, "_larger", lambda call, step: min(inputs_of_programs))
    model, _ = build(BY_NAME["opt"], CPU)
    given = padded([3, 4, 5, 90, 91, 92, 93, 94], side="left", words=(FIRST_WORD, 60))
    options = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": [EOS, 20]}
    check(model, given, {**options, "repetition_penalty": 1.3})
    assert captures() == 1 and left_by and left_by[0] < 8


def test_nobody_leaves_where_that_is_seen(inputs_of_programs: list[int]) -> None:
    family = FAMILIES[3]
    model, _ = build(family, CPU)
    is_seen: list[dict[str, Any]] = [
        {"do_sample": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"encoder_repetition_penalty": 3.0},  # of the tokens of each input, which stay where they are
        {"encoder_no_repeat_ngram_size": 1},
    ]
    for more in is_seen:
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [EOS, *range(20, 32)], **more}
        check(model, family.make_inputs(6, LONG), lambda options=options: copy.deepcopy(options))
    assert set(inputs_of_programs) == {6}


def test_nobody_leaves_where_the_model_does_not_read_padding() -> None:
    """It raises in the library's loop, which gives it that of an input that is finished."""
    model, _ = build(FAMILIES[3], CPU)
    with pytest.raises(IndexError, match="out of range"):
        run(model, FAMILIES[3].make_inputs(6, LONG), {**LEAVING, "pad_token_id": 10_000})


def test_without_memory_for_a_recording_all_places_are_computed(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is counted; and the next call, of another number of inputs, tries it once more."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    fastgen.reset_stats()

    def fails(*given: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(any_batch, "SymbolicStep", fails)
        check(model, family.make_inputs(6, LONG), LEAVING)
    assert fastgen.stats()[any_batch.ENTRY_POINT]["not used"] == {"out of memory": 1}
    made = noted(monkeypatch, CapturedPart, "specialize")
    check(model, family.make_inputs(7, LONG), LEAVING)
    assert made and fastgen.stats()[any_batch.ENTRY_POINT]["not used"] == {"out of memory": 1}


def test_once_there_is_memory_a_kept_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are some steps apart, as they take time."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    inputs, tried, made = family.make_inputs(6, LONG), list[int](), list[Any]()
    monkeypatch.setattr(part, "_PAUSES", (1, 8))

    def fails(*given: Any) -> Any:
        tried.append(1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(any_batch, "SymbolicStep", fails)
        for _ in range(2):
            check(model, inputs, LEAVING)
    assert len(tried) > 1
    monkeypatch.setattr(any_batch, "SymbolicStep", lambda *given: (made.append(SymbolicStep(*given)), made[-1])[1])
    for _ in range(2):
        check(model, inputs, LEAVING)
    assert made and recordings(model)


def recordings(model: Any) -> list[Any]:
    return [each for each in graph_cache._of(model).symbolic.values() if each is not None]


def test_recordings_for_any_number_of_inputs_count_in_the_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for longest go, and calls that go on with their programs notice nothing."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    check(model, family.make_inputs(6, LONG), LEAVING)
    (first,) = recordings(model)
    monkeypatch.setattr(graph_cache, "_most_bytes", lambda device: sum(chunk.nbytes for chunk in first.chunks) + 2**20)
    monkeypatch.setattr(program.memory, "_chunks", {})  # so that the next one gets memory of its own
    check(model, family.make_inputs(6, LONG), {**LEAVING, "num_beams": 2})
    assert first not in recordings(model)


def test_a_recording_beyond_the_limit_of_bytes_is_made_once(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    made: list[Any] = []
    monkeypatch.setattr(any_batch, "SymbolicStep", lambda *given: (made.append(SymbolicStep(*given)), made[-1])[1])
    monkeypatch.setattr(graph_cache, "_most_bytes", lambda device: 2**20)
    for inputs in (6, 7):
        check(model, family.make_inputs(inputs, LONG), LEAVING)
    assert captures() == 2 and not recordings(model)
    kinds = 2  # one that goes on with larger buffers, and one of this size
    assert len(made) == kinds and all(each.chunks for each in made)


def test_what_has_no_programs_is_not_asked_in_each_step(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    asked = noted(monkeypatch, graph_cache, "symbolic", lambda model, key, inputs, *given: inputs)
    monkeypatch.setattr(any_batch.SymbolicStep, "specialize", lambda *given: None)
    for _ in range(2):
        check(model, family.make_inputs(6, LONG), LEAVING)
    kinds = 2  # one that goes on with larger buffers, and one of this size
    assert set(Counter(asked).values()) == {kinds} and max(asked) < 6


def test_of_more_inputs_than_are_recorded_those_leave_that_are_too_many(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No programs for so many are made, and those for fewer serve the next calls."""
    monkeypatch.setattr(symbolic_batch, "_BATCHES", ((13, 17), (11, 19)))
    monkeypatch.setattr(any_batch, "MOST", 17)
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    made = noted(monkeypatch, CapturedPart, "specialize", lambda part, inputs, *given: inputs)
    for inputs in (24, 5):
        made.clear()
        check(model, family.make_inputs(inputs, LONG), LEAVING)
        assert made and max(made) <= 17, inputs


def step_of(left: list[bool], monkeypatch: pytest.MonkeyPatch, known: bool) -> tuple[Compaction, Any, list[int]]:
    """A compaction of a step in which these go on, and after how many steps inputs have left."""
    part = mock.Mock(smallest=lambda inputs: inputs if known else None)
    step = mock.Mock(parts={1: part}, key=mock.Mock(per_input=4, processors=()))
    step.search.unfinished = torch.tensor(left).unsqueeze(1)
    ledger = Ledger()
    monkeypatch.setattr(Ledger, "specializing", 0.5)
    monkeypatch.setattr(any_batch, "is_symbolic", lambda key: True)
    monkeypatch.setattr(any_batch, "is_recorded", lambda *asked: True)
    made = Compaction(None, step.key, ledger, len(left), 1, 0, lambda *given: None)
    moved: list[int] = []
    monkeypatch.setattr(made, "_compact", lambda *_: moved.append(made._steps))
    return made, step, moved


@pytest.mark.parametrize(
    ("left", "known", "expected"),
    [
        ([True] * 4 + [False] * 4, False, 20),  # half of 100 ms a step, until 0.5 s and four moves are lost
        ([True] * 4 + [False] * 4, True, 8),  # the moves alone
        ([True] * 8, True, None),
        ([False] * 8, True, None),
        ([True, True, False, False], True, None),  # of 16 rows
    ],
)
def test_inputs_leave_once_idle_rows_have_cost_as_much(
    left: list[bool], known: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compaction, "_FEW_ROWS", 16)
    made, step, moved = step_of(left, monkeypatch, known)
    for _ in range(40):
        made.after(step, 0.1)
    assert (moved[0] if moved else None) == expected


@pytest.mark.parametrize("seen", ["streamed", "in a cache of the user's"])
def test_nobody_leaves_who_is_seen(seen: str, inputs_of_programs: list[int]) -> None:
    """A streamer gets a token of each row, and the cache what each of them stores."""
    model, _ = build(BY_NAME["llama"], CPU)
    given = BY_NAME["llama"].make_inputs(6, LONG)

    def call() -> Any:
        streamer, cache = Listens(), DynamicCache(config=model.config)
        more = {"streamer": streamer} if seen == "streamed" else releases.with_cache(cache)
        return model.generate(**given, **LEAVING, **more), streamer.heard, cache

    near_ties.check(call)
    assert captures() == 1 and set(inputs_of_programs) <= {6}, reasons()


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_calls_of_other_sizes_share_the_recording_that_inputs_have_left_by(
    way: dict[str, Any], inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is recorded for itself. What is made of the shared one for all inputs of a call is kept."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    monkeypatch.setattr(Ledger, "with_more_rows", lambda *given: None)
    recorded = noted(monkeypatch, graph, "new")
    made = noted(monkeypatch, CapturedPart, "specialize", lambda part, inputs, *given: inputs)
    for inputs in (6, 9, 9):
        check(model, family.make_inputs(inputs, LONG), {**LEAVING, **way})
    assert captures() == 3 and len(recorded) == 1, reasons()
    assert made.count(9) == 1


def test_a_step_that_is_captured_for_itself_is_not_asked_for_a_shared_recording(
    inputs_of_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That looks at the whole model, which must not be done in each step."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    asked = noted(monkeypatch, graph_cache, "has_symbolic")
    for _ in range(2):
        asked.clear()
        check(model, family.make_inputs(6, LONG), {**LEAVING, "eos_token_id": None})
    assert captures() == 2 and not asked


@pytest.mark.parametrize("beams", [1, 3])
def test_patches_may_leave_between_a_prefill_and_the_librarys_loop(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `disable` in another thread: the loop goes on from there, and does not prefill again."""
    family = BY_NAME["llama"]
    model, _ = build(family, CPU)
    given, options = family.make_inputs(3, LONG), {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    with fastgen.disabled():
        expected = model.generate(**given, **options)
    left = noted(monkeypatch, Ledger, "with_more_rows", lambda *given: fastgen.disable())
    monkeypatch.setattr(Ledger, "starts_at", lambda *given: None)
    try:
        assert torch.equal(model.generate(**given, **options), expected) and left
    finally:
        fastgen.enable()
