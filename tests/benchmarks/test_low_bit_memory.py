"""What the memory of a low-bit model is measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import low_bit_memory as measured

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
