"""Without being asked, `from_pretrained` returns what the library makes of a checkpoint, bit for bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import auto

import fastgen
from fastgen import settings
from fastgen.optimizer.transformers.quantized import configurations
from fastgen.optimizer.transformers.quantized.stored import StoredQuantizer
from fastgen.quantization.layers import QuantizedWeight
from tests.optimizer.transformers.quantized.checkpoints import CASES, inputs_of, llama, quantize, save

ENTRY_POINT = "transformers.from_pretrained"
Written = dict[str, Any]  # what `from_pretrained` is given besides the folder


def load(folder: Path, **named: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **named).eval()


def without_fastgen(folder: Path, **named: Any) -> PreTrainedModel:
    with fastgen.disabled():
        return load(folder, **named)


# ---- formats


def gguf_of(*types: str) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate")
        pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack
        from tests.optimizer.transformers.quantized.test_gguf import TYPES, write_llama

        write_llama(folder / "model.gguf", types or TYPES)
        return {"gguf_file": "model.gguf"}

    return write


def pack_of(case: str, **config: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        pytest.importorskip("compressed_tensors")
        reference, tensors = quantize(llama(), CASES[case])
        save(folder, reference, tensors, CASES[case].config | config)
        return {}

    return write


def linears_as(method: str, stored: Callable[[Tensor], dict[str, Tensor]], **config: Any) -> Callable[[Path], Written]:
    """A Llama whose linear layers, but for the last, have these tensors instead of their weights."""

    def write(folder: Path) -> Written:
        pytest.importorskip("accelerate")
        if method not in auto.AUTO_QUANTIZER_MAPPING:
            pytest.skip(f"this release of Transformers has no {method}")
        model = llama()
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                weight = tensors.pop(f"{name}.weight")
                tensors |= {f"{name}.{each}": tensor for each, tensor in stored(weight).items()}
        save(folder, model, tensors, {"quant_method": method, "modules_to_not_convert": ["lm_head"], **config})
        return {"device_map": "cpu"}

    return write


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Blocks of 32 x 32 with a scale each."""
    scales = torch.rand(weight.shape[0] // 32, weight.shape[1] // 32) * 0.01 + 0.01
    return {"weight": torch.randn(weight.shape).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def gemma(weight: Tensor) -> dict[str, Tensor]:
    """Two numbers of 4 bits in a byte, a scale for each output. The layer is a `torch.nn.Linear` by its class."""
    numbers = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8)
    nothing = torch.tensor(0.0)
    scales = {"weight_scale": torch.rand(weight.shape[0], 1) * 0.01}
    return {"weight": numbers, **scales, "input_activation_scale": nothing, "output_activation_scale": nothing.clone()}


FORMATS: dict[str, Callable[[Path], Written]] = {
    "gguf": gguf_of(),
    "gguf-types-that-are-not-kept": gguf_of("IQ4_NL"),
    "pack": pack_of("pack"),
    "pack-8-bits": pack_of("pack-8-bits"),
    "pack-channels": pack_of("pack-channels"),
    "pack-unpacked": pack_of("pack", dequantize=True),
    "pack-8-bits-unpacked": pack_of("pack-8-bits", dequantize=True),
    "fp8": linears_as("fp8", fp8, weight_block_size=[32, 32], activation_scheme="dynamic"),
    "gemma": linears_as("gemma", gemma, num_bits=4),
}


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Written]:
    fastgen.reset_stats()
    folder = tmp_path / "given"
    folder.mkdir()
    return folder, FORMATS[request.param](folder)


# ---- what is returned


def seen(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """What a program may look at, before the first forward pass."""
    modules = {name: type(module) for name, module in model.named_modules()}
    found = {"modules": modules, "config": model.config.to_dict(), "keys": list(model.state_dict())}
    try:
        model.save_pretrained(folder)
        files = {path.name for path in folder.iterdir()}
        found["saved"] = files, json.loads((folder / "config.json").read_text())
    except Exception as error:  # the library cannot save all that it loads
        found["saved"] = type(error), str(error)
    found["quantizer"] = type(getattr(model, "hf_quantizer", None))
    return found


def check_equal_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert type(ours[name]) is type(tensor) and ours[name].dtype is tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_untouched(checkpoint: tuple[Path, Written], tmp_path: Path) -> None:
    folder, named = checkpoint
    without_fastgen(folder, **named)  # some imports warn
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = load(folder, **named)
    with warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always")
        theirs = without_fastgen(folder, **named)
    assert [str(each.message) for each in said] == [str(each.message) for each in expected]
    assert not any(isinstance(module, QuantizedWeight) for module in ours.modules())
    assert ENTRY_POINT not in fastgen.stats()
    assert seen(ours, tmp_path / "ours") == seen(theirs, tmp_path / "theirs")
    check_equal_tensors(ours.state_dict(), theirs.state_dict())
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        check_equal_tensors(load_file(tmp_path / "ours" / file.name), load_file(file))
    inputs = inputs_of(theirs)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # the library compiles parts of some layers
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    check_equal_tensors(ours.state_dict(), theirs.state_dict())  # some are unpacked by the first forward pass


def test_tokens(checkpoint: tuple[Path, Written]) -> None:
    """Layers of the library's that FastGen does not know multiply as they do without it."""
    folder, named = checkpoint
    model = load(folder, dtype=torch.float32, **named)
    given = inputs_of(model) | {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    with torch.compiler.set_stance("force_eager"):
        with fastgen.disabled():
            expected = model.generate(**given)
        for captured_step in ("always", "never"):
            with settings.changed(captured_step=captured_step):
                assert torch.equal(model.generate(**given), expected), captured_step


def answer(config: Any) -> Any:
    """What the library prepares a model with, or why it does not."""
    from transformers import modeling_utils

    try:
        quantizer, *_ = modeling_utils.get_hf_quantizer(config, None, device_map=None, weights_only=True, user_agent={})
    except Exception as error:  # the library has one of its own for each
        return type(error), str(error)
    return type(quantizer), quantizer.quantization_config.to_dict()


@pytest.mark.parametrize("method", sorted(auto.AUTO_QUANTIZATION_CONFIG_MAPPING))
def test_every_method_of_the_library(method: str) -> None:
    """Also of those whose packages are missing here: its answer, or its error."""
    named: dict[str, Any] = {"bits": 4, "group_size": 64}
    if method.startswith("bitsandbytes"):
        named = {"load_in_4bit": method.endswith("4bit"), "load_in_8bit": method.endswith("8bit")}

    def asked() -> Any:
        config = llama().config
        name = "bitsandbytes" if method.startswith("bitsandbytes") else method
        config.quantization_config = {"quant_method": name, **named}
        return answer(config)

    ours = asked()
    with fastgen.disabled():
        theirs = asked()
    known = configurations._METHODS.get(method)
    if known is None or known.library_loads():
        assert ours == theirs
    else:  # it lacks a package, and FastGen serves what it can
        assert theirs[0] is ImportError and ours[0] is StoredQuantizer
