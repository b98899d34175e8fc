"""What the memory of a low-bit model is measured with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import low_bit_memory as measured
from fastgen.pipeline.quantizing import QuantizeOptions, quantize_model
from tests.pipeline import tiny
from tests.quantization import tiny as families

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no Linux")


def test_private_memory_grows_with_what_is_written():
    before = measured.private_bytes()
    kept = torch.ones(2**24)  # 64 MiB
    assert 0.9 * kept.nbytes < measured.private_bytes() - before < 1.5 * kept.nbytes


def test_tensors_are_counted_once_and_those_in_files_told(tmp_path):
    weight = torch.ones(100, 10)
    assert measured.tensor_bytes(iter([weight, weight, torch.ones(5)])) == 4020
    assert measured.mapped_bytes(iter([weight])) == 0
    save_file({"a": torch.ones(3000), "b": torch.ones(2000)}, tmp_path / "file.safetensors")
    mapped = torch.from_file(str(tmp_path / "file.safetensors"), shared=False, size=1000)
    assert measured.mapped_bytes(iter([mapped, mapped, weight])) == 4000
    assert measured.file_bytes(tmp_path, None) == sum(
        t.nbytes for t in load_file(tmp_path / "file.safetensors").values()
    )


def test_a_float_copy_that_is_left_behind_is_found():
    model = torch.nn.Linear(700, 800)
    left = model.weight.detach().clone()
    found = measured.strangers(model)
    assert any(each is left for each in found)
    assert not any(each is model.weight for each in found)


@pytest.mark.long
def test_a_checkpoint(tmp_path):
    tokens = tiny.tokenizer(encoder_decoder=False)
    families.llama(vocab_size=len(tokens)).save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(tiny.sentences(10)) + "\n")
    options = {"calibration": str(tmp_path / "text.txt"), "method": "rtn", "samples": 2, "sample_length": 16}
    report = quantize_model(
        QuantizeOptions(str(tmp_path / "model"), str(tmp_path / "out"), device="cpu", quiet=True, **options)
    )
    words = [sys.executable, "-m", "benchmarks.low_bit_memory", tmp_path / "out", "--new-tokens", "4"]
    command = [str(word) for word in [*words, "--json", tmp_path / "found.json"]]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["layers"] == len(report.layers)
    assert 0 < found["file_bytes"] <= report.bytes.after
    # No weight is there in float32. Outputs are filled up to 32.
    assert found["tensor_bytes"] < 2 * found["file_bytes"]
    assert found["largest_other_float_bytes"] < found["largest_weight_in_float_bytes"]
    assert f"{len(report.layers)} low-bit layers" in done.stdout
