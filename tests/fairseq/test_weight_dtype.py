"""Weights of 8 bits and in bfloat16 in FairSeq's generation."""

from __future__ import annotations

from typing import Any

import pytest
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen import settings
from fastgen.decoding import layers
from fastgen.ops.linear import choose
from fastgen_cli import fairseq as commands
from tests.fairseq import models
from tests.fairseq.check import accelerated, both


@pytest.mark.parametrize("precision", choose.PRECISIONS)
def test_they_are_used(precision: str, strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = choose.missing(precision)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    model, sample = models.encoder_decoder().eval(), models.sources(4)

    def make() -> SequenceGenerator:
        return SequenceGenerator([model], models.task().target_dictionary, beam_size=3, max_len_b=8)

    with settings.changed(weight_dtype=precision):
        original, ours = both(make, sample)
    assert accelerated() == 1 and fastgen.stats()[f"{precision} weights"]["accelerated"] == 1
    # A model that has learnt nothing may choose another token, but the first is about as likely as it was.
    most = 0.3 if precision == "int4" else 0.2
    for left, right in zip(original, ours, strict=True):
        want, have = left[0]["positional_scores"][0].item(), right[0]["positional_scores"][0].item()
        assert want != have and abs(want - have) < most * abs(want)


@pytest.mark.parametrize(
    ("option", "precision"),
    [
        *((["--weight-dtype", precision], precision) for precision in ("fp32", *choose.PRECISIONS)),
        ([], "fp32"), (["--cpu-weights", "int8"], "int8"), (["--cpu-weights=bf16"], "bf16"),
    ],
    ids=str,
)  # fmt: skip
def test_the_option_of_the_commands(option: list[str], precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def run(cfg: Any, own: Any) -> None:
        seen.append(settings.current().weight_dtype)

    assert commands._command("test", ["data", "--path", "model.pt", *option], "generation", run) == 0
    told = "test: DeprecationWarning: --cpu-weights is now called --weight-dtype\n"
    assert capsys.readouterr().err == (told if "cpu" in "".join(option) else "")
    assert seen == [precision] and settings.current().weight_dtype == "fp32"


def test_a_precision_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "--path", "model.pt", "--weight-dtype", "int2"]
    assert commands._command("test", words, "generation", lambda cfg, own: None) == 2
    assert "int2" in capsys.readouterr().err
