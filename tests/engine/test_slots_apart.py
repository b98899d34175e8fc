"""What becomes of one request in a step with slots says nothing of the others."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.pays import Ledger
from fastgen.optimizer.transformers.captured.slots import Slots
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.engine.conftest import (
    PROMPTS,
    WAIT,
    Bans,
    Gate,
    StopsAt,
    Streamer,
    alone,
    assert_as_alone,
    both_kinds,
    check,
    coming,
    raising,
    requests_for,
    run,
)
from tests.equivalence.models import BY_NAME


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma2", "gpt-oss"])
def test_beyond_a_sliding_window(name: str, seed: int) -> None:
    """Rows of any lengths, in front of the window's end and behind it; with masks that are read, and others."""
    draw, model = random.Random(seed), BY_NAME[name].build()
    window = model.config.sliding_window
    lengths = [draw.choice([1, 5, window - 9, window - 1, window, window + 1, 2 * window + 3]) for _ in range(5)]
    prompts = [[draw.randrange(4, 150) for _ in range(length)] for length in lengths]
    kinds: list[dict[str, Any]] = [{}, {}, {"num_beams": 2}, {"repetition_penalty": 1.3}]
    requests = [
        make(model, prompt, None, {**draw.choice(kinds), "max_new_tokens": draw.choice([4, 15, 40])}, None, 4)
        for prompt in prompts
    ]
    executor = ContinuousBatches(model, draw.choice([4, 8]))
    run(executor, requests)
    assert_as_alone(model, requests, prompts)
    if name.startswith("mistral"):
        assert executor.counts["steps"] and not executor.alone


