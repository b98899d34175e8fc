"""Copies of output layers: who has one, whether it stands for the weight as it is now, and how long it lives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fastgen import memory, settings
from fastgen.decoding import derived_weights, lm_head
from fastgen.decoding.captured.program import Program
from fastgen.ops import approximate_logits, fingerprint

pytestmark = pytest.mark.skipif(not approximate_logits.is_available(), reason="there are no kernels in this process")


@pytest.fixture(autouse=True)
def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "_LEAST_BYTES", 0)
    monkeypatch.setattr(derived_weights, "LM_HEAD", dataclasses.replace(derived_weights.LM_HEAD, waits=1))


class Greedy:
    def __init__(self, weight: torch.Tensor, rows: int = 2) -> None:
        self.x, self.out, self.weight = torch.randn(rows, weight.shape[1]), torch.zeros(rows, dtype=torch.int64), weight
        self.program = Program()
        self.program.capture(lambda: self.out.copy_(F.linear(self.x, self.weight).argmax(dim=-1)))

    def is_right(self) -> bool:
        self.x.normal_()
        self.program.replay()
        return torch.equal(self.out, F.linear(self.x, self.weight).argmax(dim=-1))


Found = Callable[[], list[derived_weights.DerivedWeight]]


@pytest.fixture
def layers(new_copies: Found) -> Found:
    return lambda: [each for each in new_copies() if each.format.name == derived_weights.LM_HEAD.name]


@pytest.mark.parametrize("scale", [0.0, 1.0, math.nan])
def test_a_weight_that_has_changed_between_two_calls(scale: float, layers: Found) -> None:
    """Also in a way that leaves no trace in torch's version counter, as optimisers and averages do."""
    greedy = Greedy(torch.nn.Parameter(torch.randn(600, 64)))
    assert greedy.is_right()
    version = greedy.weight._version
    for _ in range(2):
        greedy.weight.data[300:] = torch.randn(300, 64) * scale
        with derived_weights.call():
            assert all(greedy.is_right() for _ in range(5))
    assert greedy.weight._version == version
    greedy.weight.data.normal_()
    for _ in range(derived_weights.BACK_OFF):
        with derived_weights.call():
            assert greedy.is_right()
    with derived_weights.call():
        assert all(greedy.is_right() for _ in range(derived_weights.STEPS_OF_COPY + 1))
    assert layers()[0].in_step() is not None


def test_the_first_copy_must_pay_first(monkeypatch: pytest.MonkeyPatch, layers: Found) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(lm_head, "_LEAST_BYTES", 0)
    greedy = Greedy(torch.randn(600, 64))
    for _ in range(derived_weights.STEPS_OF_COPY - 1):
        assert greedy.is_right() and layers()[0].copy is None
    assert greedy.is_right() and layers()[0].copy is not None and greedy.is_right()


def test_flat_logits_are_computed_without_a_copy(monkeypatch: pytest.MonkeyPatch, layers: Found) -> None:
    greedy = Greedy(torch.ones(600, 64))
    for _ in range(lm_head._STEPS):
        assert layers()[0].in_step() is not None
        assert greedy.is_right()
    assert layers()[0].in_step() is None
    with monkeypatch.context() as context:
        context.setattr(fingerprint, "fingerprint", None)  # nobody asks
        for _ in range(derived_weights.BACK_OFF):
            with derived_weights.call():
                assert greedy.is_right() and layers()[0].in_step() is None


def test_no_copy_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, layers: Found) -> None:
    weight = torch.randn(600, 64)

    def does_without() -> bool:
        greedy = Greedy(weight)
        return greedy.is_right() and not layers()

    with monkeypatch.context() as context:
        context.setattr(settings, "_current", settings.Settings(packed_weights="never"))
        assert does_without()
    with monkeypatch.context() as context:
        context.setattr(lm_head, "_LEAST_BYTES", 600 * 64 * 4 + 1)
        assert does_without()
    with monkeypatch.context() as context:
        context.setattr(lm_head, "_MOST_ROWS", 1)
        assert does_without()
    greedy = Greedy(weight, rows=3)
    assert greedy.is_right() and layers()
    layers()[0].drop()
    with monkeypatch.context() as context, derived_weights.call():
        context.setattr(memory, "free_host_memory", lambda: 0)
        assert all(greedy.is_right() for _ in range(2 * derived_weights.STEPS_OF_COPY)) and layers()[0].copy is None


@pytest.mark.parametrize(("rows", "has_copy"), [(1, True), (4, True), (9, True), (16, True), (17, False)])
def test_a_result_does_not_depend_on_whether_there_is_a_copy(rows: int, has_copy: bool, layers: Found) -> None:
    """Weight rows that are nearly the same show the last digits: without a copy, outputs have the bits of GEMV, too."""
    weight = torch.randn(64) + 1e-6 * torch.randn(600, 64)
    greedy = Greedy(weight, rows)
    assert bool(layers()) == has_copy
    for _ in range(20):
        greedy.x.normal_()
        greedy.program.replay()
        with_copy = greedy.out.clone()
        for layer in layers():
            layer.drop()
        greedy.program.replay()
        assert torch.equal(greedy.out, with_copy)
        for layer in layers():
            layer.make()
