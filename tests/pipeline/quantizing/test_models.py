"""What `fastgen-quantize` writes, and who loads it: plain Transformers, and FastGen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastgen
from fastgen.pipeline.errors import PipelineError, SetupError
from fastgen.pipeline.generation.loading import load
from fastgen.quantization.layers import QuantizedWeight
from tests.pipeline import tiny
from tests.pipeline.quantizing.runs import encoder_decoder, loaded_by_the_library, run, saved
from tests.quantization import tiny as families

pytestmark = pytest.mark.sampled(5)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"bits": 8, "asymmetric": True}, {"asymmetric": True, "output_layer": True}, {"method": "rtn"},
        {"max_error": 0.06}, {"dtype": "bf16"},
    ],
)  # fmt: skip
def test_plain_transformers_loads_the_quantised_model(llama, text, tmp_path, kept, changes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = run(llama, tmp_path / "out", text, **changes)
    dtype = torch.bfloat16 if "dtype" in changes else torch.float32
    ours = AutoModelForCausalLM.from_pretrained(llama, dtype=dtype).eval()
    before = ours(torch.arange(3, 20)[None]).logits
    ours.load_state_dict(kept[0])
    theirs = loaded_by_the_library(tmp_path / "out", AutoModelForCausalLM)
    assert not any(isinstance(module, QuantizedWeight) for module in theirs.modules())
    with torch.no_grad():
        expected, found = (model(torch.arange(3, 20)[None]).logits for model in (ours, theirs))
    assert found.dtype == ours.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(before, expected)
    tokens = [AutoTokenizer.from_pretrained(path)("in the beginning").input_ids for path in (llama, tmp_path / "out")]
    assert tokens[0] == tokens[1]
    assert {layer.bits for layer in report.layers} == ({4, 8} if "max_error" in changes else {changes.get("bits", 4)})
    assert ("lm_head" in report.left_out) != ("output_layer" in changes)


@pytest.mark.parametrize("changes", [{"bits": 8}, {"asymmetric": True}, {"bits": 8, "dtype": "bf16"}])
def test_an_output_layer_that_is_the_embedding(tied, text, tmp_path, kept, changes):
    """Its weight is stored once, and both have it; in Transformers alone, too."""
    from transformers import AutoModelForCausalLM

    report = run(tied, tmp_path / "out", text, output_layer=True, **changes)
    assert report.left_out == [] and report.layers[-1].name == "model.embed_tokens"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight_packed" in stored
    assert not [name for name in stored if name.startswith("lm_head") or name == "model.embed_tokens.weight"]
    ours = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16 if "dtype" in changes else None).eval()
    ours.load_state_dict(kept[0])
    theirs = loaded_by_the_library(tmp_path / "out", AutoModelForCausalLM)
    with torch.no_grad():
        expected, found = (model(torch.arange(3, 20)[None]).logits for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    fastgen.reset_stats()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert fastgen.stats()["transformers.from_pretrained"] == {"accelerated": 1, "fallback": {}}
    embedding, head = read.get_input_embeddings(), read.get_output_embeddings()
    assert isinstance(embedding, QuantizedWeight) and isinstance(head, QuantizedWeight)
    assert embedding.packed_qweight.data_ptr() == head.packed_qweight.data_ptr()
    with fastgen.disabled(), torch.no_grad():
        torch.testing.assert_close(read(torch.arange(3, 20)[None]).logits, expected)
    read.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name in stored.keys() | again.keys():
        assert torch.equal(again[name], stored[name].to(again[name].dtype)), name
    plain = read.dequantize()
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight


def test_an_output_layer_of_its_own_stays_so_when_it_is_unpacked(tied, text, tmp_path):
    """The configuration says that it is the embedding, and the files hold two weights."""
    from transformers import AutoModelForCausalLM

    run(tied, tmp_path / "out", text, output_layer=True, bits=8)
    file = tmp_path / "out" / "model.safetensors"
    tensors, embedding = load_file(file), "model.embed_tokens."
    for name in [name for name in tensors if name.startswith(embedding)]:
        other = tensors[name].clone()
        tensors[name.replace(embedding, "lm_head.")] = other * 2 if name.endswith("scale") else other
    save_file(tensors, file, metadata={"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with fastgen.disabled(), torch.no_grad():
        expected = read(torch.arange(3, 20)[None]).logits
        plain = read.dequantize()
        torch.testing.assert_close(plain(torch.arange(3, 20)[None]).logits, expected)
    assert plain.get_output_embeddings().weight is not plain.get_input_embeddings().weight


def test_scales_are_stored_in_the_type_that_the_library_multiplies_in(text, tmp_path, kept):
    """Numbers of 8 bits times a scale that fits into float16: the products do not fit."""
    from transformers import AutoModelForCausalLM

    def build(**sizes):
        model = families.llama(tie_word_embeddings=True, **sizes)
        numbers = torch.randint(-127, 128, model.lm_head.weight.shape)
        numbers[:, ::16] = 127
        model.lm_head.weight.data = numbers * torch.tensor(0.00123, dtype=torch.float16).float()
        return model

    run(saved(build, tmp_path / "model"), tmp_path / "out", text, bits=8, method="rtn", output_layer=True)
    theirs = loaded_by_the_library(tmp_path / "out", AutoModelForCausalLM)
    assert torch.equal(theirs.lm_head.weight, kept[0]["lm_head.weight"])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("tied", {"max_error": 0.06}, "cannot load that beside layers of other bits"),
        ("tied", {"bits_per_weight": 6.0}, "cannot load that beside layers of other bits"),
        ("gpt2", {}, "the format of GPTQ has none"),
    ],
)
def test_embeddings_that_no_format_holds(family, changes, message, text, tmp_path, request):
    with pytest.raises(SetupError, match=message):
        run(request.getfixturevalue(family), tmp_path / "out", text, output_layer=True, **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bart", {}), ("t5", {}), ("marian", {}), ("t5", {"output_layer": True}), ("marian", {"output_layer": True})],
)
def test_encoder_decoders(family, changes, pairs, tmp_path, kept):
    from transformers import AutoModelForSeq2SeqLM

    model = encoder_decoder(family, tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "out", pairs, evaluate=str(pairs), **changes)
    assert (report.measure, report.measured_on, report.samples) == ("bleu", 8, 4)
    names = {layer.name for layer in report.layers}
    assert any("encoder" in name for name in names)
    assert any("encoder_attn.k_proj" in name or "EncDecAttention.k" in name for name in names)
    model.load_state_dict(kept[0])
    theirs = loaded_by_the_library(tmp_path / "out", AutoModelForSeq2SeqLM)
    call = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.tensor([[1, 5, 7]])}
    with torch.no_grad():
        torch.testing.assert_close(theirs(**call).logits, model(**call).logits, rtol=0, atol=0)
    read = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert isinstance(read.get_input_embeddings(), QuantizedWeight) == bool(changes)
    with fastgen.disabled(), torch.no_grad():
        torch.testing.assert_close(read(**call).logits, model(**call).logits)


def test_autoround_where_it_is_not_installed(llama, text, tmp_path, monkeypatch):
    find, remedy = importlib.util.find_spec, "pip install auto-round==0.16.1"
    for missing, message in (("auto_round", "auto-round"), ("accelerate", "accelerate")):
        known = {"auto_round": object(), missing: None}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest, known=known: known[name] if name in known else find(name, *rest),
        )
        with pytest.raises(SetupError) as refused:
            run(llama, tmp_path / "out", text, method="autoround")
        expected = f"--method autoround needs the package {message}, which is not installed: {remedy}"
        assert str(refused.value) == expected
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("auto_round") is None, reason="no auto-round")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", []), ("llama", ["--asymmetric", "--output-layer"]),
        ("llama", ["--bits-per-weight", "6", "--dtype", "bf16"]), ("gpt2", []), ("bart", []), ("t5", ["--asymmetric"]),
    ],
)  # fmt: skip
def test_autoround(family, changes, llama, gpt2, text, pairs, tmp_path):
    """In a process of its own: importing the package changes Transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, given, folder = AutoModelForCausalLM, text, {"llama": llama, "gpt2": gpt2}.get(family)
    if folder is None:
        kind, given, folder = AutoModelForSeq2SeqLM, pairs, tmp_path / "model"
        encoder_decoder(family, folder)
    words = ["--method", "autoround", "--iterations", "8", "--group-size", "16", "--samples", "4", "--quiet"]
    command = [sys.executable, "-m", "fastgen_cli.quantize", folder, tmp_path / "out", "--calibration", given]
    command += ["--sample-length", "32", "--device", "cpu", *words, *changes]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["method"] == "autoround" and report["symmetric"] == ("--asymmetric" not in changes)
    assert all(0 < layer["error"] < 0.5 for layer in report["layers"])
    assert {layer["bits"] for layer in report["layers"]} == ({4, 8} if "--bits-per-weight" in changes else {4})
    run(folder, tmp_path / "rtn", given, method="rtn", asymmetric="--asymmetric" in changes)
    ours = kind.from_pretrained(tmp_path / "out").eval()
    nearest = kind.from_pretrained(tmp_path / "rtn").eval()
    layers = [(name, module) for name, module in ours.named_modules() if isinstance(module, QuantizedWeight)]
    assert len(layers) == len(report["layers"])
    assert any(
        not torch.equal(module.dequantized(), nearest.get_submodule(name).dequantized())
        for name, module in layers
        if name != "lm_head"
    )
    if family == "gpt2":  # which the library needs another package for
        return
    theirs = loaded_by_the_library(tmp_path / "out", kind)
    call = {"input_ids": torch.arange(3, 20)[None]}
    if family in ("bart", "t5"):
        call["decoder_input_ids"] = torch.tensor([[1, 5, 7]])
    with torch.no_grad(), fastgen.settings.changed(activations="float"):
        expected, found = (model(**call).logits for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if "bf16" not in changes else 2e-2)


