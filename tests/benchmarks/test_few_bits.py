"""The command for weights of 4 and 8 bits."""

from __future__ import annotations

import pytest
import torch

import fastgen
from benchmarks import few_bits
from tests.pipeline import tiny
from tests.quantization import tiny as families


@pytest.fixture
def model():
    return families.llama(hidden_size=256, intermediate_size=512)


def test_a_gguf_file_has_the_weights_of_the_model(tmp_path, model):
    gguf = pytest.importorskip("gguf")
    few_bits.write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: torch.from_numpy(tensor.data.copy()).float() for tensor in reader.tensors}
    assert len(found) == len(list(model.parameters()))
    config = model.config
    for name, weight in model.named_parameters():
        expected = weight.detach() if weight.dim() == 1 else weight.detach().half().float()
        stored = found[few_bits.gguf_name(name)]
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
            # As Transformers reads it: of each head, the first halves of all pairs lie before the second ones.
            stored = stored.view(heads, -1, 2, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        assert torch.equal(stored, expected), name


def test_bytes_of_a_step_count_every_matrix_and_its_scales():
    layers = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32))
    assert few_bits.bytes_in_few_bits(layers, 4, 64) == (128 * 64 + 64 * 32) // 2 + 2 * (2 * 64 + 32)


def test_perplexity_is_that_of_the_model_and_changes_with_few_bits(model):
    tokens = few_bits.prompt(model, 40)
    with torch.no_grad():
        exact = torch.exp(model(input_ids=tokens, labels=tokens).loss)
    assert few_bits.perplexity(model, tokens) == pytest.approx(float(exact), rel=1e-5)
    fastgen.reset_stats()
    few_bits.perplexity(model, tokens, weight_dtype="int4")
    if fastgen.stats()["int4 weights"]["accelerated"]:  # the processor is fast enough
        assert few_bits.perplexity(model, tokens, weight_dtype="int4") != pytest.approx(float(exact), rel=1e-7)


def test_sides_run_in_turn():
    order = []
    line = few_bits.compared({"one": lambda: order.append(1), "two": lambda: order.append(2)}, 2)
    assert order == [1, 1, 1, 2, 2, 2, 1, 2, 1, 2]
    assert line.startswith("one ") and "times as fast" in line


def test_rows(tmp_path, monkeypatch, capsys):
    tokens = tiny.tokenizer(encoder_decoder=False)
    families.llama(vocab_size=len(tokens), max_position_embeddings=1024).save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(tiny.sentences(10)) + "\n")
    monkeypatch.setattr(few_bits.elsewhere, "ENVIRONMENTS", tmp_path / "none")
    rows = ["int8", "prompt", "perplexity"]
    words = [str(tmp_path), "--only", *rows, "--repetitions", "1", "--text", str(tmp_path / "text.txt")]
    assert few_bits.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["int8", "prompt", "perplexity", "perplexity", "perplexity"]
    assert "not measured, there is no environment with llama.cpp" in said[0]
    assert "times as fast" in said[1] and "float32" in said[2]
