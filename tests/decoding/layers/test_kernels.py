"""Linear layers on their weight: which kernel multiplies, and what is left to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastgen
from fastgen.decoding import layer_forms
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa, Layout
from tests.decoding.layers.tiny import KINDS, Transposed

pytestmark = pytest.mark.skipif(
    choose.instruction_set() is Isa.PORTABLE, reason="all products are torch's on this instruction set"
)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Multiplied = list[tuple[str, int]]


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def layer(dtype: torch.dtype = torch.float32, **options: bool) -> nn.Linear:
    return nn.Linear(40, 30, **options).to(dtype)


def expected(dtype: torch.dtype, rows: int, layout: Layout = Layout.ROWS) -> Multiplied:
    name = choose.name_of(dtype, layout, rows)
    return [(name, rows)] if name in choose.KERNELS else []


def _noting_dtypes(forward: Callable[..., torch.Tensor], called: list[torch.dtype]) -> Callable[..., torch.Tensor]:
    def noting(module: nn.Module, x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        called.append(x.dtype)
        return forward(module, x, *rest)

    return noting


@pytest.mark.parametrize("biased", [True, False])
def test_is_the_layer(biased: bool, dtype: torch.dtype, multiplied: Multiplied) -> None:
    """Rounded once. Hooks run around it."""
    model = nn.Sequential(layer(dtype, bias=biased))
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(result))
    for shape in ((1, 40), (4, 4, 40), (17, 40), (5, 4, 40), (40,), (0, 40), (300, 40)):
        x = torch.randn(*shape).to(dtype)
        with FastLayers.of(model, KINDS):
            y = model(x)
        exact = nn.functional.linear(x.double(), *(parameter.double() for parameter in model.parameters()))
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)
        assert y.dtype is dtype and seen[-1] is y
    assert multiplied == [each for rows in (1, 16, 17, 20, 1, 300) for each in expected(dtype, rows)]
    assert "forward" not in vars(model[0])


def test_a_weight_whose_outputs_are_adjacent(dtype: torch.dtype, multiplied: Multiplied) -> None:
    """GPT-2's kind of layer stores [inputs, outputs]."""
    model = nn.Sequential(Transposed(40, 30)).to(dtype)
    for rows in (1, 2, 40):
        x = torch.randn(rows, 40).to(dtype)
        exact = copy.deepcopy(model).double()(x.double())
        with FastLayers.of(model, KINDS):
            y = model(x)
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)
    assert multiplied == [each for rows in (1, 2, 40) for each in expected(dtype, rows, Layout.COLUMNS)]


