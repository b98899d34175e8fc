"""Layers in half precision: few rows are multiplied as dot products, many in float32, where that is faster."""

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
from fastgen.ops.linear import gemv, upcast
from tests.decoding.layers.tiny import KINDS

pytestmark = pytest.mark.skipif(not gemv.is_available(), reason="the extension was not built")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of FastGen's products, which are the faster ones; negative of those in float32."""
    found: list[int] = []
    dots, widened = gemv.gemv, upcast.upcast_gemm
    monkeypatch.setattr(FastLayers, "_half_shapes", {})
    monkeypatch.setattr(gemv, "costs", lambda *shape, measure: gemv.Costs(2.0, 1.0))
    monkeypatch.setattr(upcast, "costs", lambda *shape, measure: upcast.Costs(2.0, 1.0))
    monkeypatch.setattr(
        dot_linear, "dot_linear", lambda x, *rest: found.append(x.numel() // x.shape[-1]) or dots(x, *rest)
    )
    monkeypatch.setattr(
        widened_linear, "widened_linear", lambda x, *rest: found.append(-x.numel() // x.shape[-1]) or widened(x, *rest)
    )
    return found


def layer(dtype: torch.dtype = torch.bfloat16, **options: bool) -> nn.Linear:
    return nn.Linear(40, 30, **options).to(dtype)


@pytest.mark.parametrize("biased", [True, False])
def test_is_the_layer(biased: bool, dtype: torch.dtype, rows: list[int]) -> None:
    """Rounded once. Hooks run around it."""
    model = nn.Sequential(layer(dtype, bias=biased))
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(result))
    for shape in ((1, 40), (4, 4, 40), (17, 40), (5, 4, 40), (40,), (0, 40)):
        x = torch.randn(*shape).to(dtype)
        with FastLayers.of(model, KINDS):
            y = model(x)
        exact = nn.functional.linear(x.double(), *(parameter.double() for parameter in model.parameters()))
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)
        assert y.dtype is dtype and seen[-1] is y
    assert rows == [1, 16, -17, -20, 1]
    assert "forward" not in vars(model[0])


def test_only_where_it_is_faster(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is measured once a shape has been used some times."""
    asked: list[tuple[int, bool]] = []

    def costs(rows: int, *shape: object, measure: bool) -> gemv.Costs | None:
        asked.append((rows, measure))
        return gemv.Costs(2.0, 1.0 if rows < 3 else 2.0) if measure else None

    monkeypatch.setattr(gemv, "costs", costs)
    monkeypatch.setattr(upcast, "costs", costs)
    monkeypatch.setattr(products, "MEASURED_FROM", 3)
    model = nn.Sequential(layer())
    with FastLayers.of(model, KINDS):
        for _ in range(4):
            model(torch.randn(2, 40).bfloat16())
        assert (rows, asked) == ([2, 2], [(2, False), (2, False), (2, True)])
        for _ in range(4):
            model(torch.randn(4, 40).bfloat16())
        assert (rows, asked[3:]) == ([2, 2], [(4, False), (4, False), (4, True)])
        for _ in range(4):
            model(torch.randn(40, 40).bfloat16())
    assert (rows[2:], asked[6:]) == ([], [(40, False), (40, False), (40, True)])


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.float(),
        lambda model: fastgen.enable(linear_products="fixed"),
        lambda model: fastgen.enable(packed_weights="never"),
        lambda model: model.__setitem__(0, Scaled(40, 30).bfloat16()),
        lambda model: model[0].register_parameter("weight", nn.Parameter(torch.randn(40, 30).bfloat16().t())),
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    ],
    ids=["float32", "fixed", "never", "a class of its own", "columns", "parametrized"],
)
def test_all_else_is_torchs(change: Callable[[nn.Module], object], rows: list[int]) -> None:
    model = nn.Sequential(layer())
    change(model)
    for some in (2, 20):
        x = torch.randn(some, 40).to(next(model.parameters()).dtype)
        expected = model(x)
        with FastLayers.of(model, KINDS):
            torch.testing.assert_close(model(x), expected)
    assert not rows


def test_what_is_captured_is_torchs(dtype: torch.dtype, rows: list[int]) -> None:
    model = nn.Sequential(layer(dtype))
    with FastLayers.of(model, KINDS), layers.plain_linear():
        model(torch.randn(2, 40).to(dtype))
        model(torch.randn(20, 40).to(dtype))
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


def test_a_model_that_changes_its_type(rows: list[int]) -> None:
    model = nn.Sequential(layer())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float16):
        model.to(dtype)
        with FastLayers.of(model, KINDS):
            assert model(torch.randn(20, 40).to(dtype)).dtype is dtype
            model.bfloat16()
            assert model(torch.randn(20, 40).bfloat16()).dtype is torch.bfloat16
    assert rows == [-20] * 4


@pytest.mark.parametrize("count", [2, 20])
def test_weights_are_not_held(count: int) -> None:
    fastgen.enable(packed_weights="keep")
    model = nn.Sequential(layer())
    with FastLayers.of(model, KINDS):
        model(torch.randn(count, 40).bfloat16())
    weight = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.randn(30, 40).bfloat16())
    gc.collect()
    assert weight() is None
