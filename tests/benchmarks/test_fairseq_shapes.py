"""The workloads in FairSeq, made tiny: that they run, and notice what they claim to notice. No time is looked at."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest

import fastgen
from benchmarks.__main__ import run_workload
from benchmarks.workload import Context
from benchmarks.workloads import fairseq_shapes
from benchmarks.workloads.fairseq_shapes import Continuation, InFairSeq, Translation

needs_fairseq = pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="FairSeq is not installed")

_DECODER = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_layers": 2, "decoder_attention_heads": 2}
_ENCODER = {name.replace("decoder", "encoder"): value for name, value in _DECODER.items()}


def tiny() -> list[InFairSeq]:
    translation, continuation = fairseq_shapes.WORKLOADS
    sizes: dict[str, Any] = {"vocabulary": 97, "batch": 3, "repetitions": 2}
    return [
        replace(translation, config={**_ENCODER, **_DECODER}, shortest=4, length=9, new_tokens=9, longest=9, **sizes),
        replace(continuation, config=_DECODER, length=12, new_tokens=5, longest=17, **sizes),
    ]


@needs_fairseq
@pytest.mark.parametrize("workload", tiny(), ids=["translation", "continuation"])
def test_all_backends_do_the_same_work(workload):
    record = run_workload(workload, Context(threads=1))
    assert record.errors == [] and record.notes == [] and record.fallbacks == {}
    assert record.identical is True and record.accelerated is True and record.status == "ok"
    assert set(record.backends) == {"fairseq", "fastgen-fairseq", "fastgen-fairseq-plain"}
    assert all(len(backend["seconds"]) == 2 for backend in record.backends.values())
    assert {"fairseq/fastgen-fairseq", "fairseq/fastgen-fairseq-plain"} == set(record.ratios)


@needs_fairseq
@pytest.mark.parametrize("kind", [Translation, Continuation])
def test_other_hypotheses_are_noticed(monkeypatch, kind):
    generate = kind.generate

    def other(self: Any, *args: Any) -> Any:
        tokens = generate(self, *args)
        if fastgen.stats():  # a patched backend
            tokens[-1, 2] += 1
        return tokens

    monkeypatch.setattr(kind, "generate", other)
    (workload,) = (each for each in tiny() if isinstance(each, kind))
    record = run_workload(workload, Context(threads=1))
    assert record.identical is False and record.status == "different" and len(record.notes) == 4


def test_fairseq_that_is_not_installed_costs_the_row(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairseq", None)
    record = run_workload(tiny()[0], Context(threads=1))
    assert "FairSeq cannot be imported" in record.skipped["fairseq"] and record.status == "ok"
