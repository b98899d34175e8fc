"""Digests of products: the same twice, and of every kernel."""

from __future__ import annotations

import pytest

from benchmarks import product_bits
from fastgen.ops.linear import choose


def test_a_run_gives_the_same_digests_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_bits, "SHAPES", ((48, 64),))
    monkeypatch.setattr(product_bits, "ROWS", (1, 3))
    first, second = (list(product_bits.lines()) for _ in range(2))
    products = [line.rsplit(" | ", 2)[0] for line in first]
    assert first == second and len(set(products)) == len(products)
    names = {product.split(" | ")[0] for product in products}
    every = {f"gemv torch.{dtype} rows" for dtype in ("float32", "bfloat16", "float16")}
    every |= {"gemm torch.float32 rows", "gemm torch.float32 columns", "panels torch.bfloat16", "panels torch.float16"}
    every |= {f"{bits} bits in groups, {of} activations" for bits in (4, 8) for of in ("float", "int8")}
    assert not choose.is_available() or every <= names, every - names
    errors = [float(line.rpartition(" | ")[2]) for line in first]
    assert all(error < 1.0 for error in errors)  # the 4 bits are far from the weight
