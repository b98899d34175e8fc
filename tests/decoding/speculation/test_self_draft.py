"""Copies of a model's weights as its draft: what is made again when a weight changes, or a copy goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastgen import memory
from fastgen.decoding import layers
from fastgen.decoding.layers import LINEAR, FastLayers
from fastgen.decoding.speculation.self_draft import DraftWeights
from fastgen.decoding.weights import cache
from fastgen.ops import quantized_linear
from tests.noting import noted

pytestmark = pytest.mark.skipif(
    quantized_linear.unavailable("int8") is not None, reason="there are no kernels in this process"
)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Layers of any size have a copy; the weights that are copied, in order."""
    monkeypatch.setattr(layers, "MIN_NARROW", 0)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    found = noted(monkeypatch, quantized_linear, "pack", lambda weight, *form: weight)
    with torch.no_grad(), cache.call():
        yield found
    cache.drop_all()


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60))


def draft(model: nn.Module, precision: str = "int8") -> DraftWeights:
    return DraftWeights.of(model, LINEAR, precision, 64)


def test_only_a_weight_that_has_changed_is_copied_again(model: nn.Sequential, packed: list[torch.Tensor]) -> None:
    before = draft(model)
    assert before.copy() and draft(model) is before and len(packed) == 2
    model[1].weight.mul_(2)
    after = draft(model)
    assert after.number != before.number and after.copy() and len(packed) == 3
    model[0].bias.mul_(2)  # which nothing is copied of
    assert draft(model) is after


def test_what_drafts_goes_with_a_copy(
    model: nn.Sequential, packed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were captured with it hold its memory."""
    freed: list[int] = []
    monkeypatch.setattr(memory, "free_captured_steps", lambda: freed.append(1))
    x = torch.randn(3, 40)
    before, expected = draft(model), model(x)
    before.copy()
    cache.drop_all()
    assert len(freed) == 1
    with FastLayers.of(model), before.used():
        torch.testing.assert_close(model(x), expected)
    after = draft(model)
    assert after.number != before.number and after.copy() and len(packed) == 4


def test_copies_in_other_numbers_are_others(model: nn.Sequential, packed: list[torch.Tensor]) -> None:
    x, results = torch.randn(3, 40), []
    for precision in ("int8", "int4"):
        weights = draft(model, precision)
        assert weights.copy()
        with FastLayers.of(model), weights.used():
            results.append(model(x))
    assert len(packed) == 4 and not torch.equal(*results) and not torch.equal(results[0], model(x))


def test_a_model_without_weights_to_copy() -> None:
    with pytest.raises(ValueError, match="no weights for a low-bit self-draft"):
        draft(nn.Sequential(nn.ReLU())).copy()
