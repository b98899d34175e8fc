"""Calls that would gain nothing from drafts, or from recording their steps, are plain calls."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import fastgen
from fastgen.decoding.speculation import draft_length
from fastgen.decoding.speculation.draft_length import Costs
from fastgen.optimizer.transformers.captured import pays
from fastgen.optimizer.transformers.loop import ENTRY_POINT as CAPTURED
from fastgen.optimizer.transformers.speculation import decoding
from fastgen.optimizer.transformers.speculation.decoding import ENTRY_POINT
from fastgen.optimizer.transformers.speculation.drafts import AssistantDraft, LookupDraft
from tests.equivalence.captured import record_from
from tests.equivalence.speculation import (
    GREEDY,
    KNOWN,
    LOOKUP,
    assert_speculates,
    counts,
    disturbed,
    not_used,
    of_its_own,
    same,
)

pytestmark = pytest.mark.usefixtures("speculates_at_once")
FEW = {"max_new_tokens": 8, "eos_token_id": None}
MORE = {"max_new_tokens": 40, "eos_token_id": None}


@pytest.mark.parametrize("seconds, speculates", [(1e-9, 1), (1e3, 4)])
def test_steps_of_plain_calls_decide(monkeypatch: pytest.MonkeyPatch, seconds: float, speculates: int) -> None:
    """If they take less time than a draft and its verify even when all is accepted, the first trial is the last."""
    monkeypatch.setattr(decoding, "seconds_of_step", lambda *_: seconds)
    monkeypatch.setattr(draft_length, "MOST_CALLS", 63)
    model, inputs = of_its_own("llama", 2)
    fastgen.enable(self_speculation="int8")
    for _ in range(4):
        same(model, inputs, MORE)
    assert counts()["accelerated"] == speculates
    if speculates < 4:
        assert not_used() == {"drafts have gained nothing in the calls before": 4 - speculates}


@pytest.mark.parametrize("draft", [LOOKUP, {}], ids=["lookup", "self-draft"])
def test_a_call_of_few_tokens_is_plain(monkeypatch: pytest.MonkeyPatch, draft: dict[str, int]) -> None:
    """A draft that is not accepted would take too much of its time. After many such calls, times are measured again."""
    monkeypatch.setattr(decoding, "MOST_CALLS", 2)
    asked = []

    def can_begin(costs: Costs, tokens: int) -> bool:
        asked.append((costs.rows, costs.plain, tokens))
        return tokens > 8

    monkeypatch.setattr(decoding, "can_begin", can_begin)
    monkeypatch.setattr(decoding, "seconds_of_step", lambda *_: 1.0)
    model, inputs = of_its_own("llama", 2)
    same(model, inputs, FEW)  # a plain step
    if not draft:
        fastgen.enable(self_speculation="int8")
    drafted = []
    for _ in range(6):
        same(model, inputs, FEW, **draft)
        drafted.append(counts()["accelerated"])
    assert drafted == [1, 1, 1, 2, 2, 2]  # of the first call, nothing was known
    assert not_used() == {"a call of so few tokens that drafts might lose time": 4}
    assert asked == [(2, 1.0, 8)] * 5
    for _ in range(2):
        same(model, inputs, {**FEW, "max_new_tokens": 9}, **draft)
    assert counts()["accelerated"] == 4


def test_calls_that_would_lose_their_step_are_not_too_short(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Without drafts, no step would be recorded yet. A streamer makes no difference."""
    monkeypatch.setattr(decoding, "can_begin", lambda *_: False)
    monkeypatch.setattr(decoding, "seconds_of_step", lambda *_: 1.0)
    model, inputs = of_its_own("llama", 1)
    for _ in range(2):
        same(model, inputs, FEW, **LOOKUP)
    assert_speculates(2)  # there is no plain step
    same(model, inputs, FEW)
    same(model, inputs, FEW, **LOOKUP)
    model.generate(**inputs, **GREEDY | FEW, **LOOKUP, streamer=transformers.TextStreamer(tokenizer))
    assert counts()["accelerated"] == 2
    fastgen.enable(captured_step="always")
    for _ in range(2):
        same(model, KNOWN["llama"].make_inputs(2), FEW, **LOOKUP)
    assert counts()["accelerated"] == 3


def test_calls_with_a_draft_know_what_a_plain_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    seconds = decoding.seconds_of_step

    def look(*arguments: object) -> float | None:
        found.append(seconds(*arguments))
        return found[-1]

    monkeypatch.setattr(decoding, "seconds_of_step", look)
    model, inputs = of_its_own("gpt2", 2)
    for draft in (LOOKUP, {}, LOOKUP):
        same(model, inputs, {}, **draft)
    assert_speculates(2)
    assert found[0] is None
    assert 0 < found[1] < 60


def test_until_a_step_with_drafts_pays_calls_have_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded after half as many tokens, whether or not calls ask for drafts."""
    monkeypatch.setattr(pays, "MANY", 1)
    record_from(monkeypatch, 80)
    monkeypatch.setattr(pays, "ASKED_FOR", 100)
    fastgen.enable(self_speculation="int8", captured_step="auto")
    (model, inputs), steps = of_its_own("llama", 2), []
    for _ in range(5):
        fastgen.reset_stats()
        same(model, inputs, MORE)
        captured, drafted = (fastgen.stats().get(name, {}) for name in (CAPTURED, ENTRY_POINT))
        steps.append((captured.get("accelerated", 0), drafted.get("accelerated", 0)))
    assert steps == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("draft", ["lookup", "assistant"])
def test_steps_of_short_calls_are_recorded_when_they_pay(monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    """Although the call asks for a draft. The step of a long call is recorded at once."""
    record_from(monkeypatch, 100)
    for kind in (LookupDraft, AssistantDraft):
        monkeypatch.setattr(kind, "recorded_at_once_from", 60)
    model, inputs = of_its_own("llama", 1)
    asked = LOOKUP if draft == "lookup" else {"assistant_model": disturbed(model, 0.0)}
    for calls, length in ((0, 24), (1, 60), (1, 24), (1, 24), (1, 24), (2, 24)):
        same(model, inputs, {"max_new_tokens": length, "eos_token_id": None}, **asked)
        assert counts()["accelerated"] == calls
    assert [*not_used()] == ["too few steps so far to pay for recording one, on the CPU"]
