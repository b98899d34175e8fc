"""GGUF files and low-bit checkpoints on the command line: kept in their bits where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen_cli.encode import embed
from fastgen_cli.generate import main
from tests.pipeline.tiny import sentences, tokenizer

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack

from tests.optimizer.transformers.quantized.test_gguf import write_llama

OPTIONS = ["--max-new-tokens", "5", "--device", "cpu", "--batch-size", "4"]


def write(path: Path) -> Path:
    """A tiny Llama in Q8_0, with its tokenizer."""
    write_llama(path, ("Q8_0",), tied=False, tokenizer=tokenizer(encoder_decoder=False))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "inputs.txt"
    path.write_text("\n".join(sentences(6)) + "\n")
    return path


def call(*words: Any) -> int:
    return main([str(word) for word in words])


def test_a_gguf_file(file: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read as Transformers does, unless its bits are to be kept: the texts are the same."""
    said = {}
    for name, words in (("plain", []), ("kept", ["--keep-bits"]), ("int8", ["--keep-bits", "--activations", "int8"])):
        fastgen.reset_stats()
        assert call(file, texts, tmp_path / f"{name}.jsonl", *OPTIONS, *words) == 0
        said[name] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("model: ")]
    found = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in said
    }
    assert [row["text"] for row in found["kept"]] == [row["text"] for row in found["plain"]]
    assert [row["scores"] for row in found["int8"]] != [row["scores"] for row in found["plain"]]
    assert said["plain"] == [
        "model: LlamaForCausalLM in float32, as Transformers loads gguf (--keep-bits keeps weights in their bits)"
    ]
    for name in ("kept", "int8"):
        (line,) = said[name]
        assert line.startswith("model: LlamaForCausalLM read from gguf: 16 layers of 8 bits in ")


def test_ordinary_models(gpt2: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(gpt2, texts, tmp_path / "out.txt", *OPTIONS, "--keep-bits") == 0
    assert "model: GPT2LMHeadModel in float32\n" in capsys.readouterr().err
    assert call(gpt2, texts, tmp_path / "quiet.txt", *OPTIONS, "--quiet") == 0
    assert "model: " not in capsys.readouterr().err


def test_vectors_of_a_gguf_file(file: Path, texts: Path, tmp_path: Path) -> None:
    found = []
    for name, words in (("plain", []), ("kept", ["--keep-bits"])):
        given = [file, texts, tmp_path / f"{name}.npy", "--device", "cpu", "--pooling", "mean", *words]
        assert embed([str(word) for word in given]) == 0
        found.append(torch.from_numpy(np.load(tmp_path / f"{name}.npy")))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("words", [[], ["--keep-bits"]])
def test_a_damaged_file(
    words: list[str], file: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:3000])
    assert call(damaged, texts, tmp_path / "out.txt", *OPTIONS, *words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and f"model {damaged} cannot be loaded" in said[0]
    assert not (tmp_path / "out.txt").exists()
    assert call(tmp_path / "none.gguf", texts, tmp_path / "out.txt", *OPTIONS) == 2
