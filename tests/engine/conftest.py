"""What the tests of the engine share: tiny models, calls of their own to compare with, and a request that waits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.ops import gpu
from fastgen.optimizer.transformers.captured import graph_cache
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


def run(executor: ContinuousBatches, requests: list[Request], at_once: int = 1) -> None:
    """Runs requests, so many of which come with each step at the most."""
    left = list(requests)

    def more() -> list[Request]:
        come, left[:] = left[:at_once], left[at_once:]
        chosen = executor.choose(come) if come else []
        left[:0] = come  # what it has not taken
        return chosen

    for _ in executor.steps(more):
        pass


def requests_for(model: Any, prompts: list[Any], rows: int = 16, **options: Any) -> list[Request]:
    """Each has other new tokens than the one before."""
    seed = 3 if options.get("do_sample") else None
    return [
        make(model, prompt, None, {"max_new_tokens": 6 + 5 * (n % 4), **options}, seed, rows)
        for n, prompt in enumerate(prompts)
    ]


def assert_as_alone(model: Any, requests: list[Request], prompts: list[Any]) -> None:
    for request, prompt in zip(requests, prompts, strict=True):
        if request.seed is not None:
            torch.manual_seed(request.seed)
        assert torch.equal(request.future.result(0), alone(model, prompt, **request.options))
