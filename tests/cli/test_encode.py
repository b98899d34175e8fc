"""The command lines of `fastgen-embed` and `fastgen-classify`: what they print, and their exit statuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fastgen
from fastgen_cli import encode
from tests.equivalence.encoder_models import build, tokenizer
from tests.pipeline import tiny
from tests.pipeline.children import interrupted_after

FAST = ["--device", "cpu", "--batch-size", "4"]
COMMANDS = {"embed": (encode.embed, "npy"), "classify": (encode.classify, "csv")}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("bert"), labels=3)


def call(name, *words):
    return COMMANDS[name][0]([str(word) for word in words])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_from_end_to_end(name, model, inputs, tmp_path, capsys):
    form = COMMANDS[name][1]
    source, out, report = tmp_path / "some.txt", tmp_path / f"out.{form}", tmp_path / "report.json"
    source.write_text(inputs.read_text() + "\n" + "A" * 500 + "\n")
    fastgen.reset_stats()
    assert call(name, model, source, out, *FAST, "--report", report) == 1
    said = capsys.readouterr().err
    assert "41 samples in" in said and "the model waited" in said
    assert f"fastgen-{name}: 1 of 41 inputs were cut" in said
    assert f"fastgen-{name}: 1 of 42 records skipped: see {out}.errors.jsonl" in said
    # Texts of about one length share a batch, so most batches have no padding to leave out.
    last = said.splitlines()[-1]
    assert last.startswith(f"{out}: 41 records, 1 skipped in ")
    assert re.search(r"; accelerated by FastGen: \d of 1\d calls; the others: .* \(\d+ calls?\)$", last)
    assert json.loads(report.read_text())["truncated"] == 1
    if form == "npy":
        assert np.load(out).shape == (42, 32)
    else:
        assert len(out.read_text().splitlines()) == 42
    assert call(name, model, inputs, tmp_path / f"good.{form}", *FAST, "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert call(name, model, source, tmp_path / f"strict.{form}", *FAST, "--quiet", "--strict") == 1
    assert "line 41: the text is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_says_how_to_continue(name, model, inputs, tmp_path, one_line):
    from fastgen.pipeline.encoding.run import EncodingStage

    form = COMMANDS[name][1]
    words = [model, inputs, tmp_path / f"out.{form}", *FAST, "--quiet"]
    with interrupted_after(2, EncodingStage):
        assert call(name, *words) == 130
    said = one_line()
    assert said.startswith(f"fastgen-{name}: interrupted; to continue: fastgen-{name} --resume ")
    assert call(name, *said.split(f"to continue: fastgen-{name} ")[1].split()) == 0
    assert call(name, *words[:2], tmp_path / f"whole.{form}", *words[3:]) == 0
    assert (tmp_path / f"out.{form}").read_bytes() == (tmp_path / f"whole.{form}").read_bytes()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_last_line_says_why_nothing_was_accelerated(name, model, inputs, tmp_path, capsys):
    longformer = tmp_path / "longformer"
    build("Longformer", "SequenceClassification" if name == "classify" else "").save_pretrained(longformer)
    tokenizer().save_pretrained(longformer)
    for folder, words, reason in (
        (model, ["--no-fastgen"], "FastGen is disabled (--no-fastgen or FASTGEN_DISABLE=1)"),
        (longformer, [], "FastGen does not know the layers of this model"),
    ):
        fastgen.reset_stats()
        words = [folder, inputs, tmp_path / f"{folder.name}.{COMMANDS[name][1]}", *FAST, *words]
        assert call(name, *words) == 0
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"; not accelerated: {reason}")
        fastgen.enable()
