"""Finished inputs leave a captured step, and the others go on: nobody sees it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

import fastgen
from fastgen import releases
from fastgen.decoding.captured import graph, program, symbolic_batch
from fastgen.decoding.captured.graph import CapturedPart
from fastgen.optimizer.transformers.captured import any_batch, graph_cache, key, pays
from fastgen.optimizer.transformers.captured.any_batch import Compaction, SymbolicStep
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.pays import Ledger
from tests import near_ties
from tests.equivalence.captured import build, captures, every, leave_at_once, reasons, record_programs
from tests.equivalence.check import check, run
from tests.equivalence.models import BY_NAME, EOS, FIRST_WORD, LONG, Family, padded
from tests.equivalence.user_code import Listens
from tests.noting import noted

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.7},
    "all returned": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True},
    "processors": {"num_beams": 2, "repetition_penalty": 1.3, "min_new_tokens": 3},
}

LEAVING = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [EOS, *range(20, 32)]}
SOME_WITH_PADDING = padded([3, 4, 5, 90, 91, 92, 93, 94], side="left", words=(FIRST_WORD, 60))
KINDS = 2  # of recordings in a call: one that goes on with larger buffers, and one of this size


@pytest.fixture(autouse=True)
def computed(device: torch.device, monkeypatch: Patch) -> list[int]:
    """The numbers of inputs that programs compute; inputs leave whatever that costs."""
    record_programs(device, monkeypatch)
    leave_at_once(monkeypatch)
    return noted(monkeypatch, CapturedPart, "use", lambda part, inputs: inputs)


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"], CPU)[0]


@pytest.fixture
def specialized(monkeypatch: Patch) -> list[int]:
    """The numbers of inputs that the recording for any number of them is specialized for."""
    return noted(monkeypatch, CapturedPart, "specialize", lambda part, inputs, *given: inputs)


@pytest.fixture
def recorded(monkeypatch: Patch) -> list[Any]:
    """The recordings for any number of inputs, as they are made."""
    made: list[Any] = []
    monkeypatch.setattr(any_batch, "SymbolicStep", lambda *given: (made.append(SymbolicStep(*given)), made[-1])[1])
    return made


def leaving(model: Any, inputs: int = 6, **options: Any) -> None:
    """Asserts that a call of a Llama in which inputs end at any step is the library's."""
    check(model, BY_NAME["llama"].make_inputs(inputs, LONG), {**LEAVING, **options})


@contextlib.contextmanager
def without_memory(monkeypatch: Patch) -> Iterator[list[None]]:
    """No recording for any number of inputs can be made in this block; one entry for each trial."""
    tried: list[None] = []

    def fails(*given: Any) -> Any:
        tried.append(None)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(any_batch, "SymbolicStep", fails)
        yield tried


@every
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_inputs_leave(family: Family, way: dict[str, Any], computed: list[int]) -> None:
    """Inputs end at any step, and buffers grow. The next call begins with all inputs again."""
    model, _ = build(family, CPU)
    given = family.make_inputs(6, LONG)
    ends = torch.randperm(90, generator=torch.Generator().manual_seed(3))[: 4 if "num_beams" in way else 12].tolist()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [EOS, *ends], **way}
    for _ in range(2):
        check(model, given, options)
    assert captures() == 2, reasons()
    assert max(computed) == 6
    assert min(computed) < 6 or family.name == "bart", "whose inputs all end at once here"


def test_no_clock_decides_when_inputs_leave_if_all_is_captured(
    model: Any, computed: list[int], monkeypatch: Patch
) -> None:
    """Nor on what other calls have left: the bits of products depend on the number of rows."""
    found = []
    with fastgen.settings.changed(captured_step="always"):
        for seconds in (1000.0, 0.0, 1000.0):
            monkeypatch.setattr(Ledger, "specializing", seconds)
            monkeypatch.setattr(pays, "_RECORDINGS", seconds)
            computed.clear()
            model.generate(**SOME_WITH_PADDING, **LEAVING)
            found.append([*computed])
    assert captures() == 3 and min(found[0]) < 8
    assert len({tuple(dict.fromkeys(each)) for each in found}) == 1 and len({len(each) for each in found}) <= 2


