"""Layers of any size have a faster form, and the rows of what a kernel multiplies are noted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastgen
from fastgen.decoding import derived_weights, layers
from fastgen.ops.linear import choose, copies
from tests.noting import noted


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    fastgen.enable()
    with torch.no_grad():
        yield
    fastgen.enable(weight_dtype="fp32", packed_weights="call")
    derived_weights.drop_all()


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernel and the rows of each product of FastGen's, in order."""
    found: list[tuple[str, int]] = []
    chosen = choose.kernel_for

    def kernel_for(x: torch.Tensor, *rest: torch.Tensor | None) -> choose.Kernel | None:
        kernel = chosen(x, *rest)
        if kernel is not None:
            found.append((kernel.name, x.numel() // x.shape[-1]))
        return kernel

    monkeypatch.setattr(choose, "kernel_for", kernel_for)
    return found


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers multiply with copies in 8 bits; the precisions of the copies that are made, in order."""
    reason = choose.unavailable("int8")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(layers, "MIN_NARROW", 0)
    fastgen.enable(weight_dtype="int8")
    return noted(monkeypatch, copies, "pack", lambda weight, precision, *more: precision)
