"""The benchmark of GGUF files whose bits are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import kept_bits, smollm2
from tests.pipeline import tiny


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny file: the sides have the tokens of Transformers, those in 16 bits aside."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack
    from tests.optimizer.transformers.quantized.test_gguf import VOCABULARY, write_llama

    write_llama(tmp_path / smollm2.GGUF, ("Q4_1", "Q8_0"))
    tokenizer = tiny.tokenizer(encoder_decoder=False)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    inputs = kept_bits.inputs_of(tmp_path, 4)
    assert inputs["input_ids"].shape[0] == 4 and not inputs["attention_mask"].all()

    def few(folder: Path, count: int) -> dict[str, torch.Tensor]:
        found = inputs_of(folder, count)
        return {name: tensor[:, -12:] % VOCABULARY for name, tensor in found.items()}

    inputs_of = kept_bits.inputs_of
    monkeypatch.setattr(kept_bits, "inputs_of", few)
    monkeypatch.setattr(kept_bits, "_NEW_TOKENS", 5)
    assert kept_bits.main([str(tmp_path), "--repetitions", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [row for row in kept_bits.ROWS for _ in range(2)]
    assert all("times as fast as 16 bits" in line for line in said[::2])
    assert [line.rpartition(": ")[2] for line in said[1::2]] == [
        "kept 1, unpacked 1", "kept 16, unpacked 16", "kept 4, unpacked 4",
    ]  # fmt: skip
