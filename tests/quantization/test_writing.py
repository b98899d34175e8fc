"""Quantised layers as compressed-tensors stores them, and the files of finished blocks."""

from __future__ import annotations

import pytest
import torch

from fastgen.quantization.calibration import Quantised
from fastgen.quantization.checkpoint import QuantizedTensor, dequantized
from fastgen.quantization.rounding import Kind, make_grid, round_to_nearest
from fastgen.quantization.writing import config, load_block, save_block, tensors


def weight(outputs=6, inputs=32, bits=4, group=8, symmetric=True, dtype=torch.float16, seed=0):
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    return round_to_nearest(values, make_grid(values, Kind(bits, group, symmetric, dtype)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [6, 16, 1])
def test_the_library_reads_the_same_weight(bits, symmetric, dtype, outputs):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    stored = weight(outputs, 48, bits, 16, symmetric, dtype)
    about = config({"layer": Kind(bits, 16, symmetric)}, [])["config_groups"]["group_0"]
    read = BaseCompressor.get_value_from_registry("pack-quantized").decompress(
        tensors(stored), QuantizationScheme(**about)
    )
    assert torch.equal(read["weight"].to(dtype), dequantized(stored, dtype))


def test_what_the_format_has_no_place_for():
    one = weight()
    with pytest.raises(ValueError, match="no mins"):
        tensors(one._replace(order=torch.arange(32)))
    with pytest.raises(ValueError, match="no mins"):
        tensors(one._replace(mins=one.scales))


def test_the_configuration_names_layers_that_differ():
    usual, other = Kind(4, 64), Kind(8, 32)
    found = config({"a": usual, "b": other, "c": usual}, ["lm_head"])
    groups = list(found["config_groups"].values())
    assert [group["targets"] for group in groups] == [["b"], ["Linear"]]
    assert [group["weights"]["num_bits"] for group in groups] == [8, 4]
    assert [group["weights"]["group_size"] for group in groups] == [32, 64]
    assert not found["dequantize"]
    assert config({"a": usual, "c": usual}, [])["dequantize"]
    assert (found["ignore"], found["format"], found["quant_method"]) == (
        ["lm_head"], "pack-quantized", "compressed-tensors",
    )  # fmt: skip


def test_a_block_is_kept(tmp_path):
    layers = {"a": Quantised(weight(symmetric=False), 0.125), "b.c": Quantised(weight(bits=8), float("inf"))}
    save_block(tmp_path / "block", layers)
    found = load_block(tmp_path / "block")
    assert found.keys() == layers.keys()
    for name, (one, error) in layers.items():
        assert found[name].error == error
        for part, value in one._asdict().items():
            read = getattr(found[name].weight, part)
            assert torch.equal(read, value) if isinstance(value, torch.Tensor) else read == value


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-20], lambda data: data.replace(b"qweight", b"numbest")]
)
def test_a_damaged_block_is_refused(tmp_path, damage):
    path = tmp_path / "block"
    save_block(path, {"a": Quantised(weight(), 0.5)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="block is damaged"):
        load_block(path)


def test_a_file_of_somebody_elses_is_no_block(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "block")
    with pytest.raises(ValueError, match="block is damaged"):
        load_block(tmp_path / "block")
    with pytest.raises(ValueError, match="qweight is"):
        tensors(QuantizedTensor(torch.zeros(2), torch.zeros(2), None, None, 4, 8, None))
