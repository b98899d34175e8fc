"""Requests for which the engine looks tokens up: free rows verify them, and what comes is what comes without."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastgen
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.optimizer.transformers.captured import any_batch, graph_cache
from fastgen.optimizer.transformers.captured.forms import FormProcessor
from fastgen.optimizer.transformers.captured.slot import MOST_ROWS
from fastgen.optimizer.transformers.captured.slots import Slots
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.conftest import ROOT
from tests.engine import conftest
from tests.engine.conftest import PROMPTS, StopsAt, Streamer, alone, assert_as_alone, both_kinds, coming, run
from tests.equivalence.models import BY_NAME
from tests.equivalence.others import KNOWN

REPEATING = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7], [20, 21, 22] * 6, [7] * 9, [40], *PROMPTS[3:5]]
MODELS = """
    llama gpt2 opt bloom gpt-neox mistral-short-window mistral-long-window qwen3 mixtral bart t5 marian deepseek-v3
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.2, "min_new_tokens": 9},
    "n-grams": {"no_repeat_ngram_size": 4},
    "drawn": {"do_sample": True, "temperature": 0.5, "top_k": 6},
    "drawn by share": {"do_sample": True, "temperature": 0.3, "top_p": 0.8, "repetition_penalty": 0.8},
}


@pytest.fixture(autouse=True)
def captures_at_once(enabled: None) -> None:
    fastgen.enable(captured_step="always")


def requests_for(model: Any, prompts: list[Any], **options: Any) -> list[Request]:
    return conftest.requests_for(model, prompts, 32, **{"max_new_tokens": 40, **options})


def drafts_as_alone(model: Any, prompts: list[Any], at_once: int = 1, **options: Any) -> ContinuousBatches:
    """Runs requests with drafts, and asserts that each gets what a call of its own gives."""
    executor, requests = ContinuousBatches(model, 32, lookup=6), requests_for(model, prompts, **options)
    run(executor, requests, at_once)
    assert_as_alone(model, requests, prompts)
    return executor


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", MODELS.split())
def test_tokens_are_those_without_drafts(name: str, options: dict[str, Any]) -> None:
    model = KNOWN[name].build()
    executor = drafts_as_alone(model, REPEATING, at_once=2, **options)
    assert (graph_cache._models[model].shares_kv is False) is (name == "bloom")
    assert not executor.alone or name == "bloom"
    assert executor.counts["drafted_tokens"] > 0 or name not in ("llama", "bart", "gpt2") or options


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_steps_are_saved(name: str) -> None:
    model = BY_NAME[name].build()
    executor, plain = ContinuousBatches(model, 32, lookup=6), ContinuousBatches(model, 32)
    for each in (executor, plain):
        run(each, requests_for(model, [[5, 6, 7] * 5]))
    saved = plain.counts["steps"] - executor.counts["steps"]
    assert 0 < saved == executor.counts["accepted_tokens"] <= executor.counts["drafted_tokens"]
    assert executor.counts["row_steps"] <= executor.counts["steps"] * MOST_ROWS


def test_the_option_of_a_request_and_that_of_the_engine(llama: Any) -> None:
    prompt = [5, 6, 7] * 5
    expected = alone(llama, prompt, max_new_tokens=40)
    for of_engine, asked, is_drafted in [(0, 5, True), (5, 0, False), (5, None, True), (0, None, False)]:
        executor = ContinuousBatches(llama, 32, lookup=of_engine)
        options = {} if asked is None else {"prompt_lookup_num_tokens": asked}
        requests = requests_for(llama, [prompt], **options)
        run(executor, requests)
        assert (executor.counts["drafted_tokens"] > 0) is is_drafted
        assert executor.counts["steps"] and torch.equal(requests[0].future.result(0), expected)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_no_more_tokens_than_there_may_be(llama: Any, new_tokens: int) -> None:
    drafts_as_alone(llama, REPEATING, at_once=8, max_new_tokens=new_tokens)


