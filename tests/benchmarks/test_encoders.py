"""The workloads of encoders, on models of one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.__main__ import run_workload
from benchmarks.workload import Context
from benchmarks.workloads import encoders
from fastgen import settings

_ALL = {workload.name: workload for workload in encoders.WORKLOADS}


def tiny(name: str) -> encoders.Encoding:
    workload = _ALL[name]
    return replace(workload, config={"num_hidden_layers": 1}, batch=6, length=40, of_a_batch=4, repetitions=1)


@pytest.mark.parametrize("name", ["encoder-minilm", "encoder-latency-10"])
def test_states_are_measured_and_agree(name):
    record = run_workload(tiny(name), Context(threads=1))
    assert record.errors == [] and record.identical is True and record.status == "ok"
    assert list(record.backends) == ["transformers", "fastgen-zero-padding"] and record.metrics["ratio"] > 0
    assert 0 <= record.metrics["difference"] <= 1e-5


def test_nan_is_another_result(monkeypatch):
    """Also in a later batch than the first."""
    generate = encoders.Encoding.generate

    def with_nan(self, model, inputs, new_tokens=0):
        states = generate(self, model, inputs, new_tokens)
        if settings.current().padding == "zero":
            states[-1] = float("nan")
        return states

    monkeypatch.setattr(encoders.Encoding, "generate", with_nan)
    record = run_workload(tiny("encoder-minilm"), Context(threads=1))
    assert record.identical is False and record.status == "different"
