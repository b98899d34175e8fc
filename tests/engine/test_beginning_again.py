"""Requests that cannot go on in slots: the model has changed, or another thread has the turn for captured steps."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding.captured import graph
from fastgen.engine import continuous
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.optimizer.transformers.captured import slots
from tests.engine.conftest import PROMPTS, WAIT, Gate, alone
from tests.equivalence.models import BY_NAME

LONG: dict[str, Any] = {"max_new_tokens": 400, "eos_token_id": None}
LATER: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None}


class _Streamer(BaseStreamer):
    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


def test_weights_that_change_while_requests_are_in_slots(llama: Any) -> None:
    """All of them begin again, of every kind: none is a mixture."""
    kinds: list[dict[str, Any]] = [
        {"num_beams": 1 + number % 2, "max_new_tokens": 12} for number in range(len(PROMPTS))
    ]
    executor = ContinuousBatches(llama, 16)
    requests = [make(llama, prompt, None, kind, None, 16) for prompt, kind in zip(PROMPTS, kinds, strict=True)]
    left, has_changed = list(requests), False
    for _ in executor.steps(lambda: executor.choose(left) if left else []):
        if executor.counts["steps"] >= 6 and not (left or has_changed):
            assert executor.busy
            has_changed = True
            with torch.no_grad():
                llama.get_output_embeddings().weight.mul_(-1.0)
    assert has_changed and executor.counts["repeated"] and not executor.busy
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
        users = {"streamer": _Streamer()}
        request, seen = [make(model, PROMPTS[0], None, LATER | more, None, 8) for more in ({}, users)]
        left, has_changed = [request, seen], False
        for _ in executor.steps(lambda executor=executor, left=left: executor.choose(left) if left else []):
            if executor.counts["steps"] >= 6 and not (left or has_changed):
                has_changed = True
                for layer in layers:
                    change(layer)
        after = alone(model, PROMPTS[0], **LATER)
        assert has_changed and not torch.equal(before, after)
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
        tokens = engine.stream(PROMPTS[0], **LONG)
        first = next(tokens)
        running = engine.submit(PROMPTS[1], num_beams=2, **LONG)
        while not running.running():  # or it has nothing to begin again
            time.sleep(0.01)
        with graph.taken(llama.device, WAIT):
            found = engine.submit(PROMPTS[2], max_new_tokens=5).result(WAIT), running.result(WAIT)
        rest = list(tokens)
        assert engine.stats()["repeated"] and not engine.stats()["failed"]
    assert torch.equal(found[0], alone(llama, PROMPTS[2], max_new_tokens=5))
    assert torch.equal(found[1], alone(llama, PROMPTS[1], num_beams=2, **LONG))
    assert [first, *rest] == alone(llama, PROMPTS[0], **LONG)[0, len(PROMPTS[0]) :].tolist()