def test_inputs_may_leave_after_any_captured_step(monkeypatch: Patch) -> None:
    """Whether buffers grow in this call, or have grown in the one before."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 64)
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
def test_what_the_penalty_leaves_out_moves_with_its_rows(model: Any, beams: int, computed: list[int]) -> None:
    """The library leaves padding out of the penalty. The first inputs have most of it, the last ones have none."""
    check(model, SOME_WITH_PADDING, {**LEAVING, "num_beams": beams, "repetition_penalty": 1.8})
    assert captures() == 1 and min(computed) < 8


def test_a_larger_step_keeps_the_order_of_the_inputs(computed: list[int], monkeypatch: Patch) -> None:
    """A step of fixed sizes is exchanged for a larger one after its first tokens, when inputs have left."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 8)
    left_by = noted(monkeypatch, Decoding, "_larger", lambda call, step: min(computed))
    options = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": [EOS, 20]}
    check(build(BY_NAME["opt"], CPU)[0], SOME_WITH_PADDING, {**options, "repetition_penalty": 1.3})
    assert captures() == 1 and left_by and left_by[0] < 8


SEEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "samples": lambda model: {"do_sample": True},
    "scores": lambda model: {"return_dict_in_generate": True, "output_scores": True},
    "sources in a penalty": lambda model: {"encoder_repetition_penalty": 3.0},  # which stay in place
    "sources in n-grams": lambda model: {"encoder_no_repeat_ngram_size": 1},
    "tokens of each row in a streamer": lambda model: {"streamer": Listens()},
    "rows in a cache of the user's": lambda model: releases.with_cache(DynamicCache(config=model.config)),
}


@pytest.mark.parametrize("seen", SEEN)
def test_nobody_leaves_if_that_is_seen(model: Any, seen: str, computed: list[int]) -> None:
    given = BY_NAME["llama"].make_inputs(6, LONG)

    def call() -> Any:
        torch.manual_seed(0)
        options = SEEN[seen](model)
        result = model.generate(**given, **{**LEAVING, **options})
        return result, getattr(options.get("streamer"), "heard", None), releases.cache_in(options)

    near_ties.check(call)
    assert captures() == 1 and set(computed) == {6}, reasons()


def test_nobody_leaves_if_the_model_does_not_read_padding(model: Any) -> None:
    """It raises in the library's loop, which gives it the padding of a finished input."""
    with pytest.raises(IndexError, match="out of range"):
        run(model, BY_NAME["llama"].make_inputs(6, LONG), {**LEAVING, "pad_token_id": 10_000})


# ---- recordings for any number of inputs


def test_all_places_are_computed_without_memory(model: Any, specialized: list[int], monkeypatch: Patch) -> None:
    """That is counted. The next call, of another number of inputs, tries once more."""
    fastgen.reset_stats()
    with without_memory(monkeypatch):
        leaving(model)
    assert fastgen.stats()[any_batch.ENTRY_POINT]["not used"] == {"out of memory": 1} and not specialized
    leaving(model, 7)
    assert specialized and fastgen.stats()[any_batch.ENTRY_POINT]["not used"] == {"out of memory": 1}


def test_a_kept_step_is_recorded_once_there_is_memory(model: Any, recorded: list[Any], monkeypatch: Patch) -> None:
    """Trials are some steps apart, as they take time."""
    monkeypatch.setattr(graph, "_PAUSES", (1, 8))
    with without_memory(monkeypatch) as tried:
        for _ in range(2):
            leaving(model)
    assert len(tried) > 1 and not recorded
    for _ in range(2):
        leaving(model)
    assert recorded and recordings(model)


def recordings(model: Any) -> list[Any]:
    return [each for each in graph_cache._of(model).symbolic.values() if each is not None]


