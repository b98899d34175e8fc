"""A model that changes between requests or while they run, and another thread that has the turn for captured steps."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from fastgen import settings
from fastgen.decoding import layers
from fastgen.decoding.captured import graph
from fastgen.engine import continuous
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers.captured import slots
from tests.engine.conftest import (
    PROMPTS,
    WAIT,
    Gate,
    Streamer,
    alone,
    assert_as_alone,
    requests_for,
    run,
    run_with_a_change,
)
from tests.equivalence.models import BY_NAME, FIRST_WORD, VOCABULARY

LONG = [FIRST_WORD + 37 * n % (VOCABULARY - FIRST_WORD) for n in range(80)]


def _writes(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.2)


def _writes_one_row(model: Any) -> None:
    model.get_input_embeddings().weight.data[LONG[3]] += 1


def _writes_to_what_is_frozen(model: Any) -> None:
    model.get_input_embeddings().weight.mul_(1.4)


def _hooks(model: Any) -> None:
    linear = next(each for each in model.modules() if isinstance(each, torch.nn.Linear))
    linear.register_forward_hook(lambda module, given, result: 1.5 * result)


def _sets(model: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(module, name):
                setattr(module, name, 0.5)


def _writes_to_a_buffer(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1.5)


CHANGES = [_writes, _writes_one_row, _writes_to_what_is_frozen, _hooks, _sets, _writes_to_a_buffer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_what_prompts_share_is_of_the_model_as_it_is(name: str, change: Callable[[Any], None]) -> None:
    """Beginnings of prompts and encoded sources are read again behind a change."""
    model = copy.deepcopy(BY_NAME[name].build()).requires_grad_(False)
    executor = ContinuousBatches(model, 8)
    prompts = [[*LONG, n] for n in range(10, 13)] if name == "llama" else [LONG, LONG, LONG]
    for _ in range(2):
        requests = requests_for(model, prompts)
        run(executor, requests)
        with fastgen.disabled():
            assert_as_alone(model, requests, prompts)
        change(model)
    assert executor.prefills.shared_positions or executor.prefills.shared_sources


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_slots_never_multiply_with_a_stale_low_bit_copy(
    name: str, monkeypatch: pytest.MonkeyPatch, recorded_at_once: None
) -> None:
    """The recording for any number of inputs is of the copies, which captured steps no longer look at."""
    if choose.missing("int8"):
        pytest.skip(choose.missing("int8") or "")
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    fastgen.enable(weight_dtype="int8", packed_weights="keep")
    fastgen.reset_stats()
    model = copy.deepcopy(BY_NAME[name].build())
    executor = ContinuousBatches(model, 8)
    try:
        for _ in range(3):
            requests = requests_for(model, PROMPTS)
            run(executor, requests)
            with settings.changed(captured_step="never", packed_weights="call"):
                assert_as_alone(model, requests, PROMPTS)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(-1.3)
        assert fastgen.stats()["int8 weights"]["accelerated"] and executor.counts["steps"]
    finally:
        fastgen.enable(weight_dtype="fp32", packed_weights="call")


def test_a_request_behind_a_change_does_not_fail(llama: Any) -> None:
    """What is in slots begins again. One that comes runs on the model as it is, though code of the user's sees it."""
    executor, streamer = ContinuousBatches(llama, 8), Streamer()
    first = make(llama, [5, 6, 7], None, {"max_new_tokens": 60, "eos_token_id": None}, None, 8)
    later = make(llama, [8, 9], None, {"max_new_tokens": 20, "eos_token_id": None, "streamer": streamer}, None, 8)
    waiting = [first]

    def more() -> list[Any]:
        if executor.counts["steps"] == 3 and not later.future.begun:
            _sets(llama)
            waiting.append(later)
        return executor.choose(waiting) if waiting else []

    for _ in executor.steps(more):
        pass
    heard = [token for each in streamer.heard for token in each]
    assert heard == later.future.result(0)[0].tolist() and streamer.is_over
    later.options["streamer"] = None
    assert_as_alone(llama, [first, later], [[5, 6, 7], [8, 9]])
    assert executor.counts["repeated"] == 1


def test_two_engines_that_draw() -> None:
    """Calls of their own draw from torch's generator, which is one for all threads."""
    model, prompts = BY_NAME["gemma2"].build(), [[5 + n, 6, 7] for n in range(6)]
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 25, "eos_token_id": None}
    fastgen.disable()
    with fastgen.Engine(model) as one, fastgen.Engine(model) as other:
        futures = [[each.submit(p, seed=n, **options) for n, p in enumerate(prompts)] for each in (one, other)]
        results = [[future.result(WAIT) for future in each] for each in futures]
        for number, prompt in enumerate(prompts):
            torch.manual_seed(number)
            expected = model.generate(torch.tensor([prompt]), **options)
            assert all(torch.equal(expected, each[number]) for each in results)


# ---- requests that cannot go on in slots

FOR_LONG: dict[str, Any] = {"max_new_tokens": 400, "eos_token_id": None}
LATER: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None}


