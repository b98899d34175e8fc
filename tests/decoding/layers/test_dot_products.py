"""Layers in bfloat16: few rows are multiplied with the weight as it is, where that is faster."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastgen
from fastgen.decoding import layers, products
from fastgen.decoding.layers import FastLayers
from fastgen.ops import dot_linear
from tests.decoding.layers.tiny import KINDS

pytestmark = pytest.mark.skipif(not dot_linear.is_available(), reason="the extension was not built")


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of products on the weight as it is, which are the faster ones."""
    found: list[int] = []
    product = dot_linear.dot_linear
    monkeypatch.setattr(FastLayers, "_dot_shapes", {})
    monkeypatch.setattr(dot_linear, "costs", lambda *shape, measure: dot_linear.Costs(2.0, 1.0))
    monkeypatch.setattr(
        dot_linear, "dot_linear", lambda x, *rest: found.append(x.numel() // x.shape[-1]) or product(x, *rest)
    )
    return found


def layer(**options: bool) -> nn.Linear:
    return nn.Linear(40, 30, **options).bfloat16()


@pytest.mark.parametrize("biased", [True, False])
def test_few_rows(biased: bool, rows: list[int]) -> None:
    model = nn.Sequential(layer(bias=biased))
    for shape in ((1, 40), (4, 4, 40), (17, 40), (40,), (0, 40)):
        x = torch.randn(*shape).bfloat16()
        expected = model(x)
        with FastLayers.of(model, KINDS):
            torch.testing.assert_close(model(x), expected)
    assert rows == [1, 16, 1]
    assert "forward" not in vars(model[0])


def test_only_where_it_is_faster(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is measured once a shape has been used some times."""
    asked: list[tuple[int, bool]] = []

    def costs(rows: int, *shape: object, measure: bool) -> dot_linear.Costs | None:
        asked.append((rows, measure))
        return dot_linear.Costs(2.0, 1.0 if rows < 3 else 2.0) if measure else None

    monkeypatch.setattr(dot_linear, "costs", costs)
    monkeypatch.setattr(products, "MEASURED_FROM", 3)
    model = nn.Sequential(layer())
    with FastLayers.of(model, KINDS):
        for _ in range(4):
            model(torch.randn(2, 40).bfloat16())
        assert (rows, asked) == ([2, 2], [(2, False), (2, False), (2, True)])
        for _ in range(4):
            model(torch.randn(4, 40).bfloat16())
    assert (rows, asked[3:]) == ([2, 2], [(4, False), (4, False), (4, True)])


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.float(),
        lambda model: model.half(),
        lambda model: fastgen.enable(linear_products="fixed"),
        lambda model: fastgen.enable(packed_weights="never"),
        lambda model: model.__setitem__(0, Scaled(40, 30).bfloat16()),
        lambda model: model[0].register_parameter("weight", nn.Parameter(torch.randn(40, 30).bfloat16().t())),
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    ],
    ids=["float32", "float16", "fixed", "never", "a class of its own", "columns", "parametrized"],
)
def test_all_else_is_torchs(change: Callable[[nn.Module], object], rows: list[int]) -> None:
    model = nn.Sequential(layer())
    change(model)
    x = torch.randn(2, 40).to(next(model.parameters()).dtype)
    expected = model(x)
    with FastLayers.of(model, KINDS):
        torch.testing.assert_close(model(x), expected)
    assert not rows


def test_what_is_captured_is_torchs(rows: list[int]) -> None:
    model = nn.Sequential(layer())
    with FastLayers.of(model, KINDS), layers.as_they_are():
        model(torch.randn(2, 40).bfloat16())
    assert not rows


def test_a_weight_that_changes(rows: list[int]) -> None:
    """In place it counts; in the place of another it is torch's for the rest of the call."""
    model, x = nn.Sequential(layer()), torch.randn(2, 40).bfloat16()
    with FastLayers.of(model, KINDS):
        model(x)
        model[0].weight.data.mul_(2)
        torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        model[0].weight = nn.Parameter(torch.randn(30, 40).bfloat16())
        torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert len(rows) == 2
    with FastLayers.of(model, KINDS):
        model(x)
    assert len(rows) == 3


def test_weights_are_not_held() -> None:
    fastgen.enable(packed_weights="keep")
    model = nn.Sequential(layer())
    with FastLayers.of(model, KINDS):
        model(torch.randn(2, 40).bfloat16())
    weight = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.randn(30, 40).bfloat16())
    gc.collect()
    assert weight() is None
