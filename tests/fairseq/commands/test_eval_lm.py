"""FairSeq's `eval-lm` and FastGen's say the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fairseq_cli import eval_lm as original_eval_lm

from fastgen.decoding import layers
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen_cli import fairseq as commands
from tests.fairseq.commands.world import ROOT, command_of_fairseq, run


@pytest.fixture
def evaluated(monkeypatch) -> list[dict[str, Any]]:
    """What FairSeq's `eval_lm` gives in this process, a call after another."""
    results = []

    def noted(*args: Any, own: Callable[..., Any] = original_eval_lm.eval_lm, **kwargs: Any) -> Any:
        results.append(own(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(original_eval_lm, "eval_lm", noted)
    return results


def test_eval_lm_says_the_same_numbers(language, evaluated, programs):
    """But for the last digit printed: a sum in another order may be rounded to the other side."""
    # FairSeq silently leaves out what is longer than the model takes, and the loss of nothing is zero.
    words = [language.data, "--path", language.model, "--cpu", "--num-workers", 0, "--tokens-per-sample", 32]
    words += ["--context-window", 8]
    command_of_fairseq("--no-fastgen", "eval-lm", *words)
    # A process of its own: what it prints depends on no logger that others have set.
    done = run("fastgen_cli.fairseq", "eval-lm", *words, program=programs / "python")
    printed = done.stdout + done.stderr
    loss, perplexity = map(float, re.search(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", printed).groups())
    assert 1 < loss == pytest.approx(float(evaluated[0]["loss"]), abs=2e-4)
    assert perplexity == pytest.approx(float(evaluated[0]["perplexity"]), rel=2e-4)
    assert re.search(r"Evaluated [1-9]\d* tokens", printed)


def test_eval_lm_with_kernels_of_fastgens(language, evaluated, monkeypatch):
    if choose.instruction_set() is Isa.PORTABLE:
        pytest.skip("all products are torch's on this instruction set")
    products = []
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    chosen = choose.kernel_for
    monkeypatch.setattr(choose, "kernel_for", lambda *given: products.append(1) or chosen(*given))
    words = [str(word) for word in (language.data, "--path", language.model, "--cpu", "--num-workers", 0)]
    words += ["--tokens-per-sample", "32"]
    command_of_fairseq("--no-fastgen", "eval-lm", *words)
    assert not products
    assert commands.eval_lm(words) == 0
    original, ours = (float(result["loss"]) for result in evaluated)
    assert products and 1 < ours == pytest.approx(original, rel=1e-5)


@pytest.mark.long
def test_eval_lm_loses_no_numbers(language):
    """They go to standard error or to standard output, as FairSeq has set up its log."""
    words = ["eval-lm", language.data, "--path", language.model, "--cpu", "--num-workers", 0]
    words += ["--tokens-per-sample", 32]
    command = [sys.executable, "-m", "fastgen_cli.fairseq", *map(str, words)]
    kept = 0
    for closed in (1, 2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, preexec_fn=lambda closed=closed: os.close(closed))
        has_numbers = b"Perplexity" in done.stdout + done.stderr
        assert done.returncode == (0 if has_numbers else 2)
        kept += has_numbers
    assert kept == 1
