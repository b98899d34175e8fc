"""The workloads of commands: what they compare, and what they read from reports and messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import run_workload
from benchmarks.workload import Context
from benchmarks.workloads import commands
from fastgen import fairseq

_OUTPUT = "S-0\ta b\nT-0\tA b\nH-0\t-0.5\tA b .\nD-0\t{score}\t{text}\nP-0\t-0.5\nGenerate test with beam=5: BLEU = 1\n"
_MESSAGES = (
    "1 sentences, 3 tokens in 2.0 s: 0.50 sentences/s, 1.5 tokens/s (and 0.1 s to load)\n"
    "the model waited 3.00 % of the time for input and 1.00 % for post-processing; finishing took 0.50 s more\n"
)
_ALL = {workload.name: workload for workload in commands.WORKLOADS}


def _run(monkeypatch, text: str, messages: str = _MESSAGES):
    """The record of a run whose commands print what they are told to; FastGen's scores differ in their last digits."""

    def command(words, *given):
        own = "--no-fastgen" in words
        output = _OUTPUT.format(score="-0.5" if own else "-0.50000001", text="A b." if own else text)
        return SimpleNamespace(stdout=output, stderr="" if own else messages)

    monkeypatch.setattr(fairseq, "missing", lambda: None)
    monkeypatch.setattr(commands.processes, "run", command)
    return run_workload(replace(_ALL["fairseq-generate-300"], outputs=1, repetitions=2), Context())


def test_the_same_outputs_and_the_waiting(monkeypatch):
    record = _run(monkeypatch, "A b.")
    assert record.identical and not record.errors
    assert record.metrics["waiting_percent"] == pytest.approx(1.0)
    assert record.metrics["held_up_percent"] == pytest.approx(100 * (0.02 + 0.5) / 2.5)
    assert record.metrics["ratio"] > 0
    assert set(record.backends) == {"fairseq", "fastgen-fairseq"}


def test_other_outputs_are_found(monkeypatch):
    record = _run(monkeypatch, "A c.")
    assert record.identical is False and record.notes == ["1 of 4 lines differ"] * 2


def test_a_missing_summary_is_an_error(monkeypatch):
    (error,) = _run(monkeypatch, "A b.", "").errors
    assert "the command does not say how long the model waited" in error


def test_without_fairseq_it_is_skipped(monkeypatch):
    monkeypatch.setattr(fairseq, "missing", lambda: "FairSeq is not installed: pip ...")
    record = run_workload(_ALL["fairseq-generate-300"], Context())
    assert record.skipped == {"fairseq": "FairSeq is not installed: pip ..."} and record.errors == []


@pytest.mark.parametrize("is_same", [True, False])
def test_the_report_of_a_command_is_read(tmp_path, monkeypatch, is_same):
    (tmp_path / "inputs.txt").write_text("one\ntwo\nthree\n")
    calls = []

    def command(words, *given):
        calls.append(words)
        own = "--no-fastgen" in words
        text = Path(words[4]).read_text().upper()
        Path(words[5]).write_text(text if own or is_same else text.lower())
        report = {
            "seconds": {"generate": 9.0, "finish": 1.0, "waiting_for_output": 0.5},
            "fastgen": {"stats": {"transformers.generate": {"accelerated": 0 if own else 3, "fallback": {}}}},
        }
        Path(words[words.index("--report") + 1]).write_text(json.dumps(report))

    monkeypatch.setattr(commands.processes, "run", command)
    record = run_workload(replace(_ALL["pipeline-2000"], outputs=7, inputs=tmp_path / "inputs.txt"), Context())
    assert record.errors == [] and record.identical is is_same and record.accelerated is True
    assert len(calls) == 2 and "--no-fastgen" in calls[0] and "--detokenizer" in calls[1]
    assert record.backends["fastgen"]["seconds"] == [10.0]
    assert record.metrics["waiting_percent"] == pytest.approx(100 * 0.5 / 9)
    assert record.metrics["held_up_percent"] == pytest.approx(15.0)
