"""Layers with weights of 4 or 8 bits or in bfloat16: only if asked for, for how long, what if they change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastgen
from fastgen import memory, settings
from fastgen.decoding import derived_weights, layers
from fastgen.decoding.layer_forms import FloatLinear, QuantizedLinear
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose, copies
from tests.decoding.layers.tiny import KINDS, each_change, model_of_layers
from tests.noting import noted

PRECISIONS = choose.PRECISIONS


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every layer is large enough and every processor fast; the precisions of what is packed, in order."""
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    found = noted(monkeypatch, copies, "pack", lambda weight, precision, *more: precision)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    fastgen.enable(packed_weights="call", weight_dtype="fp32")
    fastgen.reset_stats()
    with torch.no_grad():
        yield found
    fastgen.enable()
    derived_weights.drop_all()


def _skip_without(precision: str) -> None:
    reason = choose.missing(precision)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest, packed: list[str]) -> str:
    _skip_without(request.param)
    packed.clear()
    fastgen.enable(weight_dtype=request.param)
    return request.param


def _precisions(model: nn.Module) -> list[str | None]:
    found = [vars(layer).get("forward") for layer in model]
    of_float = "fp32"
    return [
        layer.form.name if type(layer) is QuantizedLinear else of_float if type(layer) is FloatLinear else None
        for layer in found
    ]