def test_no_slots_where_no_step_can_be_captured(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ContinuousBatches(llama, 8)
    assert executor.stats()["executor"] == "slots"
    monkeypatch.setattr(graph, "unavailable", lambda device: "no kernels")
    assert executor.stats()["executor"] == "static batches"
    check(executor, PROMPTS, at_once=8)
    assert executor.counts["batches"] and not executor.counts["repeated"]


def test_where_masks_are_read_those_that_are_there_count_with_what_they_may_need() -> None:
    """Neither the room that buffers have, which is rounded up and kept, nor what others needed that have left."""
    model = BY_NAME["gemma2"].build("eager")
    window = model.config.sliding_window
    long = [10 + n % 100 for n in range(window - 12)]
    executor = ContinuousBatches(model, 8)
    for prompts, new_tokens, are_alone in (
        ([PROMPTS[0]], [window - 12], 0),  # buffers are larger than the window then
        ([long], [8], 0),
        ([PROMPTS[0], PROMPTS[1]], [window - 22, 9], 0),
        ([PROMPTS[0], long, PROMPTS[1]], [20, 8, 9], 1),  # each fits alone: that says nothing of others
    ):
        before = sum(executor.alone.values())
        requests = [
            make(model, prompt, None, {"max_new_tokens": count, "eos_token_id": None}, None, 8)
            for prompt, count in zip(prompts, new_tokens, strict=True)
        ]
        run(executor, requests)
        assert_as_alone(model, requests, prompts)
        assert sum(executor.alone.values()) - before == are_alone, (prompts, new_tokens)


@pytest.mark.parametrize("count", [1, 2])
def test_long_ones_that_come_first_say_nothing_of_short_ones(count: int) -> None:
    """They are declined before they are about to enter."""
    model = BY_NAME["gemma2"].build("eager")
    long = [[10 + n % 100 for n in range(model.config.sliding_window - 3)]] * count
    executor = ContinuousBatches(model, 8)
    for prompt in (*long, *PROMPTS[:3]):
        check(executor, [prompt], max_new_tokens=4)
    assert executor.counts["steps"] and sum(executor.alone.values()) == count


def test_one_that_is_over_has_its_result_whatever_becomes_of_the_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise MemoryError("cannot allocate memory")

    executor = ContinuousBatches(llama, 16)
    with monkeypatch.context() as without_memory:
        without_memory.setattr(graph_cache, "give_back", fails)
        check(executor, PROMPTS[:1])
    check(executor, PROMPTS)
    assert not executor.busy


@pytest.mark.parametrize("fate", ["is cancelled", "is over", "begins again"])
def test_one_whose_slots_cannot_be_freed_leaves_the_others(
    llama: Any, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step may be half written: the others begin again, and have what they would have had."""
    remove, verify, failed = Slots.remove, DecodeStep.verify, list[str]()

    def fails_once(step: Slots, slot: Any) -> None:
        remove(step, slot)
        if not failed and step.taken:
            failed.append(fate)
            raise MemoryError("cannot allocate memory")

    def does_not_go_on(step: DecodeStep, *given: Any) -> None:
        if fate == "begins again" and not failed:
            raise RuntimeError("the step")
        verify(step, *given)

    monkeypatch.setattr(Slots, "remove", fails_once)
    monkeypatch.setattr(DecodeStep, "verify", does_not_go_on)
    executor, requests = ContinuousBatches(llama, 16), requests_for(llama, PROMPTS)
    left = list(requests)
    for _ in executor.steps(lambda: executor.choose(left) if left else []):
        if fate == "is cancelled" and executor.counts["steps"] == 2:
            requests[0].future.cancel()
    done = [number for number, request in enumerate(requests) if not request.future.cancelled()]
    assert_as_alone(llama, [requests[number] for number in done], [PROMPTS[number] for number in done])
    assert failed and executor.counts["repeated"] and not executor.busy


@both_kinds
@pytest.mark.parametrize("captured", [False, True])
def test_what_others_ask_for_leaves_a_request_alone(
    model: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Criteria, scores and draws of some requests are in the step of all."""
    if captured:
        monkeypatch.setattr(Ledger, "_repaid_by", lambda *asked: 0)
    dicts: dict[str, Any] = {"return_dict_in_generate": True}
    options: list[dict[str, Any]] = [
        {}, {"stopping_criteria": [StopsAt(4)]}, {"do_sample": True, "top_k": 0}, {**dicts, "output_scores": True},
        {**dicts, "output_logits": True}, {**dicts, "do_sample": True, "top_p": 0.7, "output_scores": True},
    ]  # fmt: skip
    executor, prompts, requests, most = ContinuousBatches(model, 16), PROMPTS * 4, [], 0
    prompts = prompts[: 3 * len(options)]
    for number, prompt in enumerate(prompts):
        given = {"max_new_tokens": 9 + 3 * (number % 4), "eos_token_id": None, **options[number % len(options)]}
        requests.append(make(model, prompt, None, given, number if given.get("do_sample") else None, 16))
    for _ in executor.steps(coming(executor, requests, 4)):
        most = max(most, len(executor._in_use))
    assert most == 1 and not executor.alone
    for request, prompt in zip(requests, prompts, strict=True):
        torch.manual_seed(request.seed or 0)
        found, expected = request.future.result(0), alone(model, prompt, **request.options)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected)
            continue
        assert torch.equal(found.sequences, expected.sequences)
        for name in ("scores", "logits"):
            own, others = getattr(found, name), getattr(expected, name)
            assert (own is None) == (others is None)
            if own is not None:
                torch.testing.assert_close(torch.stack(own), torch.stack(others), atol=1e-4, rtol=1e-4)


def _doubled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor whose scores are of a type that only the library's loop serves."""
    return scores.double()


@pytest.mark.usefixtures("recorded_at_once")
def test_a_step_outlives_a_first_input_that_cannot_enter(llama: Any) -> None:
    """What was captured of it serves those that come later."""
    for processor in (Bans(40), _doubled):
        check(ContinuousBatches(llama, 4), PROMPTS[:1], logits_processor=[processor], max_new_tokens=20)
        steps = [step for of in graph_cache._all() for key, step in of.steps.items() if key.slots]
        assert len(steps) == 1 and steps[0].is_captured


@pytest.mark.usefixtures("recorded_at_once")
def test_one_that_cannot_enter_leaves_the_others_its_wider_step(llama: Any) -> None:
    """It brings criteria, for which the step gets room, and goes before its first token."""
    executor, options = ContinuousBatches(llama, 8), {"max_new_tokens": 20, "eos_token_id": None}
    first, own = {"logits_processor": [Bans(40)]}, {"logits_processor": [_doubled]}
    plain = requests_for(llama, PROMPTS[:2], **first, **options)
    other = make(llama, PROMPTS[2], None, {**own, "stopping_criteria": [StopsAt(4)], **options}, None, 8)
    run(executor, [plain[0], other, plain[1]])
    assert_as_alone(llama, [*plain, other], PROMPTS[:3])
    assert list(executor.alone.values()) == [1] and not executor.counts["repeated"] and not executor.busy


@both_kinds
@pytest.mark.parametrize("beams", [1, 2])
def test_a_processor_that_writes_into_the_logits_that_are_returned(model: Any, beams: int) -> None:
    """It does in the library, where it gets the same tensor; with beams it gets another one."""
    executor, options = ContinuousBatches(model, 8), {"num_beams": beams, "output_logits": True}
    requests = requests_for(model, PROMPTS[:2], return_dict_in_generate=True, logits_processor=[Bans(40)], **options)
    run(executor, requests)
    assert executor.counts["busy_row_steps"] and not executor.alone
    for request, prompt in zip(requests, PROMPTS, strict=False):
        with fastgen.disabled():
            expected = alone(model, prompt, **request.options)
        torch.testing.assert_close(request.future.result(0).logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_one_that_asks_for_hidden_states_leaves_the_others(llama: Any) -> None:
    """The library puts hooks on the model then, and a step of those that are there is the same with them."""
    returned: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    options: list[dict[str, Any]] = [{"stopping_criteria": [StopsAt(99)]}, returned, {}]
    requests = [make(llama, PROMPTS[0], None, {"max_new_tokens": 20, **each}, None, 16) for each in options]
    executor = ContinuousBatches(llama, 16)
    run(executor, requests)
    assert requests[1].future.result(0).hidden_states and any(part._forward_hooks for part in llama.modules())
    assert_as_alone(llama, requests[::2], [PROMPTS[0]] * 2)
    assert not executor.counts["repeated"]


@both_kinds
@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_one_that_raises_leaves_the_others(model: Any, error: type[BaseException]) -> None:
    executor, options = ContinuousBatches(model, 16), {"num_beams": 2, "max_new_tokens": 20}
    plain = requests_for(model, PROMPTS, **options)
    failing = requests_for(model, PROMPTS[:2], logits_processor=[raising(error("of the user's"), every=7)], **options)
    run(executor, [plain[0], *failing, *plain[1:]], at_once=8)
    assert_as_alone(model, plain, PROMPTS)
    assert all(isinstance(request.future.exception(0), error) for request in failing)
    assert not executor.counts["repeated"] and not executor.busy


def test_one_without_anything_to_draw_from_leaves_the_others(llama: Any) -> None:
    """The model makes NaN of a token. Others, whose tokens have been seen, are in the same step."""
    token, options = 45, {"do_sample": True, "max_new_tokens": 20, "suppress_tokens": [45]}
    with torch.no_grad():
        llama.get_input_embeddings().weight[token] = torch.nan
    executor = ContinuousBatches(llama, 16)
    plain = [requests_for(llama, [prompt], streamer=Streamer(), **options)[0] for prompt in PROMPTS]
    hears = Streamer()
    (spoilt,) = requests_for(llama, [[5, token, 6]], streamer=hears, **options)
    (greedy,) = requests_for(llama, [[5, token, 6]], **{**options, "do_sample": False})  # it has a largest score
    run(executor, [*plain[:2], spoilt, *plain[2:4], greedy, *plain[4:]], at_once=2)
    for each in plain:
        each.options["streamer"] = None
    assert_as_alone(llama, [*plain, greedy], [*PROMPTS, [5, token, 6]])
    assert len(hears.heard) <= 1, "its prompt, and no token"
    assert "not numbers" in str(spoilt.future.exception(0))
    assert not executor.counts["repeated"] and not executor.busy


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_one_without_numbers_that_comes_first_says_nothing_of_others(options: dict[str, Any]) -> None:
    """The encoder makes NaN of a token, and what shows that its output is not read would be NaN, too."""
    bart, token = copy.deepcopy(BY_NAME["bart"].build()), 45
    encoder = bart.get_encoder()
    encoder.embed_tokens = copy.deepcopy(encoder.embed_tokens)
    with torch.no_grad():
        encoder.embed_tokens.weight[token] = torch.nan
    prompts = [[5, token, 6], *PROMPTS[:3]]
    executor, (spoilt, *others) = ContinuousBatches(bart, 8), requests_for(bart, prompts, **options)
    run(executor, [spoilt])
    assert not executor.counts["steps"]
    if options.get("do_sample"):
        assert spoilt.future.exception(0) is not None
    else:
        assert_as_alone(bart, [spoilt], prompts[:1])
    for request in others:
        run(executor, [request])
    assert_as_alone(bart, others, prompts[1:])
    assert executor.counts["steps"] and sum(executor.alone.values()) == 1, "only one of them has no slots"


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_a_model_that_reads_the_encoders_output_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    bart = copy.deepcopy(BY_NAME["bart"].build())
    forward = type(bart).forward

    def reading(self: Any, *args: Any, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        outputs = forward(self, *args, encoder_outputs=encoder_outputs, **kwargs)
        outputs.logits = outputs.logits + encoder_outputs[0].mean((1, 2))[:, None, None]
        return outputs

    reading.__module__ = forward.__module__  # which makes it BART's
    monkeypatch.setattr(type(bart), "forward", reading)
    executor = ContinuousBatches(bart, 8)
    check(executor, PROMPTS[:3])
    assert not executor.counts["steps"]


@pytest.mark.parametrize("spoil", [lambda found: found * torch.nan, lambda found: found[:, 1:]], ids=["nan", "size"])
def test_a_processor_whose_scores_are_none_leaves_the_others(llama: Any, spoil: Any) -> None:
    def spoils(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return spoil(scores) if input_ids.shape[1] % 9 == 0 else scores

    options = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None}
    executor = ContinuousBatches(llama, 16)
    plain = requests_for(llama, PROMPTS, logits_processor=[Bans(40)], **options)
    failing = requests_for(llama, PROMPTS[:2], logits_processor=[spoils], **options)
    run(executor, [plain[0], *failing, *plain[1:]], at_once=8)
    assert_as_alone(llama, plain, PROMPTS)
    assert all(isinstance(request.future.exception(0), (ValueError, RuntimeError)) for request in failing)
    assert not executor.counts["repeated"] and not executor.busy


def test_a_cancelled_one_gives_its_slots_to_others(llama: Any, gate: Gate) -> None:
    with fastgen.Engine(llama, slots=2) as engine:
        first = engine.submit(PROMPTS[0], logits_processor=[gate], max_new_tokens=400, eos_token_id=None)
        assert gate.has_come.wait(WAIT)
        second = engine.submit(PROMPTS[1], max_new_tokens=400, eos_token_id=None)
        third = engine.submit(PROMPTS[2])
        assert second.cancel()
        gate.may_go.set()
        assert torch.equal(third.result(WAIT), alone(llama, PROMPTS[2]))
        first.cancel()
        engine.close()
        assert engine.stats()["busy"] == 0 and engine.stats()["steps"] < 400


@pytest.mark.usefixtures("recorded_at_once")
def test_a_wider_step_that_cannot_be_recorded_says_nothing_of_others(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on to run in slots: from then on each kind in a step of its own."""
    verify = DecodeStep.verify

    def fails(step: DecodeStep, model: Any, turns: Any, captures: bool = True) -> None:
        if step.key.samples and len(step.key.processors or ()) > 2:
            raise CannotBeCaptured("a penalty beside draws")
        verify(step, model, turns, captures)

    monkeypatch.setattr(DecodeStep, "verify", fails)
    executor, prompts = ContinuousBatches(llama, 8), [each for each in PROMPTS for _ in range(2)]
    both: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"do_sample": True}]
    requests = [
        each
        for number, prompt in enumerate(prompts)
        for each in requests_for(llama, [prompt], max_new_tokens=8, **both[number % 2])
    ]
    run(executor, requests, at_once=2)
    assert_as_alone(llama, requests, prompts)
    assert executor.counts["repeated"] <= 2 and sum(executor.alone.values()) <= 2


@both_kinds
def test_code_that_generates_itself(model: Any) -> None:
    """A call inside of one that enters is a call as ever, also with the first token."""
    wanted = [alone(model, prompt, num_beams=2) for prompt in PROMPTS[:2]]

    class Generates:
        def __init__(self) -> None:
            self.found: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(self.found) < 3:
                self.found.append(alone(model, PROMPTS[1], num_beams=2))
            return scores

    asks = Generates()
    executor = ContinuousBatches(model, 8)
    requests = requests_for(model, PROMPTS[:1], num_beams=2, max_new_tokens=12, logits_processor=[asks])
    run(executor, requests)
    assert torch.equal(requests[0].future.result(0), alone(model, PROMPTS[0], num_beams=2, max_new_tokens=12))
    assert len(asks.found) == 3 and all(torch.equal(each, wanted[1]) for each in asks.found)
    assert not executor.busy


def test_a_streamer_that_fails_at_the_end(llama: Any) -> None:
    class Fails(Streamer):
        def end(self) -> None:
            raise LookupError("of the user's")

    executor = ContinuousBatches(llama, 8)
    (failing,) = requests_for(llama, PROMPTS[:1], streamer=Fails())
    plain = requests_for(llama, PROMPTS, max_new_tokens=30)
    run(executor, [failing, *plain], at_once=8)
    assert_as_alone(llama, plain, PROMPTS)
    assert isinstance(failing.future.exception(0), LookupError) and not executor.counts["repeated"]
