"""Who gets layers that keep the bits of a checkpoint: `test_unasked.py` has what everybody else gets."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastgen
from fastgen import settings
from fastgen.optimizer.transformers.quantized import configurations, stored
from fastgen.quantization.layers import QuantizedWeight
from fastgen.settings import IN_CONFIG
from tests.optimizer.transformers.quantized.checkpoints import (
    CASES,
    gpt2,
    gptq_config,
    inputs_of,
    llama,
    quantize,
    save,
)
from tests.optimizer.transformers.quantized.test_stored import check_logits
from tests.optimizer.transformers.quantized.test_unasked import FORMATS, gguf_of, load, pack_of, without_fastgen

ENTRY_POINT = "transformers.from_pretrained"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fastgen.reset_stats()
    monkeypatch.setattr(stored, "_told", set())


def kept(model: nn.Module) -> list[QuantizedWeight]:
    return [module for module in model.modules() if isinstance(module, QuantizedWeight)]


# What is kept where it is asked for.
KEPT = ("gguf", "pack", "pack-8-bits", "pack-channels", "pack-unpacked", "pack-8-bits-unpacked")


@pytest.fixture(params=KEPT)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path / "given"
    folder.mkdir()
    return folder, FORMATS[request.param](folder)


def test_asked_for_in_the_call(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    folder, named = checkpoint
    model = load(folder, quantization_config=fastgen.KeepBits(), **named)
    assert {layer.activations for layer in kept(model)} == {None}
    assert fastgen.stats()[ENTRY_POINT]["accelerated"] == 1 and not fastgen.stats()[ENTRY_POINT]["fallback"]
    rounded = load(folder, quantization_config=fastgen.KeepBits(activations="int8"), **named)
    assert {layer.activations for layer in kept(rounded)} == {"int8"}
    inputs, plain = inputs_of(model), copy.deepcopy(model).dequantize()
    assert not kept(plain) and kept(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
        assert not torch.equal(rounded(**inputs).logits, model(**inputs).logits)
        with settings.changed(activations="int8"):
            assert torch.equal(rounded(**inputs).logits, model(**inputs).logits)


def test_asked_for_by_a_setting(tmp_path: Path) -> None:
    pack_of("pack")(tmp_path)
    with settings.changed(keep_bits=True):
        assert kept(load(tmp_path))
    assert not kept(load(tmp_path))


def test_the_checkpoint_asks_itself(tmp_path: Path) -> None:
    """What `fastgen-quantize` writes, which the library reads as well."""
    pack_of("pack", **{IN_CONFIG: True})(tmp_path)
    assert kept(load(tmp_path))
    theirs = without_fastgen(tmp_path)
    assert not kept(theirs)
    check_logits(load(tmp_path), theirs, rtol=1e-2, atol=1e-2)  # it rounds unpacked weights to the type of the scales


@pytest.mark.parametrize("case", ["gptq", "awq", "pack-asymmetric"])
def test_the_library_lacks_something(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then FastGen serves the checkpoint without being asked, and says so once."""
    monkeypatch.setattr(configurations, "is_compressed_tensors_available", lambda: False)
    method = configurations._METHODS["compressed-tensors"]
    monkeypatch.setitem(configurations._METHODS, method.name, method._replace(library_loads=lambda: False))
    save(tmp_path, *quantize(llama(), CASES[case]), CASES[case].config)
    with pytest.warns(UserWarning) as said:
        assert kept(load(tmp_path))
    (line,) = [str(each.message) for each in said if "FastGen" in str(each.message)]
    name = CASES[case].config["quant_method"]
    assert line.startswith(f"FastGen loads this {name} checkpoint") and "\n" not in line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path)
    monkeypatch.setattr(stored, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, quantization_config=fastgen.KeepBits())  # whoever asks need not be told


def test_the_library_has_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ beside gptqmodel stays the library's, unless somebody asks."""
    method = configurations._METHODS["gptq"]
    monkeypatch.setitem(configurations._METHODS, method.name, method._replace(library_loads=lambda: True))
    save(tmp_path, *quantize(llama(), CASES["gptq"]), gptq_config())
    with pytest.raises(ImportError, match="optimum"):  # what the library says, which has it not
        load(tmp_path)
    assert ENTRY_POINT not in fastgen.stats()
    assert kept(load(tmp_path, quantization_config=fastgen.KeepBits()))


def test_nothing_to_keep(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="weights in floating point are no format that FastGen keeps"):
        assert not kept(load(tmp_path, quantization_config=fastgen.KeepBits()))
    with warnings.catch_warnings(), settings.changed(keep_bits=True):
        warnings.simplefilter("error")
        assert not kept(load(tmp_path))
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match="no format that FastGen keeps"):
        load(tmp_path, quantization_config=fastgen.KeepBits())


def test_what_fastgen_does_not_keep(tmp_path: Path) -> None:
    """Whoever has asked is told, and gets what the library makes of it."""
    pack_of("pack")(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"kv_cache_scheme": None, "transform_config": {"config_groups": {}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="does not keep the bits of this checkpoint.*transformed weights"):
        assert not kept(load(tmp_path, quantization_config=fastgen.KeepBits()))


def test_while_fastgen_is_disabled(tmp_path: Path) -> None:
    pack_of("pack")(tmp_path)
    with fastgen.disabled(), pytest.raises(ValueError, match="KeepBits, which FastGen reads, and FastGen is disabled"):
        load(tmp_path, quantization_config=fastgen.KeepBits())
    fastgen.disable()
    try:
        with pytest.raises(ValueError, match="KeepBits"):
            load(tmp_path, quantization_config=fastgen.KeepBits())
    finally:
        fastgen.enable()
    with pytest.raises(AttributeError, match="FastGen reads it, which is disabled"):
        fastgen.KeepBits().quant_method  # noqa: B018
    with pytest.raises(ValueError, match="activations is 'int4'; known: float, int8"):
        fastgen.KeepBits(activations="int4")


def test_blocks_that_the_library_keeps(tmp_path: Path) -> None:
    """It does so for some architectures: these stay its own."""
    named = gguf_of()(tmp_path)
    from fastgen.optimizer.transformers.quantized.configurations import NotServed
    from fastgen.optimizer.transformers.quantized.gguf import GgufBlocksQuantizer

    quantizer = load(tmp_path, quantization_config=fastgen.KeepBits(), **named).hf_quantizer
    assert type(quantizer) is GgufBlocksQuantizer
    quantizer.supported, quantizer.header = True, type("Header", (), {"architecture": "lfm2"})
    with pytest.raises(NotServed, match="the library has its own blocks for lfm2"):
        quantizer._process_model_before_weight_loading(None, ["model.gguf"])


@pytest.mark.parametrize("part", [0.001, 0.5])
def test_errors_are_the_librarys(part: float, tmp_path: Path) -> None:
    named = gguf_of()(tmp_path)
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: int(part * len(data))])
    with pytest.raises(Exception) as theirs:
        without_fastgen(tmp_path, **named)
    with pytest.raises(Exception) as ours:
        load(tmp_path, **named)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)


def test_kept_layers_stand_for_the_librarys_classes(tmp_path: Path) -> None:
    reference, tensors = quantize(gpt2(), CASES["gptq"])
    save(tmp_path, reference, tensors, gptq_config())
    model = load(tmp_path, quantization_config=fastgen.KeepBits())
    for name, module in reference.named_modules():
        assert isinstance(model.get_submodule(name), type(module)), name
