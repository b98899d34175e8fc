"""Digests of products: the same twice, others where a result is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import product_bits
from fastgen.ops.linear import gemm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_bits, "SHAPES", ((48, 64),))
    monkeypatch.setattr(product_bits, "ROWS", (1, 3))


def test_a_run_gives_the_same_digests_twice() -> None:
    first, second = (list(product_bits.measured()) for _ in range(2))
    assert first == second and len({line["product"] for line in first}) == len(first)
    names = {line["product"].split(" | ")[0] for line in first}
    every = {f"{kind} {of}" for kind in ("gemv", "panels", "upcast") for of in ("bf16", "f16")}
    every |= {"gemv f32", "gemm f32", "gemm f32, columns"}
    every |= {f"{bits} bits in groups, {of} activations" for bits in (4, 8) for of in ("float", "int8")}
    assert not gemm.is_available() or every - {"upcast bf16", "upcast f16"} <= names, every - names
    assert all(line["error"] < 1.0 for line in first)  # the 4 bits are far from the weight


def test_another_result_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {line["product"]: line for line in product_bits.measured()}
    monkeypatch.setattr(product_bits, "record", lambda file: lines)
    old, (one, *_) = tmp_path / "old.jsonl", lines
    old.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    words = [str(tmp_path / "new.jsonl"), "--against", str(old)]
    assert product_bits.main(words) == 0 and "all have the same bits" in capsys.readouterr().out
    lines = {**lines, one: {**lines[one], "digest": "another"}}
    assert product_bits.main(words) == 1
    assert f"other bits: {one}" in capsys.readouterr().out
