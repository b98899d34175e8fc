"""Interrupts at every instruction of what takes something, and at random moments beside another thread."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.bart import modeling_bart
from transformers.utils import import_utils

import fastgen
from fastgen.decoding.captured import recording
from fastgen.decoding.captured.recording import is_capturing
from fastgen.optimizer.transformers.captured import graph_cache, pays
from tests import interrupted
from tests.equivalence.captured import BEAMS, GREEDY, captures, reasons, record_programs
from tests.equivalence.check import run
from tests.equivalence.encoder_models import build
from tests.equivalence.models import BY_NAME

# Signals of the random test, and instructions of each case; None for all.
SIGNALS = [60, pytest.param(20_000, marks=pytest.mark.long)]
POINTS = [25, pytest.param(None, marks=pytest.mark.long)]
# What takes something for a call, or for a step.
TAKING = (
    "interrupts.py", "counters.py:_count", "patching.py:held", "settings.py:changed",
    "decoding/captured/graph.py:taken", "decoding/captured/graph.py:stepped_aside", "decoding/captured/graph.py:_take",
    "decoding/captured/graph.py:_give_back", "decoding/captured/program.py:capture",
    "decoding/captured/program.py:replay", "decoding/captured/recording.py:record",
    "decoding/captured/recording.py:_modes_put_back", "decoding/captured/recording.py:_put_back",
    "decoding/captured/recording.py:_captures", "decoding/host_memory.py:kept", "decoding/host_memory.py:_let_go",
    "decoding/layers.py:__enter__", "decoding/layers.py:__exit__", "decoding/layers.py:_install",
    "decoding/layers.py:_leave", "decoding/layers.py:_remove", "decoding/layers.py:of",
    "decoding/derived_weights.py:call", "decoding/derived_weights.py:leave", "decoding/linear_ops.py:panels_suspended",
    "ops/runtime.py:_recorded",
    "ops/runtime.py:_close", "ops/runtime.py:for_replay", "optimizer/transformers/call.py:__enter__",
    "optimizer/transformers/call.py:__exit__", "optimizer/transformers/call.py:_leave",
    "optimizer/transformers/captured/graph_cache.py:take", "optimizer/transformers/captured/graph_cache.py:give_back",
    "optimizer/transformers/encoders/call.py:call", "optimizer/transformers/encoders/call.py:run",
    "optimizer/transformers/encoders/call.py:_planned", "optimizer/transformers/encoders/programs.py:run",
    "optimizer/transformers/generate.py", "optimizer/transformers/loop.py:_without_gradients",
    "optimizer/transformers/captured/decoding.py:_users",
)  # fmt: skip


class Plain(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def generating(model: Any, inputs: dict[str, Any], **options: Any) -> Callable[[], Any]:
    return lambda: model.generate(**inputs, max_new_tokens=12, **options)


def encoding(model: Any) -> Callable[[], Any]:
    inputs = {"input_ids": torch.arange(4, 36).view(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    inputs["attention_mask"][0, 9:] = 0

    def call() -> Any:
        with torch.no_grad():
            model(input_ids=inputs["input_ids"])  # which is recorded
            return model(**inputs).last_hidden_state[1]

    return call


def cases() -> dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]]:
    llama = BY_NAME["llama"]
    model, inputs = llama.build(), llama.make_inputs()
    bart = BY_NAME["bart"]
    seq2seq, source = bart.build(), bart.make_inputs()
    bert = build("Bert")
    always = {"captured_step": "always"}
    processor = LogitsProcessorList([Plain()])
    return {
        "captured": (model, generating(model, inputs, do_sample=False), always),
        "captured, a processor": (
            model,
            generating(model, inputs, do_sample=False, logits_processor=processor),
            always,
        ),
        "captured, beams": (seq2seq, generating(seq2seq, source, num_beams=3), always),
        "hooks, beams": (model, generating(model, inputs, num_beams=3), {"captured_step": "never"}),
        "an encoder": (bert, encoding(bert), {"padding": "zero"}),
    }


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("name", ["captured", "captured, a processor", "captured, beams", "hooks, beams", "an encoder"])
def test_an_interrupt_at_every_instruction_leaves_nothing_taken(
    name: str, points: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, call, settings = cases()[name]
    monkeypatch.setattr(pays, "PASSES", 1)
    is_chosen = interrupted.in_files(*TAKING)
    fastgen.enable(**settings)
    expected = call()
    came = 0
    for number, point in enumerate(interrupted.points(call, is_chosen, points)):
        if number % 2:  # as in a first call, which records
            graph_cache.drop_all()
        interrupter = interrupted.Interrupter(is_chosen, point)
        result = interrupter.run(call)
        if interrupter.error is None:
            assert not interrupter.has_come or interrupter.was_in_destructor, f"swallowed at {interrupter.place}"
            assert torch.equal(result, expected)
        else:
            came += 1
            found = interrupted.what_is_taken(model)
            assert not found, (found, interrupter.place)
        if number % 4 == 0:
            assert torch.equal(call(), expected), interrupter.place
    assert came > 10
    assert torch.equal(call(), expected)


class TimeLimit(Exception):
    """What a handler raises that limits the time of a call; no fault of what it interrupts."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeLimit])
