"""Packing pays at once, and what is packed and multiplied is noted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastgen
from fastgen.decoding import layers, products
from fastgen.decoding.layers import FastLayers
from fastgen.ops.linear import bf16x3, gemm


@pytest.fixture(autouse=True)
def packed_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Packing pays for every shape from the first product on; the weights that are packed, in order."""
    packed: list[torch.Tensor] = []
    pack = gemm.pack
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    monkeypatch.setattr(products, "MEASURED_FROM", 1)
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: gemm.Costs(2.0, 1.0, 0.0))
    monkeypatch.setattr(bf16x3, "costs", lambda *shape, measure: bf16x3.Costs(2.0, 9.0))
    monkeypatch.setattr(gemm, "pack", lambda weight: packed.append(weight) or pack(weight))
    monkeypatch.setattr(FastLayers, "_shapes", {})
    fastgen.enable()
    with torch.no_grad():
        yield packed
    fastgen.enable()
    FastLayers.drop_kept()


@pytest.fixture
def rows_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of those with a packed weight, in order."""
    rows: list[int] = []
    product = gemm.packed_linear
    monkeypatch.setattr(gemm, "packed_linear", lambda x, *rest: rows.append(len(x)) or product(x, *rest))
    return rows


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of products with a weight as it is, in order."""
    weights: list[torch.Tensor] = []
    product = gemm.folded_linear
    monkeypatch.setattr(
        linear, "folded_linear", lambda x, weight, bias: weights.append(weight) or product(x, weight, bias)
    )
    return weights
