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

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack

HIDDEN, INNER, HEADS = 64, 96, 4
OPTIONS = ["--max-new-tokens", "5", "--device", "cpu", "--batch-size", "4"]


def write(path: Path) -> Path:
    """A tiny Llama in Q8_0, with its tokenizer."""
    tokens = tokenizer(encoder_decoder=False)
    model = json.loads(tokens.backend_tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(words) - 4))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (len(words), HIDDEN), "output": (len(words), HIDDEN)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER)}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        numbers = gguf.quantize(generator.normal(0, 0.3, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", numbers, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
        assert line.startswith("model: LlamaForCausalLM read from gguf: 9 layers of 8 bits in 0.")


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


def test_activations_that_do_not_exist(
    file: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(file, texts, tmp_path / "out.txt", *OPTIONS, "--activations", "int4") == 2
    assert "activations (FASTGEN_ACTIVATIONS) is 'int4'; known: float, int8" in capsys.readouterr().err


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