@pytest.mark.parametrize("is_multiplied", [True, False], ids=["with instructions", "without"])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_in_half_precision(
    dimensions: int, is_multiplied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without instructions for half precision it is computed in float32, and rounded once."""
    monkeypatch.setattr(choose, "instruction_set", lambda: Isa.AVX512_BF16 if is_multiplied else Isa.AVX2)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    layer = kind(6, 4, 3, stride=2, padding=1, padding_mode="reflect", groups=2, bias=dimensions != 2).to(dtype)
    model, x = nn.Sequential(layer), torch.randn(2, 6, *(9, 7, 5)[:dimensions]).to(dtype)
    before, called = model(x), []
    monkeypatch.setattr(kind, "_conv_forward", _noting_dtypes(kind._conv_forward, called))
    with FastLayers.of(model, KINDS):
        found = model(x)
    assert called == [torch.float32 if not is_multiplied else dtype]
    if not is_multiplied:
        exact = kind.forward(copy.deepcopy(layer).float(), x.float())
        assert torch.equal(found, exact.to(dtype))
    torch.testing.assert_close(found, before, rtol=2e-2, atol=2e-2)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: fastgen.enable(packed_weights="never"),
        lambda model: model.__setitem__(0, Scaled(40, 30)),
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        lambda model: model.double(),
        lambda model: model[0].register_parameter("weight", nn.Parameter(torch.randn(60, 80)[::2, ::2])),
    ],
    ids=["never", "a class of its own", "parametrized", "float64", "gaps"],
)
def test_all_else_is_torchs(change: Callable[[nn.Module], object], multiplied: Multiplied) -> None:
    model = nn.Sequential(layer())
    change(model)
    for some in (2, 20):
        x = torch.randn(some, 40).to(next(model.parameters()).dtype)
        wanted = model(x)
        with FastLayers.of(model, KINDS):
            torch.testing.assert_close(model(x), wanted)
    assert not multiplied


def test_what_is_captured_is_torchs(dtype: torch.dtype, multiplied: Multiplied) -> None:
    model = nn.Sequential(layer(dtype))
    with FastLayers.of(model, KINDS), layer_forms.plain_linear():
        model(torch.randn(2, 40).to(dtype))
        model(torch.randn(20, 40).to(dtype))
    assert not multiplied


def test_a_weight_that_changes(dtype: torch.dtype, multiplied: Multiplied) -> None:
    """In place, in the place of another, and to one that only torch multiplies with."""
    model, x = nn.Sequential(layer(dtype)), torch.randn(2, 40).to(dtype)
    one = len(expected(dtype, 2))

    def check(count: int) -> None:
        close = torch.finfo(dtype).eps
        torch.testing.assert_close(
            model(x), nn.functional.linear(x, model[0].weight, model[0].bias), rtol=close + 1e-5, atol=close + 1e-5
        )
        assert len(multiplied) == count

    with FastLayers.of(model, KINDS):
        check(one)
        model[0].weight.data.mul_(2)
        check(2 * one)
        model[0].weight = nn.Parameter(torch.randn(30, 40).to(dtype))
        check(3 * one)
        model[0].weight.data = torch.randn(40, 30).to(dtype).t()
        check(3 * one + len(expected(dtype, 2, Layout.COLUMNS)))
        model[0].weight.data = torch.randn(30, 40).to(dtype)
        count = len(multiplied) + one
        check(count)
        model[0].bias = None
        check(count + one)
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.ReLU())
        check(count + one)


class Doubled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is nn.functional.linear else result


def test_a_bias_that_changes(multiplied: Multiplied) -> None:
    """The weight stays: in place, in the place of another, to one that only torch adds, and back."""
    model, x = nn.Sequential(layer()), torch.randn(2, 40)
    one = len(expected(torch.float32, 2))
    with FastLayers.of(model, KINDS):
        for change, count in (
            (lambda bias: bias, one),
            (lambda bias: nn.Parameter(bias.detach() + 3), 2 * one),
            (lambda bias: Doubled(bias.detach() + 3), 2 * one),
            (lambda bias: nn.Parameter(bias.detach().as_subclass(torch.Tensor) + 3), 3 * one),
        ):
            model[0].bias = change(model[0].bias)
            torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
            assert len(multiplied) == count
        model[0].bias.data.mul_(2)
        torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_a_weight_of_another_type_fails_as_without_fastgen() -> None:
    model, x = nn.Sequential(layer()), torch.randn(2, 40)
    with FastLayers.of(model, KINDS):
        model[0].weight = nn.Parameter(torch.randn(30, 40).double())
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)


def test_a_bias_that_becomes_an_attribute_counts() -> None:
    model, x = nn.Sequential(layer(bias=False)), torch.randn(2, 40)
    with FastLayers.of(model, KINDS):
        model(x)
        del model[0]._parameters["bias"]
        model[0].bias = torch.randn(30)
        torch.testing.assert_close(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_a_weight_that_another_thread_replaces(multiplied: Multiplied, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes while another one looks at the new weight does not take the old answer for it."""
    model, x = nn.Sequential(layer(bias=False)), torch.randn(2, 40)
    looks, inner = layer_forms.is_plain, []

    def interrupted(*given: object) -> bool:
        monkeypatch.setattr(layer_forms, "is_plain", looks)
        inner.append(model(x))  # as another thread would
        return looks(*given)

    with FastLayers.of(model, KINDS):
        model(x)
        assert multiplied
        multiplied.clear()
        with torch.inference_mode():
            model[0].weight = nn.Parameter(torch.randn(30, 40))  # torch's product alone is for such a weight
        monkeypatch.setattr(layer_forms, "is_plain", interrupted)
        model(x)
    assert len(inner) == 1 and not multiplied