def test_models_that_cannot_be_quantised(llama, text, tmp_path):
    run(llama, tmp_path / "small", text)
    pytest.importorskip("compressed_tensors")
    with pytest.raises(SetupError, match="is quantised already"):
        run(tmp_path / "small", tmp_path / "out", text)
    with pytest.raises(PipelineError, match="in groups of 24"):
        run(llama, tmp_path / "out", text, group_size=24)


def test_weights_that_were_stored_in_half_precision_stay_so(llama, text, tmp_path):
    from fastgen.pipeline.generation import RunOptions

    whole = load(RunOptions(str(llama), str(text), "-")).model
    halved = whole.half().float()
    halved.save_pretrained(tmp_path / "halved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "halved" / name).write_bytes((llama / name).read_bytes())
    for model, dtype in ((tmp_path / "halved", torch.float16), (llama, torch.float32)):
        run(model, tmp_path / "out", text, overwrite=True)
        assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].dtype == dtype


@pytest.mark.parametrize("changes", [{}, {"asymmetric": True}, {"max_error": 0.08, "group_size": 64}, {"bits": 8}])
def test_layers_of_gpt2(gpt2, text, tmp_path, kept, changes):
    """Their weights are [inputs, outputs]. OUT is in the format of GPTQ, and has what the run has measured."""
    from transformers import GPT2LMHeadModel

    report = run(gpt2, tmp_path / "out", text, **changes)
    assert len(report.layers) == 8 and report.left_out == ["lm_head"]
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "gptq" and "-:^lm_head$" in stored["dynamic"]
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}
    assert {name: module.bits for name, module in layers.items()} == {each.name: each.bits for each in report.layers}
    for name, layer in layers.items():
        torch.testing.assert_close(layer.dequantized(), kept[0][f"{name}.weight"], atol=1e-6, rtol=1e-4)
    model.dequantize()
    plain = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    tokens = torch.randint(3, 20, (2, 9))
    with torch.no_grad():
        change = (model(tokens).logits - plain(tokens).logits).norm() / plain(tokens).logits.norm()
    assert 0 < float(change) < 0.5


