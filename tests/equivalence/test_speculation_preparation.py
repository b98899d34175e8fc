"""Plain calls prepare what drafts need little by little, with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import memory
from fastgen.decoding import derived_weights
from fastgen.decoding.speculation import draft_length
from fastgen.decoding.speculation.draft_sources import DraftWeights
from fastgen.optimizer.transformers.call import LINEAR_LAYERS
from fastgen.optimizer.transformers.captured import graph_cache, pays
from fastgen.optimizer.transformers.loop import ENTRY_POINT as CAPTURED
from fastgen.optimizer.transformers.speculation.drafts import SelfDraft
from tests.equivalence.captured import record_from
from tests.equivalence.models import LONG, SHORT
from tests.equivalence.speculation import GREEDY, KNOWN, counts, not_used, of_its_own, same

OPTIONS: dict[str, Any] = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None}


@pytest.fixture(autouse=True)
def prepared(speculates_at_once: None, any_lengths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps are recorded in the third call of 40 tokens; from the fifth on, each call prepares one thing."""
    monkeypatch.setattr(pays, "MANY", 1)
    record_from(monkeypatch, 80)
    monkeypatch.setattr(pays, "ASKED_FOR", 100)
    monkeypatch.setattr(SelfDraft, "is_prepared", True)
    monkeypatch.setattr(pays, "SHARE", 1e9)
    monkeypatch.setattr(draft_length, "LEAST_GAIN", -1e9)
    fastgen.enable(self_speculation="int8", captured_step="auto")


def parts(model: Any) -> set[int]:
    """The recorded parts of the step with drafts."""
    steps = [step for step in graph_cache._models[model].steps.values() if step.drafting is not None]
    return {number for step in steps for number, part in step.parts.by_number.items() if part.is_captured}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_each_call_makes_one_thing(name: str) -> None:
    (model, _), found, drafts = of_its_own(name), [], []
    for call in range(10):
        fastgen.reset_stats()
        same(model, KNOWN[name].make_inputs(2, (LONG, SHORT)[call % 2] if name == "llama" else LONG), OPTIONS)
        found.append(parts(model) if model in graph_cache._models else set())
        drafts.append(counts()["accelerated"])
        assert fastgen.stats().get(CAPTURED, {}).get("accelerated", 0) == (call > 1)
    added = [sorted(after - before) for before, after in zip([set(), *found], found, strict=False)]
    # The sixth copies the weights.
    assert added == [[]] * 4 + [[4], [], [0], [1], [8], [2]]
    assert drafts == [0] * 7 + [1] * 3
    assert counts()["accepted"] > 0


def test_samples_are_those_of_plain_calls_meanwhile() -> None:
    """Draws of a recording do not advance the random state."""
    model, inputs = of_its_own("llama", 2)
    options = {**OPTIONS, "do_sample": True}

    def run(setting: str) -> Any:
        fastgen.enable(self_speculation=setting)
        torch.manual_seed(5)
        return model.generate(**inputs, **options).tolist()

    for _ in range(4):
        run("int8")
    wanted = run("off")
    for _ in range(3):
        assert run("int8") == wanted
    assert parts(model) == {0, 4}


def test_weights_are_not_copied_if_a_verify_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_length, "LEAST_GAIN", 1.0)
    monkeypatch.setattr(draft_length, "MOST_CALLS", 3)
    model, inputs = of_its_own("llama", 2)
    for _ in range(9):
        same(model, inputs, OPTIONS)
    weights = DraftWeights.of(model, LINEAR_LAYERS, "int8", 64)
    assert parts(model) == {4} and not weights._overrides
    assert not_used()["drafts would gain nothing"] == 2
    assert not_used()["drafts have gained nothing in the calls before"] == 3


def test_calls_of_a_few_tokens_are_plain() -> None:
    """They are too short to say what a step takes."""
    model, inputs = of_its_own("llama", 2)
    for _ in range(25):
        same(model, inputs, {**OPTIONS, "max_new_tokens": 9})
    assert fastgen.stats()[CAPTURED]["accelerated"] > 10
    assert counts()["accelerated"] == 0 and not parts(model)
    assert "what drafts need is made little by little, in calls without them" in not_used()


@pytest.mark.parametrize("captured_step, drafted", [("always", 1), ("auto", 0)])
def test_the_first_call_drafts_if_steps_are_always_recorded(captured_step: Any, drafted: int) -> None:
    fastgen.enable(captured_step=captured_step)
    same(*of_its_own("llama", 2), OPTIONS)
    assert counts()["accelerated"] == drafted


def test_there_is_too_little_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is a plain one, and nothing is allocated."""
    derived_weights.drop_all()  # copies for other models would be evicted for it
    monkeypatch.setattr(memory, "free_host_memory", lambda: 1000)
    fastgen.enable(captured_step="always")
    same(*of_its_own("llama", 2), OPTIONS)
    assert counts()["accelerated"] == 0
    assert not_used() == {"too little memory is free for low-bit copies of the weights": 1}
