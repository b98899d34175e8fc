"""What the tests of the engine share: tiny models, calls of their own to compare with, and a request that waits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.ops import gpu
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.pays import Ledger
from tests.equivalence.models import BY_NAME

# Prompts of all kinds of lengths: one token, and some that are alike.
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [20], list(range(30, 42)), [50, 51, 52, 53], list(range(60, 99))]
WAIT = 60
# A decoder, and an encoder with one: for what no other difference of models changes.
both_kinds = pytest.mark.parametrize("model", ["llama", "bart"], indirect=True)


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are programs, as for users: the tests have Triton's kernels interpreted otherwise."""
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)
    fastgen.enable()
    yield
    fastgen.enable()
    graph_cache.drop_all()


@pytest.fixture(params=["llama", "gpt2", "bart", "t5"])
def model(request: pytest.FixtureRequest) -> Any:
    return BY_NAME[request.param].build()


@pytest.fixture
def llama() -> Any:
    """One of the test's own, which it may change."""
    return copy.deepcopy(BY_NAME["llama"].build())


@pytest.fixture
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording a step always pays."""
    monkeypatch.setattr(Ledger, "_repaid_by", lambda *asked: 0)


def alone(model: Any, inputs: Any, **options: Any) -> Any:
    """What a call of `generate` gives for this input alone."""
    generate = type(model).generate  # whatever stands for it on the model
    if isinstance(inputs, dict):
        return generate(model, **copy.deepcopy(inputs), **options)
    return generate(model, torch.tensor([inputs]), **options)


def assert_alone(model: Any, inputs: list[Any], results: list[Any], **options: Any) -> None:
    """Each result is that of a call of its own."""
    for each, result in zip(inputs, results, strict=True):
        expected = alone(model, each, **options)
        assert torch.equal(expected, result), f"{each}: {expected.tolist()}, and not {result.tolist()}"


class StopsAt:
    """A criterion that stops each sequence behind so many new tokens."""

    def __init__(self, count: int) -> None:
        self.count, self.first = count, None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.first = self.first or input_ids.shape[1]
        return torch.full((len(input_ids),), input_ids.shape[1] % 11 == self.count)


class Gate:
    """A logits processor at which a request waits, in its first step, until the test lets it go on."""

    def __init__(self) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.has_come.set()
        assert self.may_go.wait(WAIT)
        return scores


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_go.set()


class Bans:
    """A logits processor of the user's: bans a token in place, and keeps what it has seen. One call may fail."""

    def __init__(self, token: int, fails_at: int | None = None) -> None:
        self.token, self.fails_at, self.seen = token, fails_at, list[list[list[int]]]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        if len(self.seen) == self.fails_at:
            raise LookupError("of the user's")
        scores[:, self.token] = -torch.inf
        return scores


def raising(error: BaseException, every: int = 1) -> Callable[..., torch.Tensor]:
    """A logits processor of the user's that raises when the length of the sequences is a multiple of `every`."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % every == 0:
            raise error
        return scores

    return processor


class Streamer(BaseStreamer):
    """Keeps what it hears, and raises instead of hearing more than that many tensors."""

    def __init__(self, most: int = 1000) -> None:
        self.heard, self.most, self.is_over = list[list[int]](), most, False

    def put(self, value: torch.Tensor) -> None:
        if len(self.heard) >= self.most:
            raise LookupError("of the user's")
        self.heard.append(value.flatten().tolist())
        self.is_over = False

    def end(self) -> None:
        self.is_over = True


def coming(executor: ContinuousBatches, requests: list[Request], at_once: int) -> Callable[[], list[Request]]:
    """What gives the executor at most that many more of these requests each time that it asks."""
    left = list(requests)

    def more() -> list[Request]:
        come, left[:] = left[:at_once], left[at_once:]
        chosen = executor.choose(come) if come else []
        left[:0] = come  # what it has not taken
        return chosen

    return more


def run(executor: ContinuousBatches, requests: list[Request], at_once: int = 1) -> None:
    """Runs requests, of which at most `at_once` come with each step."""
    for _ in executor.steps(coming(executor, requests, at_once)):
        pass


def run_with_a_change(
    executor: ContinuousBatches, requests: list[Request], steps: int, change: Callable[[], Any]
) -> None:
    """Runs requests; after that many steps, when all of them are in slots, something changes."""
    left, has_changed = list(requests), False
    for _ in executor.steps(lambda: executor.choose(left) if left else []):
        if executor.counts["steps"] >= steps and not (left or has_changed):
            assert executor.busy
            has_changed = True
            change()
    assert has_changed and not executor.busy


def requests_for(model: Any, prompts: list[Any], rows: int = 16, **options: Any) -> list[Request]:
    """Each has other new tokens than the one before."""
    return [
        make(
            model, prompt, None, {"max_new_tokens": 6 + 5 * (n % 4), **options},
            3 + n if options.get("do_sample") else None, rows,
        )
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip


def assert_as_alone(model: Any, requests: list[Request], prompts: list[Any]) -> None:
    for request, prompt in zip(requests, prompts, strict=True):
        if request.seed is not None:
            torch.manual_seed(request.seed)
        assert torch.equal(request.future.result(0), alone(model, prompt, **request.options))


def check(executor: ContinuousBatches, prompts: list[Any], at_once: int = 1, **options: Any) -> None:
    """Runs a request for each prompt, and asserts that each gets what a call of its own gives."""
    requests = requests_for(executor.model, prompts, **options)
    run(executor, requests, at_once)
    assert_as_alone(executor.model, requests, prompts)
