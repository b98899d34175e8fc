"""The benchmark of GGUF files whose bits are kept, on a tiny file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import low_bit, smollm2
from tests.pipeline import tiny
from tests.quantization import tiny as families


def test_perplexity_is_that_of_the_model():
    model = families.llama(hidden_size=256, intermediate_size=512)
    tokens = low_bit.prompt(model, 40)
    with torch.no_grad():
        exact = torch.exp(model(input_ids=tokens, labels=tokens).loss)
    assert low_bit.perplexity(model, tokens) == pytest.approx(float(exact), rel=1e-5)


def test_sides_run_in_turn():
    order = []
    line = low_bit.compared({"one": lambda: order.append(1), "two": lambda: order.append(2)}, 2)
    assert order == [1, 1, 1, 2, 2, 2, 1, 2, 1, 2]
    assert line.startswith("one ") and "times as fast" in line


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The sides have the tokens of Transformers, those in 16 bits aside; other libraries say why they are left out."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack
    from tests.optimizer.transformers.quantized.test_gguf import VOCABULARY, write_llama

    write_llama(tmp_path / smollm2.GGUF, ("Q4_1", "Q8_0"))
    tokenizer = tiny.tokenizer(encoder_decoder=False)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    prompts = low_bit.chat_prompts

    def short_prompts(folder: Path, count: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:, -12:] % VOCABULARY for name, tensor in prompts(folder, count).items()}

    monkeypatch.setattr(low_bit, "chat_prompts", short_prompts)
    monkeypatch.setattr(low_bit, "_NEW_TOKENS", 5)
    monkeypatch.setattr(low_bit, "_NEW_TOKENS_OF_CHATS", 5)
    monkeypatch.setattr(low_bit.elsewhere, "ENVIRONMENTS", tmp_path / "none")
    assert low_bit.main([str(tmp_path), "--repetitions", "1", "--only", "file", *low_bit.CHATS]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = ["file", *low_bit.CHATS]
    assert [line.partition(":")[0] for line in said] == [row for row in rows for _ in range(2)]
    assert "llama.cpp not measured, there is no environment" in said[0]
    assert all("times as fast as 16 bits" in line for line in said[2::2])
    assert [line.rpartition(": ")[2] for line in said[3::2]] == [
        "kept 1, unpacked 1", "kept 16, unpacked 16", "kept 4, unpacked 4",
    ]  # fmt: skip
