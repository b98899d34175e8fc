"""The workload of FairSeq's command, made tiny: what it compares, and what it reads from the messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.workload import Context
from benchmarks.workloads import fairseq_command
from fastgen import fairseq

_OUTPUT = "S-0\ta b\nT-0\tA b\nH-0\t-0.5\tA b .\nD-0\t{score}\t{text}\nP-0\t-0.5\nGenerate test with beam=5: BLEU = 1\n"
_MESSAGES = (
    "1 sentences, 3 tokens in 2.0 s: 0.50 sentences/s, 1.5 tokens/s (and 0.1 s to load)\n"
    "the model waited 3.00 % of the time for input and 1.00 % for post-processing; finishing took 0.50 s more\n"
)


class _Done:
    returncode = 0

    def __init__(self, stdout: str, stderr: str) -> None:
        self.stdout, self.stderr = stdout, stderr


def _run(monkeypatch, text: str, messages: str = _MESSAGES):
    """The record of a run whose commands print what they are told to; FastGen's scores differ in their last digits."""

    def command(words, **options):
        own = "--no-fastgen" in words
        output = _OUTPUT.format(score="-0.5" if own else "-0.50000001", text="A b." if own else text)
        return _Done(output, "" if own else messages)

    monkeypatch.setattr(fairseq, "missing", lambda: None)
    monkeypatch.setattr(fairseq_command.subprocess, "run", command)
    workload = replace(fairseq_command.WORKLOADS[0], outputs=1)
    record = workload.new_record()
    workload.run(Context(), record)
    return record


def test_the_same_outputs_and_the_waiting(monkeypatch):
    record = _run(monkeypatch, "A b.")
    assert record.identical and not record.errors
    assert record.metrics["waiting_percent"] == 1.0
    assert record.metrics["held_up_percent"] == pytest.approx(100 * (0.02 + 0.5) / 2.5)
    assert record.metrics["ratio"] > 0
    assert set(record.backends) == {record.baseline, record.subject}


def test_other_outputs_are_found(monkeypatch):
    record = _run(monkeypatch, "A c.")
    assert record.identical is False
    assert set(record.notes) == {"2 lines are in one output only"}


def test_a_missing_summary_is_an_error(monkeypatch):
    assert _run(monkeypatch, "A b.", "").errors == ["the command does not say how long the model waited"]


def test_without_fairseq_it_is_skipped(monkeypatch):
    monkeypatch.setattr(fairseq, "missing", lambda: "FairSeq is not installed: pip ...")
    workload = fairseq_command.WORKLOADS[0]
    record = workload.new_record()
    workload.run(Context(), record)
    assert record.skipped == {record.baseline: "FairSeq is not installed: pip ..."}