def test_weights_that_change_while_requests_are_in_slots(llama: Any) -> None:
    """All of them begin again, of every kind: none is a mixture."""
    kinds: list[dict[str, Any]] = [
        {"num_beams": 1 + number % 2, "max_new_tokens": 12} for number in range(len(PROMPTS))
    ]
    executor = ContinuousBatches(llama, 16)
    requests = [make(llama, prompt, None, kind, None, 16) for prompt, kind in zip(PROMPTS, kinds, strict=True)]

    @torch.no_grad()
    def negate() -> None:
        llama.get_output_embeddings().weight.mul_(-1.0)

    run_with_a_change(executor, requests, 6, negate)
    assert executor.counts["repeated"]
    for request, prompt, kind in zip(requests, PROMPTS, kinds, strict=True):
        assert torch.equal(request.future.result(0), alone(llama, prompt, **kind))


def test_an_adapter_that_changes_while_requests_are_in_slots() -> None:
    """It is as another model: no request is a mixture of both, and one that somebody has looked at fails."""
    peft = pytest.importorskip("peft", reason="peft is not there")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, inference_mode=True)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(BY_NAME["llama"].build()), config)
    adapted.add_adapter("other", config)
    model = adapted.eval().get_base_model()
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for change in (
        lambda layer: layer.set_adapter("other", inference_mode=True),
        lambda layer: setattr(layer, "_disable_adapters", True),
        lambda layer: layer.scaling.update(dict.fromkeys(layer.scaling, 9.0)),
    ):
        executor, before = ContinuousBatches(model, 8), alone(model, PROMPTS[0], **LATER)
        users = {"streamer": Streamer()}
        request, seen = [make(model, PROMPTS[0], None, LATER | more, None, 8) for more in ({}, users)]
        run_with_a_change(executor, [request, seen], 6, lambda change=change: [change(layer) for layer in layers])
        after = alone(model, PROMPTS[0], **LATER)
        assert not torch.equal(before, after)
        assert torch.equal(request.future.result(0), after)
        assert "adapters" in str(seen.future.exception(0))
        for layer in layers:
            layer.set_adapter("default", inference_mode=True)
            layer._disable_adapters = False


def test_two_engines_take_turns(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose requests take long lets the other one go on, although its own turn would be far from over."""
    monkeypatch.setattr(continuous, "_TURN", 3600.0)
    monkeypatch.setattr(continuous, "_SHARED_TURN", 0.0)
    short: list[Any] = []

    class Waits:
        """Until the other engine waits for its turn, and later sees whether that has had it."""

        has_come, others_are_over = threading.Event(), False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.has_come.set()
            while not (short and (graph.is_wanted(llama.device) or short[0].done())):
                time.sleep(0.001)
            self.others_are_over = short[0].done()
            return scores

    waits = Waits()
    with fastgen.Engine(llama) as engine, fastgen.Engine(llama) as other:
        long = engine.submit(PROMPTS[0], logits_processor=[waits], max_new_tokens=300, eos_token_id=None)
        assert waits.has_come.wait(WAIT)
        short.append(other.submit(PROMPTS[1], max_new_tokens=5, eos_token_id=None))
        expected = alone(llama, PROMPTS[1], max_new_tokens=5, eos_token_id=None)
        assert torch.equal(short[0].result(WAIT), expected) and long.result(WAIT).shape[1] == 304
        assert waits.others_are_over and other.stats()["busy_row_steps"] and not other.stats()["repeated"]


def test_two_engines_draw_in_turn(llama: Any, gate: Gate) -> None:
    """One of them in a call of its own, and meanwhile the other one has a request enter slots."""
    options, entering = {"do_sample": True, "max_new_tokens": 12}, Gate()
    with fastgen.Engine(llama) as one, fastgen.Engine(llama) as other:
        fastgen.disable()
        first = one.submit(PROMPTS[0], seed=5, logits_processor=[gate], **options)
        assert gate.has_come.wait(WAIT)
        fastgen.enable()
        second = other.submit(PROMPTS[1], seed=6, logits_processor=[entering], **options)
        entering.has_come.wait(0.5)  # which it has once it may draw
        gate.may_go.set()
        found = first.result(WAIT)
        entering.may_go.set()
        results = found, second.result(WAIT)
    for prompt, seed, result in zip(PROMPTS, (5, 6), results, strict=False):
        torch.manual_seed(seed)
        assert torch.equal(result, alone(llama, prompt, **options))


def test_a_thread_that_keeps_the_turn_for_captured_steps(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for requests: these run without slots, but for those whose code must not run twice. They wait on."""
    monkeypatch.setattr(slots, "PATIENCE", 0.01)
    for name in ("_TURN", "_SHARED_TURN"):  # or requests may be over before anybody else has it
        monkeypatch.setattr(continuous, name, 0.02)
    with fastgen.Engine(llama) as engine:
        tokens = engine.stream(PROMPTS[0], **FOR_LONG)
        first = next(tokens)
        running = engine.submit(PROMPTS[1], num_beams=2, **FOR_LONG)
        while not running.running():  # or it has nothing to begin again
            time.sleep(0.01)
        with graph.taken(llama.device, WAIT):
            found = engine.submit(PROMPTS[2], max_new_tokens=5).result(WAIT), running.result(WAIT)
        rest = list(tokens)
        assert engine.stats()["repeated"] and not engine.stats()["failed"]
    assert torch.equal(found[0], alone(llama, PROMPTS[2], max_new_tokens=5))
    assert torch.equal(found[1], alone(llama, PROMPTS[1], num_beams=2, **FOR_LONG))
    assert [first, *rest] == alone(llama, PROMPTS[0], **FOR_LONG)[0, len(PROMPTS[0]) :].tolist()