def test_recordings_count_in_the_limit_of_bytes(model: Any, monkeypatch: Patch) -> None:
    """The least recently used ones go, and calls that go on with their programs notice nothing."""
    leaving(model)
    (first,) = recordings(model)
    monkeypatch.setattr(graph_cache, "_most_bytes", lambda device: sum(chunk.nbytes for chunk in first.chunks) + 2**20)
    monkeypatch.setattr(program.memory, "_chunks", {})  # so that the next one gets memory of its own
    leaving(model, num_beams=2)
    assert first not in recordings(model)


def test_a_recording_beyond_the_limit_of_bytes_is_made_once(
    model: Any, recorded: list[Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(graph_cache, "_most_bytes", lambda device: 2**20)
    for inputs in (6, 7):
        leaving(model, inputs)
    assert captures() == 2 and not recordings(model)
    assert len(recorded) == KINDS and all(each.chunks for each in recorded)


def test_a_step_without_programs_is_not_asked_each_time(model: Any, monkeypatch: Patch) -> None:
    asked = noted(monkeypatch, graph_cache, "symbolic", lambda model, key, inputs, *given: inputs)
    monkeypatch.setattr(any_batch.SymbolicStep, "specialize", lambda *given: None)
    for _ in range(2):
        leaving(model)
    assert set(Counter(asked).values()) == {KINDS} and max(asked) < 6


def test_inputs_leave_that_are_too_many_for_a_recording(model: Any, specialized: list[int], monkeypatch: Patch) -> None:
    """No programs for so many are made, and programs for fewer serve the next calls."""
    monkeypatch.setattr(symbolic_batch, "_BATCHES", ((13, 17), (11, 19)))
    monkeypatch.setattr(any_batch, "MOST", 17)
    for inputs in (24, 5):
        specialized.clear()
        leaving(model, inputs)
        assert specialized and max(specialized) <= 17, inputs


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_calls_of_other_sizes_share_a_recording(
    way: dict[str, Any], model: Any, specialized: list[int], monkeypatch: Patch
) -> None:
    """The first call is recorded for itself. What is specialized for all inputs of a call is kept."""
    monkeypatch.setattr(Ledger, "with_more_rows", lambda *given: None)
    graphs = noted(monkeypatch, graph, "new")
    for inputs in (6, 9, 9):
        leaving(model, inputs, **way)
    assert captures() == 3 and len(graphs) == 1, reasons()
    assert specialized.count(9) == 1


def test_a_step_of_its_own_is_not_asked_for_a_shared_recording(model: Any, monkeypatch: Patch) -> None:
    """That looks at the whole model, which must not be done in each step."""
    asked = noted(monkeypatch, graph_cache, "has_symbolic")
    for _ in range(2):
        asked.clear()
        leaving(model, eos_token_id=None)
    assert captures() == 2 and not asked


# ---- when they leave


def step_of(left: list[bool], monkeypatch: Patch, known: bool) -> tuple[Compaction, Any, list[int]]:
    """A compaction, a step in which these inputs go on, and after how many steps inputs have left."""
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
        ([True, True, False, False], True, None),  # too few rows
    ],
)
def test_inputs_leave_once_idle_rows_have_cost_as_much(
    left: list[bool], known: bool, expected: int | None, monkeypatch: Patch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(any_batch, "_FEW_ROWS", 16)
    made, step, moved = step_of(left, monkeypatch, known)
    for _ in range(40):
        made.after(step, 0.1)
    assert (moved[0] if moved else None) == expected


@pytest.mark.parametrize("beams", [1, 3])
def test_patches_may_be_removed_after_the_prefill(model: Any, beams: int, monkeypatch: Patch) -> None:
    """As by `disable` in another thread: the loop goes on from there, and does not prefill again."""
    given = BY_NAME["llama"].make_inputs(3, LONG)
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    with fastgen.disabled():
        expected = model.generate(**given, **options)
    left = noted(monkeypatch, Ledger, "with_more_rows", lambda *given: fastgen.disable())
    monkeypatch.setattr(Ledger, "starts_at", lambda *given: None)
    try:
        assert torch.equal(model.generate(**given, **options), expected) and left
    finally:
        fastgen.enable()
