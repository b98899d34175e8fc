"""Which product a layer takes, and when a weight is packed: what it costs, and the memory there is."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import fastgen
from fastgen.decoding import host_memory, layers, products
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import bf16x3, gemm, gemv
from tests.decoding.layers.tiny import KINDS, Transposed

pytestmark = pytest.mark.skipif(not gemm.is_available(), reason="the extension was not built")


def test_packing_waits_until_it_pays(packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(2.0, 1.0, 2.5) if measure else None)
    monkeypatch.setattr(products, "MEASURED_FROM", 4)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    with FastLayers.of(model, KINDS):
        for _ in range(5):
            model(x)
        assert not packed_at_once  # known from the fourth product on; after the fifth two seconds have been missed
        model(x)
        assert len(packed_at_once) == 1


@pytest.mark.parametrize(("steps", "packed_after"), [(0, 4), (1, 3), (3, 1), (50, 1)])
def test_packing_does_not_wait_where_it_certainly_pays(
    steps: int, packed_after: int, packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(plain=3.0, packed=1.0, packing=8.0))
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    for _ in range(2):  # what was known of a call ends with it
        packed_at_once.clear()
        with FastLayers.of(model, KINDS) as context:
            context.expect(steps)
            for use in range(1, 6):
                model(x)
                assert bool(packed_at_once) is (use >= packed_after)
    packed_at_once.clear()
    with FastLayers.of(model, KINDS):
        model(x)
    assert not packed_at_once


def test_nothing_is_packed_where_it_is_slower(
    packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "costs", lambda rows, *shape, measure: gemm.Costs(1.0, 0.5 if rows == 2 else 1.0, 0.0))
    model = nn.Sequential(nn.Linear(4, 4))
    with FastLayers.of(model, KINDS):
        model(torch.randn(9, 4))
        assert not packed_at_once
        model(torch.randn(2, 4))
        assert len(packed_at_once) == 1


def test_a_small_gain_is_taken_and_not_packed_for(
    packed_at_once: list[torch.Tensor], rows_of_products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {2: 0.5, 3: 0.97, 4: 1.05}
    monkeypatch.setattr(gemm, "costs", lambda rows, *shape, measure: gemm.Costs(1.0, cost[rows], 0.0))
    model = nn.Sequential(nn.Linear(4, 4))
    with FastLayers.of(model, KINDS):
        for _ in range(50):
            model(torch.randn(3, 4))
        assert not packed_at_once
        for rows in (2, 3, 4):
            model(torch.randn(rows, 4))
    assert rows_of_products == [2, 3]


@pytest.mark.parametrize(
    ("costs", "packs", "streams"),
    [
        (gemm.Costs(4.0, 1.0, 5.0, 2.0), 4, 4),  # each product misses one second, not three
        (gemm.Costs(4.0, 1.95, 0.0, 2.0), None, 8),  # so little better that it is not packed for
        (gemm.Costs(4.0, 3.0, 0.0, 2.0), None, 8),
        (gemm.Costs(1.0, 3.0, 0.0, 2.0), None, 0),
        (gemm.Costs(2.0, 1.0, 3.0, 2.5), 2, 0),
    ],
)
def test_a_weight_as_it_is(
    costs: gemm.Costs,
    packs: int | None,
    streams: int,
    packed_at_once: list[torch.Tensor],
    streamed: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is multiplied with where that is faster than torch's product, until it is packed, which is decided against it."""
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: costs)
    for layer in (nn.Linear(6, 4), Transposed(6, 4)):
        packed_at_once.clear(), streamed.clear()
        model, x = nn.Sequential(layer), torch.randn(2, 3, 6)
        expected = model(x)
        with FastLayers.of(model, KINDS):
            for use in range(8):
                torch.testing.assert_close(model(x), expected)
                assert bool(packed_at_once) is (packs is not None and use >= packs)
        assert len(streamed) == streams


@pytest.mark.parametrize(
    ("costs", "rows", "packed", "kept"),
    [
        (gemm.Costs(4.0, 1.0, 1.0, 3.0, keeping=9.0), 300, 4, False),  # 2.0 with packing, each time
        (gemm.Costs(4.0, 1.0, 1.0, 3.0), 100, 1, True),  # few rows: the second product is with what was packed
        (gemm.Costs(4.0, 1.0, 1.0, 3.0, keeping=9.0), 100, 0, False),
        (gemm.Costs(4.0, 1.0, 2.5, 3.0), 300, 1, True),
        (gemm.Costs(4.0, 1.0, 2.5, 3.0, keeping=4.0), 300, 1, True),
        (gemm.Costs(4.0, 1.0, 2.5, 3.0, keeping=9.0), 300, 0, False),
        (gemm.Costs(4.0, 1.0, 3.5, 1.5), 300, 0, False),
    ],
)
def test_a_weight_may_be_packed_for_one_product(
    costs: gemm.Costs,
    rows: int,
    packed: int,
    kept: bool,
    packed_at_once: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into memory that others have used; a copy that is kept needs memory of its own, which takes time as well."""
    monkeypatch.setattr(host_memory, "is_kept", lambda: True)
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: costs)
    for layer in (nn.Linear(6, 4), Transposed(6, 4)):
        packed_at_once.clear()
        model, x = nn.Sequential(layer), torch.randn(rows, 6)
        expected = model(x)
        with FastLayers.of(model, KINDS) as context:
            for _ in range(4):
                torch.testing.assert_close(model(x), expected)
            (form,) = context._linear_layers()
            assert len(packed_at_once) == packed
            assert (form._weight is not None and form._weight.panels is not None) is kept


@pytest.mark.parametrize(
    ("free", "is_kept", "packed"), [(2 * 4 * 24, True, 3), (2 * 4 * 24 - 1, True, 0), (2 * 4 * 24, False, 0)]
)
def test_no_weight_is_packed_for_one_product_where_memory_is_short(
    free: int, is_kept: bool, packed: int,
    packed_at_once: list[torch.Tensor], streamed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Half of what is free may be used. Where freed memory goes back to the system, the copy would be new each time."""
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(4.0, 1.0, 1.0, 3.0, keeping=9.0))
    monkeypatch.setattr(layers, "free_host_memory", lambda: free)
    monkeypatch.setattr(host_memory, "is_kept", lambda: is_kept)
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(300, 6)
    with FastLayers.of(model, KINDS):
        for _ in range(3):
            model(x)
    assert len(packed_at_once) == packed and len(streamed) == 3 - packed