def test_a_budget_of_bits(llama, text, tmp_path):
    """8 bits go to the layers that gain most per byte, and never beyond the budget."""
    sizes = {name: weight.numel() for name, weight in load_file(llama / "model.safetensors").items()}
    means = {}
    for budget in (6.0, 7.0, 9.9):  # scales in float32 and groups of 16: 2 bits of each weight
        report = run(llama, tmp_path / "out", text, method="rtn", bits_per_weight=budget, overwrite=True)
        bits = {layer.name: layer.bits for layer in report.layers}
        numbers = {name: sizes[f"{name}.weight"] for name in bits}
        used = sum(numbers[name] * (bits[name] + 2) for name in bits) / sum(numbers.values())
        assert used <= budget and set(bits.values()) == ({4} if budget == 6.0 else {4, 8})
        assert used > budget - 1.0
        means[budget] = sum(layer.error for layer in report.layers)
        inner = [name for name in bits if name.endswith(("q_proj", "k_proj", "v_proj"))]
        assert all(bits[name] == bits[name.rpartition(".")[0] + ".q_proj"] for name in inner)  # one input, one choice
    assert means[6.0] > means[7.0] > means[9.9]
    with pytest.raises(PipelineError, match="bits-per-weight is too small: 4 bits with their scales are 6.00"):
        run(llama, tmp_path / "small", text, bits_per_weight=5.9)


def test_a_model_that_takes_pictures(text, tmp_path, kept):
    """What reads them is beside it, and is as it was; the layers that no text goes through are left alone."""
    from PIL import Image
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    model, picture = tiny.pictures(tmp_path / "llava"), Image.new("RGB", (20, 20), "red")
    report = run(model, tmp_path / "out", text)
    given = [
        AutoProcessor.from_pretrained(folder)(images=picture, text="<image> in the beginning", return_tensors="pt")
        for folder in (model, tmp_path / "out")
    ]
    assert given[0].keys() == given[1].keys()
    assert all(torch.equal(given[0][name], given[1][name]) for name in given[0])
    assert all("language_model" in layer.name for layer in report.layers)
    ours = AutoModelForMultimodalLM.from_pretrained(model).eval()
    ours.load_state_dict(kept[0])
    theirs = loaded_by_the_library(tmp_path / "out", AutoModelForMultimodalLM)
    with fastgen.disabled(), torch.no_grad():
        torch.testing.assert_close(theirs(**given[0]).logits, ours(**given[0]).logits, rtol=0, atol=0)
        expected = theirs.generate(**given[0], max_new_tokens=6)
    found = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out").generate(**given[0], max_new_tokens=6)
    assert torch.equal(found, expected)
