"""Forms of layers: which layers have one, for how long, and what happens to weights that change."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import fastgen
from fastgen.decoding import layers
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose, copies
from tests.decoding.layers.tiny import KINDS, is_replaced, model_of_layers

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")


@pytest.mark.parametrize("mode", ["call", "keep"])
def test_a_weight_of_another_size(mode: str) -> None:
    fastgen.enable(packed_weights=mode)
    model, x = nn.Sequential(nn.Linear(64, 50, bias=False)), torch.randn(3, 64)
    for during, after in ((51, 52), (50, 53)):
        with FastLayers.of(model, KINDS):
            torch.testing.assert_close(model(x), x @ model[0].weight.t())
            model[0].weight = nn.Parameter(torch.randn(during, 64))
            torch.testing.assert_close(model(x), x @ model[0].weight.t())
        model[0].weight = nn.Parameter(torch.randn(after, 64))


def test_a_weight_that_is_cast_runs_on_the_original() -> None:
    before = fastgen.stats()
    model, x = model_of_layers(), torch.randn(2, 20)
    with FastLayers.of(model, KINDS):
        model(x)
        model.double()
        assert torch.equal(model(x.double()), model(x.double()))
        assert model(x.double()).dtype is torch.float64
        model.bfloat16()
        assert model(x.bfloat16()).dtype is torch.bfloat16
        model.float()
        assert model(x).dtype is torch.float32
    assert fastgen.stats() == before


def test_copies_are_kept_only_if_asked_for(packed: list[str]) -> None:
    model, x = model_of_layers(), torch.randn(2, 20)
    for mode, count in (("call", 3), ("call", 6), ("keep", 9), ("keep", 9)):
        fastgen.enable(packed_weights=mode)
        with FastLayers.of(model, KINDS):
            model(x)
        assert len(packed) == count, mode
        assert not is_replaced(model[0])
    model[0].weight.mul_(2)
    with FastLayers.of(model, KINDS):
        model(x)
    assert len(packed) == 10
    fastgen.disable()
    fastgen.enable()
    with FastLayers.of(model, KINDS):
        model(x)
    assert len(packed) == 13


@pytest.mark.parametrize(("mode", "notes"), [("call", 0), ("keep", 1), ("never", 1)])
def test_status_says_how_weights_are_packed(mode: str, notes: int) -> None:
    fastgen.enable(packed_weights=mode)
    assert [note.startswith(f"packed_weights is {mode}: ") for note in fastgen.status().notes] == [True] * notes


def test_kept_weights_go_with_the_model() -> None:
    fastgen.enable(packed_weights="keep")
    model = model_of_layers()
    with FastLayers.of(model, KINDS):
        model(torch.randn(2, 20))
    layer = weakref.ref(model[0])
    del model
    gc.collect()
    assert layer() is None


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _replaced(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda x: x
    return layer


def _strided_bias() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(torch.randn(8)[::2])
    return layer


class OtherTensor(torch.Tensor):
    """What a quantised or a tensor-parallel layer has for a weight."""


def _other_weight() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(OtherTensor))
    return layer


def _frozen_in_inference() -> nn.Linear:
    with torch.inference_mode():
        return nn.Linear(4, 4)


@pytest.mark.parametrize(
    "layer",
    [
        Doubled(4, 4),
        _replaced(nn.Linear(4, 4)),
        nn.Linear(4, 4).double(),
        nn.Linear(4, 4, device="meta"),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.utils.weight_norm(nn.Linear(4, 4)),
        nn.utils.prune.identity(nn.Linear(4, 4), "weight"),
        _strided_bias(),
        _other_weight(),
        _frozen_in_inference(),
        torch.ao.nn.quantized.dynamic.Linear(4, 4),
        nn.Embedding(4, 4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_are_more_than_their_weight_are_left_alone(layer: nn.Module) -> None:
    before = vars(layer).get("forward")
    model = nn.Sequential(layer, nn.Linear(4, 4))
    with FastLayers.of(model, KINDS):
        assert vars(layer).get("forward") is before
        assert is_replaced(model[1])
    assert vars(layer).get("forward") is before
    assert not is_replaced(model[1])


def test_what_is_not_a_plain_product_runs_on_the_original(multiplied: list[tuple[str, int]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with FastLayers.of(model, KINDS):
        with torch.enable_grad():
            assert model(x).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype is torch.bfloat16
        with fastgen.disabled():
            model(x)
        assert model(torch.empty(0, 4)).shape == (0, 4)
        assert torch.equal(model[0](input=x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert not multiplied
        model(x)
        assert [rows for _, rows in multiplied] == [2]


def test_a_copy_made_meanwhile_is_a_model_of_its_own() -> None:
    model, x = model_of_layers(), torch.randn(2, 20)
    with FastLayers.of(model, KINDS):
        model(x)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
    expected = model(x)
    model[0].weight.zero_()
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert not any(is_replaced(layer) for layer in other)
        torch.testing.assert_close(other(x), expected, atol=1e-5, rtol=1e-5)
        with FastLayers.of(other, KINDS):
            other(x)
            assert any(is_replaced(layer) for layer in other)
        assert not any("forward" in vars(layer) for layer in other)


def test_a_layer_that_fails_does_what_it_always_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is counted; in strict mode it raises."""

    def broken(*given: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(choose, "kernel_for", broken)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    expected = model(x)
    fastgen.reset_stats()
    with FastLayers.of(model, KINDS):
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert fastgen.stats()["linear layer"]["fallback"] == {"RuntimeError: planted": 1}
    fastgen.enable(strict=True)
    with FastLayers.of(model, KINDS), pytest.raises(fastgen.FallbackError, match="planted"):
        model(x)


def test_entering_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of_layers(), []

    def broken(module: nn.Module, *rest: object) -> bool:
        calls.append(module)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return True

    monkeypatch.setattr(layers, "is_plain", broken)
    with pytest.raises(RuntimeError, match="planted"), FastLayers.of(model, KINDS):
        pass
    assert not any(is_replaced(layer) for layer in model)
    with FastLayers.of(model, KINDS):
        assert is_replaced(model[0])
    assert not any(is_replaced(layer) for layer in model)


def test_what_has_been_replaced_between_two_calls_is_not_put_back() -> None:
    fastgen.enable(packed_weights="keep")
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    with FastLayers.of(model, KINDS):
        model(x)
    model[0].forward = mine = lambda x: x + 1
    model[1].__class__ = Doubled
    nn.utils.parametrizations.orthogonal(model[2])
    expected = model(x)
    with FastLayers.of(model, KINDS):
        assert torch.equal(model(x), expected)
    assert vars(model[0])["forward"] is mine
    fastgen.enable(packed_weights="never")
    with FastLayers.of(model, KINDS):
        assert not any(is_replaced(layer) for layer in model)


def test_a_wrapper_made_meanwhile_ends_in_the_ordinary_forward() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    with FastLayers.of(model, KINDS):
        model(x)
        inner = model[0].forward
        model[0].forward = lambda x: inner(x) * 2
    model[0].weight.data.zero_()
    assert torch.equal(model(x), (2 * model[0].bias).expand(2, 4))


class Spelled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_layers_without_a_state_use_the_function_that_they_are() -> None:
    model, x, calls = nn.Sequential(Spelled(), nn.ReLU()), torch.randn(2, 4), []
    functions = {Spelled: lambda y: calls.append(y) or y.square()}
    expected = model(x)
    with FastLayers.of(model, KINDS, functions):
        torch.testing.assert_close(model(x), expected)
        assert len(calls) == 1
        with fastgen.disabled():
            model(x)
        with torch.enable_grad():
            model(x)
        model(x.double())
        model[0](x=x)
        assert len(calls) == 1
    assert not vars(model[0]).get("forward") and not vars(model[1]).get("forward")


def test_a_copy_made_before_a_call_began_is_not_used_in_it(packed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the other call finishes making it after the new one has begun."""
    model, x, pack = nn.Sequential(nn.Linear(40, 40)), torch.randn(2, 40), copies.pack
    second = FastLayers.of(model)

    def interrupted(weight: torch.Tensor, *form: object) -> object:
        found = pack(weight, *form)
        monkeypatch.setattr(copies, "pack", pack)
        weight.data.mul_(2)
        second.__enter__()
        return found

    monkeypatch.setattr(copies, "pack", interrupted)
    with FastLayers.of(model):
        model(x)
        expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        assert ((model(x) - expected).norm() / expected.norm()).item() < 0.03
        second.__exit__(None, None, None)
    assert len(packed) == 2 and not is_replaced(model[0])


def test_a_call_of_another_model_that_shares_layers_sees_the_weights_of_now(packed: list[str]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    other = nn.ModuleList([model])
    with FastLayers.of(model):
        model(x)
        model[0].weight.data.mul_(2)
        with FastLayers.of(other):
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
            assert ((model(x) - expected).norm() / expected.norm()).item() < 0.03
    assert len(packed) == 2
