"""GPTQ, AWQ and pack-quantized checkpoints through `from_pretrained`."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPTQConfig, PreTrainedModel, modeling_utils
from transformers.pytorch_utils import Conv1D

import fastgen
from fastgen import patching, settings
from fastgen.decoding.captured.program import Program
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers.quantized import hooks, stored
from fastgen.optimizer.transformers.quantized.configurations import NotServed
from fastgen.quantization.layer_weight import unpack
from fastgen.quantization.layers import QuantizedLinearLayer
from tests.noting import noted
from tests.optimizer.transformers.quantized.checkpoints import (
    CASES,
    MODELS,
    awq_config,
    gptq_config,
    inputs_of,
    llama,
    pack_config,
    quantize,
    save,
)

ENTRY_POINT = "transformers.from_pretrained"


@pytest.fixture(autouse=True)
def bits_are_kept() -> Iterator[None]:
    fastgen.reset_stats()
    with settings.changed(keep_bits=True):
        yield


def load(folder: Path, seq2seq: bool = False, **named: Any) -> PreTrainedModel:
    return (AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM).from_pretrained(folder, **named)


def counts() -> dict[str, Any]:
    return fastgen.stats().get(ENTRY_POINT, {"accelerated": 0, "fallback": {}})


def low_bit_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLinearLayer)]


def check_logits(model: nn.Module, reference: nn.Module, **tolerances: float) -> None:
    inputs = inputs_of(reference)
    with torch.no_grad():
        tolerances = tolerances or {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, **tolerances)


def saved(folder: Path, case: str, **options: Any) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A checkpoint of a Llama, the model with its weights unpacked, and the tensors of the file."""
    reference, tensors = quantize(llama(**options), CASES[case])
    save(folder, reference, tensors, CASES[case].config)
    return reference, tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_model_with_dequantized_weights(name: str, case: str, tmp_path: Path) -> None:
    reference, tensors = quantize(MODELS[name](), CASES[case])
    save(tmp_path, reference, tensors, CASES[case].config)
    model = load(tmp_path, name == "bart")
    assert counts() == {"accelerated": 1, "fallback": {}}
    linear = {n for n, module in reference.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    assert set(low_bit_layers(model)) == linear - {"lm_head"}
    assert not any(parameter.is_meta for parameter in model.parameters())
    check_logits(model, reference)
    if case in ("gptq-act-order", "awq"):
        inputs = inputs_of(reference)
        inputs.pop("decoder_input_ids", None)
        options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(**inputs, **options), reference.generate(**inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales stay those of the file; all else is of the model's type."""
    reference, tensors = saved(tmp_path, "gptq-asymmetric")
    model = load(tmp_path, dtype=dtype)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert torch.equal(unpack(layer.packed).scales, tensors["model.layers.0.mlp.up_proj.scales"].t())
    inputs = inputs_of(reference)
    reference.save_pretrained(tmp_path / "plain")  # and read again: `to` would round what the library does not
    with torch.no_grad():
        exact = reference(**inputs).logits
        ours, theirs = model(**inputs).logits, load(tmp_path / "plain", dtype=dtype)(**inputs).logits
    assert ours.dtype == dtype
    errors = [float((logits.float() - exact).norm()) for logits in (ours, theirs)]
    assert errors[0] <= 1.05 * errors[1]  # weights are not rounded to the type of the model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_saved_as_it_was_read(case: str, tmp_path: Path) -> None:
    reference, _ = saved(tmp_path / "given", case)
    load(tmp_path / "given").save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    found = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(tmp_path / "given" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"] == CASES[case].config
    check_logits(load(tmp_path / "saved"), reference)


@pytest.mark.parametrize("name", MODELS)
def test_dequantized(name: str, tmp_path: Path) -> None:
    reference, tensors = quantize(MODELS[name](), CASES["gptq-act-order"])
    save(tmp_path / "given", reference, tensors, CASES["gptq-act-order"].config)
    model = load(tmp_path / "given", name == "bart").dequantize()
    assert low_bit_layers(model) == [] and type(model) is type(reference)
    model.save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain", name == "bart")
    for key, value in reference.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value), key


def test_a_run_leaves_no_weight_in_floating_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither loading nor the steps of calls, captured ones among them, keep an unpacked copy."""
    replays = noted(monkeypatch, Program, "replay")
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    inputs, least = inputs_of(saved(tmp_path, "gptq", intermediate_size=1024)[0]), 64 * 1024
    before = set(map(id, _large(least)))
    model = load(tmp_path)
    for activations in ("float", "int8"):
        with settings.changed(captured_step="always", activations=activations):
            for _ in range(2):
                model.generate(**inputs, max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert replays
        replays.clear()
    assert not [tensor.shape for tensor in _large(least) if id(tensor) not in before]
    model.dequantize()  # and now there is something to find
    assert [tensor.shape for tensor in _large(least) if id(tensor) not in before]


def _large(least: int) -> list[torch.Tensor]:
    """The tensors in floating point of so many numbers that there are in this process."""
    gc.collect()
    # By type alone: what else there is may do something when it is asked.
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return [each for each in tensors if each.is_floating_point() and not each.is_meta and each.numel() >= least]


def test_status(tmp_path: Path) -> None:
    def notes() -> list[str]:
        gc.collect()
        return [note for note in fastgen.status().notes if "LlamaForCausalLM" in note]

    saved(tmp_path, "awq")
    assert not notes()
    model = load(tmp_path)
    (line,) = notes()
    assert line.startswith("LlamaForCausalLM read from awq: 14 layers of 4 bits in ")
    model.dequantize()
    assert not notes()
    model = load(tmp_path)
    assert notes()
    del model
    assert not notes()


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    reference, tensors = quantize(llama(), CASES["gptq"])
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save(tmp_path, reference, renamed, CASES["gptq"].config)
    check_logits(load(tmp_path), reference)


def test_disabled(tmp_path: Path) -> None:
    """The library is as if FastGen was not there: without the package it refuses the checkpoint."""
    saved(tmp_path, "gptq")
    with fastgen.disabled(), pytest.raises(ImportError, match="optimum"):
        load(tmp_path)
    patched = modeling_utils.get_hf_quantizer
    fastgen.disable()
    try:
        assert modeling_utils.get_hf_quantizer is patching.original_of(patched)
        with pytest.raises(ImportError, match="optimum"):
            load(tmp_path)
    finally:
        fastgen.enable()
    assert counts() == {"accelerated": 0, "fallback": {}}


def _in_group(**changes: Any) -> dict[str, Any]:
    config = pack_config()
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (gptq_config(3), "gptq: 3 bits"),
        (gptq_config(dynamic={"down_proj": {"bits": 2}}), "gptq: 2 bits"),
        (gptq_config(checkpoint_format="marlin"), "gptq: format marlin"),
        (awq_config(bits=8), "awq: 8 bits"),
        (awq_config(version="gemv"), "awq: format gemv"),
        (awq_config(zero_point=False), "awq: without zero points"),
        (pack_config(weights={"num_bits": 2}), "compressed-tensors: 2 bits"),
        (pack_config(weights={"type": "float"}), "compressed-tensors: weights of type float"),
        (pack_config(weights={"strategy": "tensor"}), "compressed-tensors: strategy tensor"),
        (pack_config(format="nvfp4-pack-quantized"), "compressed-tensors: format nvfp4-pack-quantized"),
        (pack_config(kv_cache_scheme={"num_bits": 8}), "compressed-tensors: a low-bit KV cache"),
        (pack_config(transform_config={"r1": {}}), "compressed-tensors: transformed weights"),
        (pack_config(sparsity_config={"format": "sparse-24-bitmask"}), "compressed-tensors: sparse weights"),
        (pack_config(config_groups={}), "compressed-tensors: no config_groups"),
        (_in_group(weights=None), "compressed-tensors: a group without weights"),
        (_in_group(input_activations={"num_bits": 8}), "compressed-tensors: low-bit activations"),
    ],
)
def test_left_to_the_library(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    reference, tensors = quantize(llama(), CASES["gptq"])
    save(tmp_path, reference, tensors, config)
    with contextlib.suppress(Exception):  # it lacks the package, or cannot read this either, or can
        load(tmp_path)
    assert counts() == {"accelerated": 0, "fallback": {reason: 1}}
    fastgen.enable(strict=True)
    with pytest.raises(fastgen.FallbackError, match=reason):
        load(tmp_path)


def test_calls_left_to_the_library(tmp_path: Path) -> None:
    saved(tmp_path, "gptq")
    with pytest.raises(ImportError, match="optimum"), pytest.warns(UserWarning, match="quantization_config"):
        load(tmp_path, quantization_config=GPTQConfig(bits=4))
    assert counts()["fallback"] == {"the call has a quantization_config of its own": 1}


OTHER, SEVERAL = "another device than the CPU", "several devices"


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ({"": torch.device("meta")}, OTHER), ("auto", "device_map is auto"), ({"": "cpu", "lm_head": 0}, SEVERAL),
        ({"": "cpu", "lm_head": "disk"}, "device_map is disk"),
    ],
)  # fmt: skip
def test_other_devices_are_left_to_the_library(places: Any, reason: str) -> None:
    with pytest.raises(NotServed, match=reason):
        hooks._check_call(None, places)
    for cpu in ({"": torch.device("cpu")}, "cpu", None):
        hooks._check_call(None, cpu)


@pytest.mark.parametrize("place", ["cuda", "cuda:1", 0, torch.device("cuda")])
def test_a_gpu_with_kernels(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotServed, match=f"{OTHER}: there is no GPU"):
        hooks._check_call(None, {"": place})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hooks.gpu, "unavailable", lambda device: None if device.type == "cuda" else "none")
    hooks._check_call(None, {"": place})


def test_files_left_to_the_library(tmp_path: Path) -> None:
    """What only the files tell."""
    reference, tensors = quantize(llama(), CASES["gptq"])
    layer = "model.layers.1.mlp.up_proj"
    embedding = {name.replace(layer, "model.embed_tokens"): tensor for name, tensor in tensors.items()}
    del embedding["model.embed_tokens.weight"]
    expert = {name.replace(layer, f"{layer}.experts.0"): tensor for name, tensor in tensors.items()}
    activations = {**tensors, "model.layers.0.mlp.act.scales": torch.ones(96)}
    more = {**tensors, f"{layer}.weight_global_scale": torch.ones(1)}
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    for changed, reason in (
        (embedding, "gptq: a low-bit Embedding"),
        (expert, f"{layer}.experts.0 is no layer of LlamaForCausalLM"),
        (activations, "gptq: model.layers.0.mlp.act has scales and no weight"),
        (more, f"gptq: {layer} has weight_global_scale"),
        ({name: t for name, t in floating.items() if "scales" not in name}, "gptq: the files hold no qweight"),
    ):
        fastgen.reset_stats()
        save(tmp_path, reference, changed, gptq_config())
        with pytest.raises(ImportError, match="optimum"):
            load(tmp_path)
        assert counts() == {"accelerated": 0, "fallback": {reason: 1}}


def test_an_output_layer_beside_an_embedding_of_its_own(tmp_path: Path) -> None:
    """The configuration says that they are tied, and the files hold both."""
    reference, tensors = quantize(llama(tied=True), CASES["pack"])
    layer = "model.layers.1.mlp.up_proj"
    head = {name.replace(layer, "lm_head"): tensor.clone() for name, tensor in tensors.items() if layer in name}
    save(tmp_path, reference, tensors | head, pack_config())
    with contextlib.suppress(Exception):  # the library may not have the package
        load(tmp_path)
    reason = "compressed-tensors: low-bit weights that are tied to others"
    assert counts() == {"accelerated": 0, "fallback": {reason: 1}}


@pytest.mark.parametrize(("inputs", "groups", "is_short"), [(4544, 36, True), (128, 3, False), (4608, 36, False)])
def test_a_last_group_that_is_shorter(inputs: int, groups: int, is_short: bool) -> None:
    tensors = {"scales": torch.empty(groups, 8, device="meta")}
    assert stored._has_short_group(tensors, inputs, {128}) == is_short


LAYER = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("g_idx", lambda t: t + 7, "g_idx names groups 7 to 10, and there are 4"),
        ("qzeros", None, "qzeros is missing"),
    ],
)
def test_damaged_layers(tensor: str, change: Any, message: str, tmp_path: Path) -> None:
    reference, tensors = quantize(llama(), CASES["gptq-act-order"])
    name = f"{LAYER}.{tensor}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save(tmp_path, reference, tensors, CASES["gptq-act-order"].config)
    with pytest.raises(ValueError, match=f"^{LAYER}: {message}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert counts() == {"accelerated": 0, "fallback": {}}


@pytest.mark.parametrize("part", [0.001, 0.5])
def test_truncated_files(part: float, tmp_path: Path) -> None:
    saved(tmp_path, "pack")
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match="model.safetensors cannot be read .* fetch it again") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_other_checkpoints_are_none_of_its_business(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert low_bit_layers(load(tmp_path)) == []
    assert ENTRY_POINT not in fastgen.stats()


def test_equal_to_what_compressed_tensors_reads(tmp_path: Path) -> None:
    """The library itself, where it has the package: it unpacks the weights. Packed zeros it cannot load."""
    pytest.importorskip("compressed_tensors.compressors")
    for case in ("pack", "pack-8-bits", "pack-channels"):
        saved(tmp_path, case)
        ours = load(tmp_path)
        with fastgen.disabled():
            theirs = load(tmp_path)
        assert low_bit_layers(ours) and not low_bit_layers(theirs)
        check_logits(ours, theirs, rtol=1e-2, atol=1e-3)  # the library rounds weights to the type of the scales
