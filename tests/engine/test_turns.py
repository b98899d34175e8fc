"""Requests that run in the thread which asks for them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fastgen.engine import continuous
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.engine.waiting import turns
from tests.engine.conftest import PROMPTS, assert_alone, raising
from tests.equivalence.models import BY_NAME


def _made(model: Any, prompts: list[list[int]], **options: Any) -> list[Request]:
    return [make(model, prompt, None, options, None, 8) for prompt in prompts]


def test_every_request_has_its_result(model: Any) -> None:
    made = _made(model, PROMPTS, num_beams=2, max_new_tokens=6)
    found = list(turns(ContinuousBatches(model, 8, max_stall=None), made))
    assert sorted(made.index(request) for turn in found for request in turn.finished) == list(range(len(made)))
    assert found[-1].waiting == 0 and all(0 < turn.busy <= 8 for turn in found)
    assert_alone(model, PROMPTS, [request.future.result() for request in made], num_beams=2, max_new_tokens=6)


def test_the_order_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = BY_NAME["llama"].build(), [[5] * (1 + 7 * n % 30) for n in range(24)]

    def order(seconds: list[float]) -> list[list[int]]:
        now = [0.0]

        def clock() -> float:
            now[0] += seconds[int(now[0]) % len(seconds)]
            return now[0]

        monkeypatch.setattr(time, "perf_counter", clock)
        made = _made(model, prompts, max_new_tokens=2)
        executor = ContinuousBatches(model, 8, max_stall=None)
        return [[made.index(request) for request in turn.finished] for turn in turns(executor, made)]

    assert order([1.0]) == order([1.0, 100.0, 3.0])


def test_the_order_does_not_depend_on_when_turns_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps it is asked once who runs next, as each time counts."""
    model, prompts = BY_NAME["llama"].build(), [[5] * (1 + 7 * n % 30) for n in range(24)]
    begin = ContinuousBatches._begin

    def batches(seconds: float) -> list[tuple[int, list[int]]]:
        found = []

        def noted(executor: ContinuousBatches, requests: list[Request]) -> None:
            found.append((executor.counts["steps"], [made.index(request) for request in requests]))
            begin(executor, requests)

        monkeypatch.setattr(continuous, "_TURN", seconds)
        monkeypatch.setattr(ContinuousBatches, "_begin", noted)
        limits = (20, 40, 60, 30, 50, 25, 45, 35)
        made = [
            make(model, prompt, None, {"max_new_tokens": limits[n % 8]}, None, 8) for n, prompt in enumerate(prompts)
        ]
        for _ in turns(ContinuousBatches(model, 8, max_stall=None), made):
            pass
        return found

    assert batches(0.0) == batches(3600.0)


def test_an_interrupt_is_raised(llama: Any) -> None:
    made = _made(llama, PROMPTS[:2], max_new_tokens=2, logits_processor=[raising(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        list(turns(ContinuousBatches(llama, 8, max_stall=None), made))
    assert not made[1].future.done()