def test_a_token_that_ends_a_sequence(llama: Any) -> None:
    """Each token that comes ends a sequence once: what was drafted behind it counts for nothing."""
    prompt = [5, 6, 7] * 5
    (whole,) = requests_for(llama, [prompt])
    run(ContinuousBatches(llama, 32), [whole])
    for end in sorted(set(whole.future.result(0)[0, len(prompt) :].tolist())):
        drafts_as_alone(llama, [prompt], eos_token_id=end, pad_token_id=0)


def test_streams_get_each_token_once(llama: Any) -> None:
    executor, streamers = ContinuousBatches(llama, 32, lookup=6), [Streamer() for _ in REPEATING]
    given = zip(REPEATING, streamers, strict=True)
    requests = [make(llama, each, None, {"max_new_tokens": 40, "streamer": to}, None, 32) for each, to in given]
    run(executor, requests, at_once=3)
    assert executor.counts["accepted_tokens"] > 0
    for request, streamer in zip(requests, streamers, strict=True):
        prompt, *tokens = streamer.heard
        assert streamer.is_over and all(len(each) == 1 for each in tokens)
        assert [*prompt, *(token for each in tokens for token in each)] == request.future.result(0)[0].tolist()


class _Adds:
    """A processor of the user's, who must see no token that does not come."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        return scores + 0.5 * (torch.arange(scores.shape[1]) % 7 == 0)


def test_code_of_the_users_sees_its_own_tokens_alone(llama: Any) -> None:
    """Nothing is drafted for it, but for others beside it."""
    executor, adds = ContinuousBatches(llama, 32, lookup=6), _Adds()
    requests = requests_for(llama, REPEATING)
    scored = make(llama, REPEATING[0], None, {"max_new_tokens": 9, "output_scores": True,
                                              "return_dict_in_generate": True}, None, 32)  # fmt: skip
    own = make(llama, REPEATING[0], None, {"max_new_tokens": 30, "logits_processor": [adds]}, None, 32)
    run(executor, [*requests[:2], own, scored, *requests[2:]], at_once=8)
    assert_as_alone(llama, requests, REPEATING)
    assert executor.counts["accepted_tokens"] > 0
    result = own.future.result(0)[0].tolist()
    assert torch.equal(own.future.result(0), type(llama).generate(llama, torch.tensor([REPEATING[0]]), **own.options))
    seen = adds.seen[: len(adds.seen) // 2]  # the rest is the call of its own
    assert seen == [result[:length] for length in range(len(REPEATING[0]), len(result))]
    found = scored.future.result(0)
    assert len(found.scores) == found.sequences.shape[1] - len(REPEATING[0])


def test_code_of_the_users_sees_what_is_drafted_with_the_option(llama: Any) -> None:
    """The library has a processor process what is drafted, too: one that counts its calls gives other tokens then."""
    adds, own = _Adds(), _Adds()
    options = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 5}
    request = make(llama, REPEATING[1], None, {**options, "logits_processor": [adds]}, None, 32)
    run(ContinuousBatches(llama, 32, lookup=6), [request])
    with fastgen.disabled():
        expected = alone(llama, REPEATING[1], **options, logits_processor=[own])
    assert torch.equal(request.future.result(0), expected)
    assert adds.seen == own.seen and len(own.seen) > 20


def test_full_slots_verify_nothing(llama: Any) -> None:
    executor = ContinuousBatches(llama, 4, lookup=6)
    requests = requests_for(llama, [[5, 6, 7] * 5] * 4)
    run(executor, requests, at_once=4)
    assert executor.counts["drafted_tokens"] == 0
    assert_as_alone(llama, requests, [[5, 6, 7] * 5] * 4)


@pytest.fixture
def eager() -> Any:
    """A model whose attention cannot share what is stored."""
    model = BY_NAME["llama"].build()
    return type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()


def test_a_model_whose_attention_cannot_share(eager: Any) -> None:
    """The request that finds it out runs all the same, and those behind it are in slots, without drafts."""
    executor = drafts_as_alone(eager, REPEATING)
    assert executor.counts["steps"] > 0 and executor.counts["drafted_tokens"] == 0
    assert sum(executor.alone.values()) <= 1


@both_kinds
def test_a_budget_holds(model: Any) -> None:
    """A step may store all of a draft that is right."""
    probe, prompts = ContinuousBatches(model, 32, lookup=15), [[5, 6, 7] * 3, [9, 8] * 4, *REPEATING] * 2
    run(probe, requests_for(model, prompts), at_once=8)
    for part in (0.4, 0.5, 0.6):
        most = int(probe.stats()["kv_bytes"] * part)
        executor, requests = ContinuousBatches(model, 32, cache_bytes=most, lookup=15), requests_for(model, prompts)
        run(executor, requests, at_once=8)
        assert_as_alone(model, requests, prompts)
        assert executor.counts["preempted"]
        assert executor.stats()["kv_bytes"] <= most and executor.counts["accepted_tokens"] > 0


def test_no_request_leaves_for_want_of_room_for_drafts(llama: Any) -> None:
    """Where room is short, fewer drafts are verified, and as many requests share a step as without."""
    prompts = REPEATING * 2
    probe, options = ContinuousBatches(llama, 32), {"max_new_tokens": 30, "min_new_tokens": 30}
    run(probe, requests_for(llama, prompts, **options), at_once=4)
    preempted = []
    for lookup in (0, 15):
        executor = ContinuousBatches(llama, 32, cache_bytes=int(probe.stats()["kv_bytes"] * 0.4), lookup=lookup)
        steps = executor.steps(coming(executor, requests_for(llama, prompts, **options), 4))
        assert all(executor.counts["preempted"] < 100 for _ in steps)
        preempted.append(executor.counts["preempted"])
    assert preempted[1] <= preempted[0] + len(prompts)


def test_what_there_is_nothing_to_draw_for_fails_alone(llama: Any) -> None:
    """Scores become NaN behind the prompt of one request: also where a free row finds it out."""
    drawn = {"do_sample": True, "temperature": 0.2, "top_k": 3}
    executor = ContinuousBatches(llama, 32, lookup=6)
    bad = make(llama, REPEATING[1], None, {"max_new_tokens": 30, **drawn, "repetition_penalty": 1e-40}, 3, 32)
    good = make(llama, REPEATING[0], None, {"max_new_tokens": 30, **drawn}, 3, 32)
    run(executor, [bad, good], at_once=2)
    assert_as_alone(llama, [good], [REPEATING[0]])
    with pytest.raises(ValueError, match="not numbers"):
        bad.future.result(0)


SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Moses", "Aaron"]}, "years": {"type": "integer"}, "what": {"type": "string"}},
    "required": ["who", "years", "what"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}], ids=str)
def test_forms(options: dict[str, Any]) -> None:
    """What a form forces is drafted, too."""
    folder = ROOT / "examples" / "models" / "kjv-gpt2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    grammar = fastgen.Grammar(tokenizer, json_schema=SCHEMA)
    texts = ["and he said unto him what is", "the king", "moses moses moses moses"]
    results = []
    for lookup in (0, 8):
        executor = ContinuousBatches(model, 32, lookup=lookup)
        requests = [
            make(model, tokenizer(text).input_ids, None,
                 {"max_new_tokens": 70, "num_beams": 1, "do_sample": False,
                  "logits_processor": [grammar.processor()], **options}, 5, 32)
            for text in texts
        ]  # fmt: skip
        requests.insert(
            1, make(model, tokenizer(texts[2]).input_ids, None, {"max_new_tokens": 40, "num_beams": 1}, None, 32)
        )
        run(executor, requests, at_once=2)
        results.append([request.future.result(0).tolist() for request in requests])
    assert results[0] == results[1]
    assert executor.counts["accepted_tokens"] > 0
    text = tokenizer.decode(results[1][0][0][len(tokenizer(texts[0]).input_ids) :], skip_special_tokens=True)
    if text.endswith("}"):
        assert json.loads(text).keys() == SCHEMA["properties"].keys()


def test_requests_that_are_cancelled_beside_others(llama: Any) -> None:
    executor = ContinuousBatches(llama, 32, lookup=6)
    requests = requests_for(llama, REPEATING * 2, max_new_tokens=60, min_new_tokens=60)
    for _ in executor.steps(coming(executor, requests, 2)):
        if executor.counts["steps"] > 2:
            requests[1].future.cancel()
    kept = [at for at in range(len(requests)) if at != 1]
    assert_as_alone(llama, [requests[at] for at in kept], [(REPEATING * 2)[at] for at in kept])
    assert requests[1].future.cancelled(), (executor.counts, executor.alone)


def test_nothing_of_a_draft_is_left_in_a_step(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have verified read and write what is their own again: others may take their places."""
    advance, looked = Slots.advance, []

    def looking(slots: Slots, most: int | None) -> Any:
        over = advance(slots, most)
        step = slots._step
        assert step is not None
        free = [place for place in range(step.key.batch) if place not in slots.taken]
        assert step.buffers.position.row_map.tolist() == list(range(step.key.rows))
        assert not step.search.unfinished.flatten()[free].any()
        looked.append(len(free))
        return over

    monkeypatch.setattr(Slots, "advance", looking)
    executor = ContinuousBatches(llama, 32, lookup=6)
    run(executor, requests_for(llama, REPEATING), at_once=2)
    assert looked and executor.counts["drafted_tokens"] > 0