def _is_near(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """As near as low-bit weights come, and not as near as float32 does."""
    most = 0.3 if settings.current().weight_dtype == "int4" else 0.03
    return 1e-5 < ((result - exact).norm() / exact.norm()).item() < most


def test_from_the_first_product_on(precision: str, packed: list[str]) -> None:
    model, x = model_of_layers(), torch.randn(3, 4, 20)
    expected = model(x)
    with FastLayers.of(model, KINDS):
        assert _precisions(model) == [precision, None, precision, precision]
        result = model(x)
        assert _is_near(result, expected) and torch.equal(model(x), result)
    assert packed == [precision] * 3  # each weight once
    assert torch.equal(model(x), expected) and not any("forward" in vars(layer) for layer in model)
    assert fastgen.stats() == {f"{precision} weights": {"accelerated": 1, "fallback": {}}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_half_precision(precision: str, packed: list[str], dtype: torch.dtype) -> None:
    """They are served in groups, and otherwise have the products of half precision."""
    model, x = model_of_layers().to(dtype), torch.randn(3, 4, 20).to(dtype)
    expected = model(x)
    with FastLayers.of(model, KINDS):
        kinds = {type(vars(layer).get("forward")) for layer in model}
        result = model(x)
    assert result.dtype is dtype
    assert (FloatLinear in kinds) is (precision == "bf16")
    if dtype in choose.types(precision, torch.device("cpu")):
        assert packed == [precision] * 3 and not torch.equal(result, expected)
        assert ((result - expected).norm() / expected.norm()).item() < (0.3 if precision == "int4" else 0.03)
        assert fastgen.stats() == {f"{precision} weights": {"accelerated": 1, "fallback": {}}}
    else:
        assert not packed and ((result - expected).norm() / expected.norm()).item() < 0.01


def test_a_model_without_layers_that_it_serves_is_told_of(
    precision: str, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MIN_WEIGHT", 2**18)
    model, x = model_of_layers(), torch.randn(3, 20)
    expected = model(x)
    fastgen.enable(strict=True)
    with FastLayers.of(model, KINDS):
        assert torch.equal(model(x), expected)
    fastgen.enable(strict=False)
    reason = "the model has no linear layer of at least 65536 weights that it serves"
    assert not packed
    assert fastgen.stats() == {f"{precision} weights": {"accelerated": 0, "fallback": {}, "not used": {reason: 1}}}


def test_calls_in_which_nothing_is_multiplied_do_not_count(precision: str) -> None:
    fastgen.enable(packed_weights="keep")
    model, x = model_of_layers(), torch.randn(3, 20)
    for calls in (1, 1, 0):
        with FastLayers.of(model, KINDS):
            for _ in range(calls):
                model(x)
    assert fastgen.stats()[f"{precision} weights"]["accelerated"] == 2


@each_change
@pytest.mark.parametrize("mode", ["call", "keep"])
def test_a_changed_weight_counts(precision: str, change: object, mode: str) -> None:
    fastgen.enable(packed_weights=mode)
    model, x = model_of_layers(), torch.randn(2, 20)
    with FastLayers.of(model, KINDS):
        before = model(x)
        change(model[0])
        after = model(x)
        assert not torch.allclose(before, after)
    assert _is_near(after, model(x))
    change(model[0])
    with FastLayers.of(model, KINDS):
        again = model(x)
    assert _is_near(again, model(x))


def test_switching_while_weights_are_kept(packed: list[str]) -> None:
    for precision in PRECISIONS:
        _skip_without(precision)
    packed.clear()
    model, x = model_of_layers(), torch.randn(2, 20)
    expected, results = model(x), []
    for precision in ("int8", "int8", "bf16", "fp32", "int8"):
        fastgen.enable(packed_weights="keep", weight_dtype=precision)
        with FastLayers.of(model, KINDS):
            assert _precisions(model)[0] == (precision if precision != "fp32" or choose.is_available() else None)
            results.append(model(x))
        torch.testing.assert_close(results[-1], expected, atol=1e-4, rtol=1e-5) if precision == "fp32" else None
        assert precision == "fp32" or _is_near(results[-1], expected)
    assert packed[:6] == ["int8"] * 3 + ["bf16"] * 3  # kept for the second call
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[4])
    assert not torch.equal(results[0], results[2])


def test_switching_groups_while_weights_are_kept(packed: list[str]) -> None:
    _skip_without("int4")
    model, x = nn.Sequential(nn.Linear(128, 40)), torch.randn(3, 128)
    results = []
    for group_size in (32, 128, 32):
        fastgen.enable(weight_dtype="int4", weight_group_size=group_size, packed_weights="keep")
        with FastLayers.of(model, KINDS):
            results.append(model(x))
    fastgen.enable(weight_group_size=64)
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    assert packed == ["int4"] * 3


@pytest.mark.parametrize(
    "change",
    [{"weight_dtype": "fp32"}, {"weight_dtype": "int8"}, {"packed_weights": "call"}, {"weight_group_size": 32}],
)
def test_copies_go_when_they_are_no_longer_asked_for(packed: list[str], change: dict[str, Any]) -> None:
    """Also those of a model that does not generate again."""
    _skip_without("int4")
    fastgen.enable(weight_dtype="int4", packed_weights="keep", weight_group_size=64)
    model = nn.Sequential(nn.Linear(128, 40))
    with FastLayers.of(model, KINDS):
        model(torch.randn(3, 128))
    fastgen.enable(captured_step="auto")
    assert any(each.copy is not None for each in derived_weights.known())
    fastgen.enable(**change)
    assert not any(each.copy is not None for each in derived_weights.known())
    fastgen.enable(weight_group_size=64)


def test_a_model_changes_its_type_while_weights_are_kept(packed: list[str]) -> None:
    _skip_without("int8")
    fastgen.enable(weight_dtype="int8", packed_weights="keep")
    model, x = nn.Sequential(nn.Linear(128, 40)), torch.randn(3, 128)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        expected = model(x.to(dtype))
        with FastLayers.of(model, KINDS):
            result = model(x.to(dtype))
        assert result.dtype is dtype and not torch.equal(result, expected)
        assert ((result - expected).norm() / expected.norm()).item() < 0.03
    assert packed == ["int8"] * 4
    assert fastgen.stats() == {"int8 weights": {"accelerated": 4, "fallback": {}}}


@pytest.mark.parametrize("mode", ["call", "keep"])
def test_models_that_share_a_layer(precision: str, mode: str) -> None:
    """The one that ends first leaves the other its low-bit weights."""
    fastgen.enable(packed_weights=mode)
    shared, x = nn.Linear(128, 40), torch.randn(3, 128)
    model, other = nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())
    expected = model(x)
    with FastLayers.of(model, KINDS):
        rounded = model(x)
    for _ in range(2):
        first, second = FastLayers.of(model, KINDS), FastLayers.of(other, KINDS)
        first.__enter__()
        with second:
            assert torch.equal(model(x), rounded)
            first.__exit__(None, None, None)
            assert torch.equal(other(x), rounded.relu()) and not torch.equal(rounded, expected)
        assert torch.equal(model(x), expected) and "forward" not in vars(shared)


def test_switching_in_the_middle_of_a_call(precision: str, packed: list[str]) -> None:
    model, x = model_of_layers(), torch.randn(2, 20)
    with FastLayers.of(model, KINDS):
        first = model(x)
        fastgen.enable(weight_dtype="fp32")
        with FastLayers.of(model, KINDS):  # as a second thread would
            assert torch.equal(model(x), first)
        assert torch.equal(model(x), first)
    assert packed == [precision] * 6  # by both


def test_memory_is_not_used_up(precision: str, packed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer goes on in other numbers: the result would depend on what is free."""
    monkeypatch.setattr(memory, "free_host_memory", lambda: 100)
    model, x = nn.Sequential(nn.Linear(20, 20)), torch.randn(2, 20)
    with FastLayers.of(model, KINDS), pytest.raises(torch.OutOfMemoryError, match=f"weights in {precision}"):
        model(x)
    assert not packed and not any("forward" in vars(layer) for layer in model)


def test_a_processor_that_is_not_fast_stays_in_float32(packed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "unavailable", lambda *asked: "this processor is not fast")
    fastgen.enable(weight_dtype="int8")
    model, x = model_of_layers(), torch.randn(2, 20)
    expected = model(x)
    with FastLayers.of(model, KINDS):
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-5)
    assert "int8" not in packed
    # Once for the call, not for each layer.
    assert fastgen.stats() == {"int8 weights": {"accelerated": 0, "fallback": {"this processor is not fast": 1}}}
    assert (
        "weight_dtype is int8, but this processor is not fast: weights on the CPU stay in float32"
        in fastgen.status().notes
    )
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match="not fast"), FastLayers.of(model, KINDS):
        pass
    assert not any("forward" in vars(layer) for layer in model)


def test_status_says_that_results_are_others(precision: str) -> None:
    assert any(note.startswith(f"weight_dtype is {precision}: results") for note in fastgen.status().notes)
    assert precision in fastgen.status().operators["quantized_linear"]
    fastgen.enable(weight_dtype="fp32")
    assert not any("weight_dtype" in note for note in fastgen.status().notes)
