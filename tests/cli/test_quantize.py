"""The command line of `fastgen-quantize`: what it understands, what it prints, and its exit status."""

from __future__ import annotations

import dataclasses
import json
import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import fastgen
from fastgen.pipeline.quantizing import QuantizeOptions
from fastgen.pipeline.quantizing import run as running
from fastgen.quantization import report
from fastgen_cli.quantize import build_parser, main

FAST = ["--group-size", "16", "--samples", "4", "--sample-length", "32", "--device", "cpu"]


@pytest.fixture
def no_picture(monkeypatch):
    """Drawing the report takes longer than quantising a tiny model."""
    monkeypatch.setattr(report, "png", lambda values: b"")


def call(*words):
    return main([str(word) for word in words])


def test_every_option_is_on_the_command_line():
    found = {action.dest for action in build_parser()._actions}
    assert {field.name for field in dataclasses.fields(QuantizeOptions)} <= found
    given = build_parser().parse_args(
        ["m", "o", "--bits", "8", "--max-error", "0.5", "--asymmetric", "--dtype", "bf16"]
    )
    assert (given.bits, given.max_error, given.asymmetric, given.dtype) == (8, 0.5, True, "bf16")


def test_errors_of_models_and_places_are_one_line(bart, pairs, tmp_path, one_line):
    out = tmp_path / "out"
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([tmp_path / "empty", out, "--calibration", pairs], "cannot be loaded"),
        ([bart, tmp_path / "taken", "--calibration", pairs, *FAST], "was not written by fastgen-quantize"),
        ([bart, tmp_path / "file", "--calibration", pairs, "--overwrite"], "was not written by fastgen-quantize"),
        ([bart, out, "--calibration", pairs, "--calibration-reference", tmp_path / "none"], "none does not exist"),
        (
            [bart, out, "--calibration", pairs, "--calibration-reference", tmp_path / "file"],
            "has 1 lines but the input",
        ),
        (
            [bart, out, "--calibration", pairs, "--output-layer", *FAST],
            "shares its weight with layers other than plain embeddings",
        ),
    ):
        assert call(*words, "--quiet") == 2
        assert message in one_line()
        assert not out.exists() and not out.with_name("out.partial").exists()


def test_a_run(bart, pairs, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(bart, out, "--calibration", pairs, "--evaluate", pairs, *FAST) == 0
    said = capsys.readouterr()
    for word in ("weights", "bleu", "tokens per second", "Relative output errors", "mean of all", "gptq, 4 bits"):
        assert word in " ".join(said.out.split())  # a title is wrapped where the path is long
    *stages, speed, last = said.err.splitlines()
    assert stages[0] == f"fastgen-quantize: loading {bart}" and len(stages) >= 5, "progress from the first second"
    assert re.fullmatch(r"tokens per second: accelerated by FastGen: .*calls.*", speed)
    kind = "AutoModelForSeq2SeqLM"
    loads = f"import fastgen; from transformers import {kind}; {kind}.from_pretrained({str(out)!r})"
    assert last == f"fastgen-quantize: written to {out}, load it with {loads}"
    files = "config.json model.safetensors report.json report.png tokenizer.json generation_config.json".split()
    assert set(files) <= {path.name for path in out.iterdir()}
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert (out / "generation_config.json").read_bytes() == (bart / "generation_config.json").read_bytes()
    assert call(bart, out, "--calibration", pairs, "--resume", *FAST) == 0
    assert f"all blocks were done before: {out} is complete" in capsys.readouterr().err.splitlines()[-1]
    assert call(bart, out, "--calibration", pairs, "--overwrite", "--bits", 8, "--quiet", *FAST) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("no_picture")
def test_rounding_to_nearest_needs_no_text(gpt2, tmp_path, pairs, capsys):
    """Its weights are those of a run with text: they depend on none."""
    assert call(gpt2, tmp_path / "out", "--method", "rtn", *FAST) == 0
    assert "no --calibration was given" in " ".join(capsys.readouterr().out.split())
    assert call(gpt2, tmp_path / "other", "--method", "rtn", "--calibration", pairs, "--quiet", *FAST) == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.usefixtures("no_picture")
def test_a_gguf_file_is_unpacked_and_rounded(tmp_path, capsys):
    """As the model that Transformers unpacks it to, and saves."""
    pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.cli.test_keep_bits import write

    file = write(tmp_path / "model.gguf")
    given = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given)
    if getattr(read, "hf_quantizer", None) is not None:  # the library does not save what comes from such a file
        read.hf_quantizer.remove_quantization_config(read)
    read.save_pretrained(tmp_path / "unpacked")
    AutoTokenizer.from_pretrained(tmp_path, **given).save_pretrained(tmp_path / "unpacked")
    for model, out in ((file, "out"), (tmp_path / "unpacked", "other")):
        assert call(model, tmp_path / out, "--method", "rtn", "--dtype", "fp32", *FAST) == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["bytes"]["before"] == file.stat().st_size
    last = capsys.readouterr().err.splitlines()[-1]
    kind, folder = "AutoModelForCausalLM", str(tmp_path / "other")
    assert last.endswith(
        f"load it with import fastgen; from transformers import {kind}; {kind}.from_pretrained({folder!r})"
    )
    prompt = torch.arange(3, 20)[None]
    with fastgen.disabled(), torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(prompt).logits for name in ("out", "other")]
    torch.testing.assert_close(*logits)


def test_a_folder_that_is_missing_is_no_connection_that_failed(tmp_path, one_line, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fails)
    assert call("smollm", "out", "--method", "rtn", "--quiet") == 2
    assert "model smollm cannot be loaded: there is no such folder, and the hub cannot be reached" in one_line()


@pytest.mark.usefixtures("no_picture")
def test_an_interrupt_says_how_to_continue(bart, pairs, tmp_path, one_line):
    words = [bart, tmp_path / "out", "--calibration", pairs, "--quiet", *FAST]
    with mock.patch.object(running, "save", side_effect=KeyboardInterrupt):
        assert call(*words) == 130
    said = one_line()
    assert said.startswith("fastgen-quantize: interrupted; to continue: fastgen-quantize --resume ")
    assert call("--resume", *words) == 0