@pytest.mark.parametrize("signals", SIGNALS)
def test_signals_at_random_moments_beside_another_thread(signals: int, kind: type[BaseException]) -> None:
    made = cases()
    fastgen.enable(captured_step="always")
    calls = [call for _, call, _ in made.values()]
    expected = [call() for call in calls]
    draw, started = random.Random(1), time.perf_counter()
    for call in calls:
        call()
    seconds = (time.perf_counter() - started) / len(calls)
    armed, raised, inside, swallowed_by_library = False, 0, 0, 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal armed, raised, inside, swallowed_by_library
        if armed:
            armed = False
            raised += 1
            # Its questions, such as whether something is traced, say no whatever is raised in them.
            swallowed_by_library += frame is not None and frame.f_code.co_filename == import_utils.__file__
            while frame is not None and not frame.f_code.co_filename.startswith(str(interrupted.PACKAGE)):
                frame = frame.f_back
            inside += frame is not None
            raise kind

    done, beside, wrong = threading.Event(), 0, []

    def other() -> None:
        nonlocal beside
        mine = cases()["captured"][1]
        first = mine()
        while not done.is_set():
            if not torch.equal(mine(), first):
                wrong.append(beside)
            beside += 1

    in_destructors: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, in_destructors.append
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    caught = 0
    try:
        with interrupted.signals(handler):
            for number in range(signals):
                which = number % len(calls)
                killer = threading.Timer(draw.random() * 1.2 * seconds, os.kill, (os.getpid(), signal.SIGINT))
                killer.start()
                before = inside
                try:
                    armed = True
                    result = calls[which]()
                    armed = False
                    assert torch.equal(result, expected[which])
                except kind:
                    caught += 1
                    if inside == before:  # in the test's own `no_grad`, say
                        torch.set_grad_enabled(True)
                killer.join()
                if number % 10 == 0:
                    assert not (found := interrupted.what_is_taken()), found
                    assert torch.equal(calls[which](), expected[which])
    finally:
        sys.unraisablehook = hook
        done.set()
        thread.join(timeout=120)
    assert not thread.is_alive() and beside > 0 and not wrong
    assert caught + len(in_destructors) + swallowed_by_library >= raised
    assert inside > signals / 10


@pytest.mark.parametrize(("place", "every"), [(modeling_bart, 40), (recording, 800)], ids=["the-model", "the-recorder"])
def test_a_call_of_a_signal_handler_during_a_recording(
    place: ModuleType, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no part of the recording, and has no captured step. The recording goes on behind it."""
    record_programs(torch.device("cpu"), monkeypatch)
    outer, inner = ((BY_NAME[name].build(), BY_NAME[name].make_inputs()) for name in ("bart", "llama"))
    wanted = [run(*outer, BEAMS), run(*inner, GREEDY)]
    graph_cache.drop_all()
    fastgen.reset_stats()
    found, lines = list[torch.Tensor](), itertools.count(1)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != place.__file__ or not is_capturing():
            return trace if event == "call" else None
        if event == "line" and next(lines) % every == 0:
            found.append(run(*inner, GREEDY))  # where Python would call a handler
            assert is_capturing()
        return trace

    sys.settrace(trace)
    try:
        result = run(*outer, BEAMS)
    finally:
        sys.settrace(None)
    assert torch.equal(result, wanted[0]) and captures() == 1
    assert found and all(torch.equal(each, wanted[1]) for each in found)
    assert reasons() == {"a call inside a captured step of another one, on the CPU": len(found)}
    assert not is_capturing() and torch.equal(run(*outer, BEAMS), wanted[0])
