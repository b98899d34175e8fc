"""`python -m fastgen.fairseq` itself: what can be said of it with and without FairSeq. Its commands: tests/fairseq."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

import fastgen
from fastgen import fairseq


@pytest.fixture
def called(monkeypatch):
    """A FairSeq whose commands say how they were called, and whether FastGen accelerates meanwhile."""
    from fastgen import patching

    calls = []

    def cli_main():
        calls.append((sys.argv, patching.is_active()))

    package, module = ModuleType("fairseq_cli"), ModuleType("fairseq_cli.eval_lm")
    package.__spec__ = importlib.util.spec_from_loader("fairseq_cli", None)
    module.cli_main = cli_main
    monkeypatch.setitem(sys.modules, "fairseq_cli", package)
    monkeypatch.setitem(sys.modules, "fairseq_cli.eval_lm", module)
    monkeypatch.setattr(sys, "argv", ["before"])
    fastgen.enable()  # whatever another test has left
    return calls


@pytest.mark.parametrize("command", ["eval-lm", "eval_lm", "fairseq-eval-lm"])
def test_a_command_gets_its_arguments(called, command):
    assert fairseq.main([command, "data", "--path", "model.pt"]) == 0
    assert called == [(["fairseq-eval-lm", "data", "--path", "model.pt"], True)]


def test_no_fastgen_leaves_generation_alone(called):
    assert fairseq.main(["--no-fastgen", "eval-lm"]) == 0
    assert called == [(["fairseq-eval-lm"], False)]


def test_an_unknown_command_is_one_line(capsys):
    assert fairseq.main(["genrate"]) == 2
    assert capsys.readouterr().err == "python -m fastgen.fairseq: unknown command 'genrate': did you mean generate?\n"


def test_without_fairseq_it_says_how_to_install_it(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fairseq_cli" else find(name))
    assert fairseq.main(["train", "data"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "pip install --no-deps fairseq==0.12.2" in text