def test_a_step_with_drafts_that_cannot_be_recorded(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of one without: requests that come later are in slots."""
    verify, specialize = DecodeStep.verify, any_batch.specialize

    def refusing(step: DecodeStep, *given: Any) -> None:
        if step.key.maps_rows:
            raise CannotBeCaptured("a recording")
        verify(step, *given)

    def specializing(model: Any, step: DecodeStep, inputs: int | None = None) -> bool:
        return not step.key.maps_rows and specialize(model, step, inputs)

    monkeypatch.setattr(DecodeStep, "verify", refusing)
    monkeypatch.setattr(any_batch, "specialize", specializing)
    executor = ContinuousBatches(llama, 32, lookup=6)
    for count in (1, len(REPEATING)):
        requests = requests_for(llama, REPEATING[:count])
        run(executor, requests)
        assert_as_alone(llama, requests, REPEATING[:count])
    assert executor.counts["steps"] > 0 and graph_cache._models[llama].shares_kv is False


class _Form:
    """One that cannot be followed behind the token 9."""

    def behind(self, token: int) -> _Form:
        if token == 9:
            raise ValueError("too complex")
        return self

    def allows(self, token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []

    def blocked(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bool)


def test_a_form_that_cannot_be_followed_behind_a_draft() -> None:
    """The sequence may never come there: the draft ends, and not the request."""
    processor, tokens = FormProcessor(_Form()), torch.tensor([3, 4])
    processor.blocked(tokens.unsqueeze(0), 12)
    assert len(processor.drafted(tokens, [5, 9, 6])) == 1


def test_what_tokens_are_drawn_with_has_a_type_of_its_own(llama: Any) -> None:
    """While another thread loads a model, torch's default type is that model's."""
    found, options = [], {"do_sample": True, "temperature": 0.5}
    for default in (torch.float32, torch.bfloat16):
        requests = requests_for(llama, REPEATING, **options)
        torch.set_default_dtype(default)
        try:
            run(ContinuousBatches(llama, 32, lookup=6), requests, at_once=2)
        finally:
            torch.set_default_dtype(torch.float32)
        graph_cache.drop_all()
        found.append(torch.cat([request.future.result(0)[0] for request in requests]))
    assert torch.equal(*found)


def test_a_model_whose_attention_cannot_share_beside_code_of_the_users(eager: Any) -> None:
    """The request that finds it out ends none that must not begin again."""
    executor, options = ContinuousBatches(eager, 32, lookup=6), {"max_new_tokens": 40, "eos_token_id": None}
    own = make(eager, REPEATING[0], None, {**options, "stopping_criteria": [StopsAt(99)]}, None, 32)
    requests = requests_for(eager, REPEATING[1:4], eos_token_id=None)
    run(executor, [own, *requests])
    assert_as_alone(eager, [own, *requests], REPEATING[:4])
    assert not executor.counts["repeated"] and graph_cache._models[eager].shares_kv is False
