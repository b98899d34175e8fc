"""Copies of output layers: who has one, whether it stands for the weight as it is now, and how long it lives."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.nn.functional as F

from fastgen import memory, settings
from fastgen.decoding import output_layer
from fastgen.decoding.captured.program import Program
from fastgen.decoding.output_layer import OutputLayer
from fastgen.ops import _timings, largest_output

pytestmark = pytest.mark.skipif(not largest_output.is_available(), reason="there are no kernels in this process")


@pytest.fixture(autouse=True)
def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_LEAST_BYTES", 0)
    monkeypatch.setattr(_timings, "_known", {})
    monkeypatch.setattr(OutputLayer, "measure", lambda self, rows: (2.0, 1.0))


class Greedy:
    """The output layer of a greedy step, as a program."""

    def __init__(self, weight: torch.Tensor, rows: int = 2) -> None:
        self.x, self.out, self.weight = torch.randn(rows, weight.shape[1]), torch.zeros(rows, dtype=torch.int64), weight
        self.program = Program()
        self.program.capture(lambda: self.out.copy_(F.linear(self.x, self.weight).argmax(dim=-1)))

    def is_right(self) -> bool:
        self.x.normal_()
        self.program.replay()
        return torch.equal(self.out, F.linear(self.x, self.weight).argmax(dim=-1))


def layers() -> list[OutputLayer]:
    gc.collect()
    return list(OutputLayer._layers.values())


def test_one_copy_for_all_programs_as_long_as_they_live() -> None:
    weight = torch.randn(600, 64)
    first, second, other = Greedy(weight), Greedy(weight, rows=5), Greedy(torch.randn(600, 64))
    assert len(layers()) == 2 and all(each.is_right() for each in (first, second, other))
    del first, other
    assert len(layers()) == 1 and second.is_right()
    del second
    assert not layers()


@pytest.mark.parametrize("scale", [0.0, 1.0, math.nan])
def test_a_weight_that_has_changed_between_two_calls(scale: float) -> None:
    """Also in a way that leaves no trace in torch's version counter, as optimisers and averages do."""
    greedy = Greedy(torch.nn.Parameter(torch.randn(600, 64)))
    assert greedy.is_right()
    version = greedy.weight._version
    for _ in range(2):
        greedy.weight.data[300:] = torch.randn(300, 64) * scale
        output_layer.begin_call()
        assert all(greedy.is_right() for _ in range(5))
    assert greedy.weight._version == version
    greedy.weight.data.normal_()
    output_layer.begin_call()
    assert all(greedy.is_right() for _ in range(5))
    assert layers()[0].copy() is not None


def test_without_looking_at_the_weight_again_it_would_be_wrong() -> None:
    """What the test above can see."""
    greedy = Greedy(torch.randn(600, 64))
    greedy.weight.copy_(torch.randn(600, 64))
    assert not all(greedy.is_right() for _ in range(20))


def test_flat_logits_are_computed_without_a_copy() -> None:
    greedy = Greedy(torch.ones(600, 64))
    for _ in range(output_layer._STEPS):
        assert layers()[0].copy() is not None
        assert greedy.is_right()
    assert layers()[0].copy() is None and greedy.is_right()


def test_no_copy_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(600, 64)
    with monkeypatch.context() as context:
        context.setattr(settings, "_current", settings.Settings(packed_weights="never"))
        assert Greedy(weight).is_right() and not layers()
    with monkeypatch.context() as context:
        context.setattr(memory, "free_host_memory", lambda: 0)
        assert Greedy(weight).is_right() and not layers()
    with monkeypatch.context() as context:
        context.setattr(output_layer, "_LEAST_BYTES", 600 * 64 * 4 + 1)
        assert Greedy(weight).is_right() and not layers()
    with monkeypatch.context() as context:
        context.setattr(OutputLayer, "measure", lambda self, rows: (1.0, 1.0))
        assert Greedy(weight).is_right() and not layers()
    # It is remembered.
    assert Greedy(weight).is_right() and not layers()
    greedy = Greedy(weight, rows=3)
    assert greedy.is_right() and layers()


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seconds = OutputLayer(torch.randn(600, 64)).measure(2)
    assert len(seconds) == 2 and all(each > 0 for each in seconds)
    assert OutputLayer(torch.full((600, 64), math.nan)).measure(2) == (0.0, 0.0)