def test_a_weight_as_it_is_is_not_held(streamed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(2.0, 3.0, 0.0, 1.0))
    fastgen.enable(packed_weights="keep")
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6)
    with FastLayers.of(model, KINDS):
        model(x)
    assert streamed
    streamed.clear()
    weight = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.randn(4, 6))
    gc.collect()
    assert weight() is None


def test_a_weight_as_it_is_where_memory_is_short(
    packed_at_once: list[torch.Tensor], streamed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(4.0, 1.0, 0.0, 2.0))
    monkeypatch.setattr(layers, "free_host_memory", lambda: 0)
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6)
    with FastLayers.of(model, KINDS):
        model(x)
        model[0].weight = nn.Parameter(torch.randn(4, 6))  # another one
        torch.testing.assert_close(model(x), x @ model[0].weight.t() + model[0].bias)
        model[0].weight = None
        model[0].weight = nn.Parameter(torch.randn(4, 6).double())
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)
        model[0].weight = nn.Parameter(torch.randn(4, 6))
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.ReLU())
        torch.testing.assert_close(model(x), x @ model[0].weight.t() + model[0].bias)
    assert not packed_at_once and len(streamed) == 2


@pytest.mark.parametrize(
    "change", [lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_device("meta")]
)
def test_measuring_does_not_depend_on_the_defaults(change: object) -> None:
    try:
        change()
        timing = gemm._measure(2, 16, 16, False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(0 < seconds < 10 for seconds in timing)


def test_memory_is_not_used_up(packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "free_host_memory", lambda: 2 * 100 * 4)
    model, x = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), torch.randn(2, 10)
    expected = model(x)
    with FastLayers.of(model, KINDS):
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    assert len(packed_at_once) == 1
    assert layers.free_host_memory() == 800


def test_calls_that_begin_while_others_run_do_not_use_up_the_memory(
    packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "free_host_memory", lambda: 2 * 100 * 4)
    model, x = nn.Sequential(nn.Linear(10, 10)), torch.randn(2, 10)
    with FastLayers.of(model):
        for _ in range(3):
            with FastLayers.of(model):
                model(x)
    assert len(packed_at_once) == 3


@pytest.mark.skipif(not gemv.is_available(), reason="there is no kernel for dot products")
@pytest.mark.parametrize("kind", [nn.Linear, Transposed])
@pytest.mark.parametrize(("dots", "packs", "multiplies"), [(0.9, False, True), (1.4, True, False), (0.98, False, True)])
def test_dot_products_serve_few_rows_without_packing(
    kind: type[nn.Module], dots: float, packs: bool, multiplies: bool,
    packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A weight is packed for what packing saves of the time of dot products, not of torch's product."""
    found: list[int] = []
    product = gemv.gemv
    monkeypatch.setattr(gemv, "dot_linear", lambda x, *rest: found.append(len(x)) or product(x, *rest))

    def costs(rows: int, *shape: object, measure: bool) -> gemm.Costs:
        return gemm.Costs(2.0, 0.95, 0.0, streamed=1.5, dots=dots if rows <= gemm.MAX_DOT_ROWS else math.inf)

    monkeypatch.setattr(gemm, "costs", costs)
    model, few, many = nn.Sequential(kind(20, 12)), torch.randn(3, 20), torch.randn(25, 20)
    expected = model(few)
    with FastLayers.of(model, KINDS):
        torch.testing.assert_close(model(few), expected)
        assert bool(packed_at_once) is packs and bool(found) is multiplies
        packed_at_once.clear()
        torch.testing.assert_close(model(many)[:1], model(many[:1]))
    assert set(found) <= {1, 3}


def test_a_way_that_is_not_known_waits(packed_at_once: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What products in parts of bfloat16 cost decides whether a weight is packed."""
    monkeypatch.setattr(bf16x3, "costs", lambda *shape, measure: None)
    monkeypatch.setattr(bf16x3, "is_available", lambda: True)
    model = nn.Sequential(nn.Linear(4, 4))
    with FastLayers.of(model, KINDS):
        model(torch.randn(bf16x3.MIN_ROWS, 4))
    assert not packed_at_once
