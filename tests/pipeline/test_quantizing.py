"""A run of `fastgen-quantize` in one process: what is written, what is read, resumption."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastgen
from fastgen.pipeline.errors import PipelineError, SetupError
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.quantizing import QuantizeOptions, quantize_model, saving
from fastgen.pipeline.quantizing import run as running
from fastgen.pipeline.quantizing.saving import load_model
from fastgen.pipeline.quantizing.texts import Texts, samples, sequences
from fastgen.quantization import calibration
from fastgen.quantization.grouped import dequantized
from fastgen.quantization.layers import QuantizedWeight
from fastgen.quantization.writing import load_block
from tests.pipeline import tiny
from tests.quantization import tiny as families

pytestmark = pytest.mark.sampled(5)


def _saved(build, folder: Path) -> Path:
    tokens = tiny.tokenizer(encoder_decoder=False)
    build(vocab_size=len(tokens)).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return _saved(families.llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    """Its output layer has the weight of its embedding."""
    return _saved(lambda **sizes: families.llama(tie_word_embeddings=True, **sizes), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    return _saved(families.gpt2, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(tiny.sentences(30)) + "\n")
    return path


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "pairs.txt"
    made = zip(tiny.sentences(8), tiny.sentences(8, seed=1), strict=True)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in made))
    return path


def options(model, out, text, **changes):
    usual = {"group_size": 16, "samples": 4, "sample_length": 32, "device": "cpu", "quiet": True}
    return QuantizeOptions(model=str(model), output=str(out), calibration=str(text), **(usual | changes))


def run(model, out, text, **changes):
    return quantize_model(options(model, out, text, **changes))


def loaded_by_the_library(out, kind):
    """Without FastGen, which would read the file itself."""
    pytest.importorskip("compressed_tensors")
    with fastgen.disabled():
        return kind.from_pretrained(out).eval()


@pytest.fixture
def kept(monkeypatch):
    """The models that runs have quantised, with the weights that theirs stand for."""
    models = []

    def save(loaded, *args):
        models.append({name: tensor.clone() for name, tensor in loaded.model.state_dict().items()})
        return saving.save(loaded, *args)

    monkeypatch.setattr(running, "save", save)
    return models


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bits": 8, "asymmetric": True},
        {"asymmetric": True, "output_layer": True},
        {"method": "rtn"},
        {"max_error": 0.06},
        {"dtype": "bf16"},
    ],
)
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


@pytest.mark.parametrize(
    "changes",
    [{"bits": 8}, {"asymmetric": True}, {"bits": 8, "dtype": "bf16"}],
)
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
    assert embedding.packed_numbers.data_ptr() == head.packed_numbers.data_ptr()
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

    run(_saved(build, tmp_path / "model"), tmp_path / "out", text, bits=8, method="rtn", output_layer=True)
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

    model = families.FAMILIES[family]()
    tokens = tiny.tokenizer(encoder_decoder=True)
    model.resize_token_embeddings(len(tokens))
    model.save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
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
        ("llama", []),
        ("llama", ["--asymmetric", "--output-layer"]),
        ("llama", ["--bits-per-weight", "6", "--dtype", "bf16"]),
        ("gpt2", []),
        ("bart", []),
        ("t5", ["--asymmetric"]),
    ],
)
def test_autoround(family, changes, llama, gpt2, text, pairs, tmp_path):
    """In a process of its own: importing the package changes Transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, given, folder = AutoModelForCausalLM, text, {"llama": llama, "gpt2": gpt2}.get(family)
    if folder is None:
        kind, given, folder = AutoModelForSeq2SeqLM, pairs, tmp_path / "model"
        model, tokens = families.FAMILIES[family](), tiny.tokenizer(encoder_decoder=True)
        model.resize_token_embeddings(len(tokens))
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)
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


def test_the_report(llama, text, tmp_path):
    report = run(llama, tmp_path / "out", text, evaluate=str(text))
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [layer["name"] for layer in written["layers"]] == [layer.name for layer in report.layers]
    assert written["measure"] == "perplexity"
    assert written["bytes"]["before"] > written["bytes"]["after"] > 0
    assert written["tokens_per_second"]["before"] > 0
    assert 1 < written["quality"]["before"] != written["quality"]["after"]
    assert all(0 < layer["error"] < 0.5 for layer in written["layers"])


def test_perplexity_is_that_of_the_text(llama, text, tmp_path):
    from transformers import AutoModelForCausalLM

    from fastgen.pipeline.quantizing.evaluation import quality

    given = options(llama, tmp_path / "out", text)
    loaded = load_model(given)
    found = quality(loaded, list(Texts(given.reading(str(text), None))))
    ids = loaded.tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
    model, losses = AutoModelForCausalLM.from_pretrained(llama).eval(), []
    for part in ids.split(loaded.positions):
        if len(part) > 1:
            with torch.no_grad():
                losses += [float(model(part[None], labels=part[None]).loss)] * (len(part) - 1)
    assert found.measured_on == len(losses)
    assert found.value == pytest.approx(float(torch.tensor(losses).double().mean().exp()), rel=1e-4)


def test_samples_of_a_decoder_only_model(llama, text, tmp_path):
    given = options(llama, tmp_path / "out", text)
    loaded, texts = load_model(given), Texts(given.reading(str(text), None))
    made = [sample["input_ids"][0].tolist() for sample in samples(loaded, texts, 1000, 10)]
    joined = [token for ids in made for token in ids]
    assert joined == loaded.tokenizer(text.read_text()).input_ids[: len(joined)]
    assert {len(ids) for ids in made[:-1]} == {10}
    assert len(samples(loaded, texts, 2, 10)) == 2
    assert len(next(sequences(loaded, texts, 10**6))[0]) == loaded.positions


def test_an_encoder_decoder_writes_the_targets_that_are_missing(bart, pairs, tmp_path):
    given = options(bart, tmp_path / "out", pairs)
    loaded = load_model(given)
    (tmp_path / "sources.txt").write_text(pairs.read_text().splitlines()[0].partition("\t")[0] + "\n")
    made = samples(loaded, Texts(given.reading(str(tmp_path / "sources.txt"), None)), 4, 32)
    own = loaded.model.generate(input_ids=made[0]["input_ids"])
    assert made[0]["labels"].tolist() == own[:, 1:].tolist()
    told = samples(loaded, Texts(given.reading(str(pairs), None)), 1, 32)
    target = pairs.read_text().splitlines()[0].partition("\t")[2]
    assert told[0]["labels"].tolist() == [loaded.tokenizer(target).input_ids]


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("blocks", "changes"), [(0, {}), (1, {}), (2, {}), (1, {"bits_per_weight": 7})], ids=["0", "1", "2", "mixed"]
)
def test_an_interrupted_run_ends_in_the_same_weights(llama, text, tmp_path, monkeypatch, blocks, changes):
    run(llama, tmp_path / "whole", text, **changes)
    real, done = calibration.quantise_block, []

    def stop_after(*args):
        if len(done) == blocks:
            raise KeyboardInterrupt
        done.append(args[0].name)
        return real(*args)

    monkeypatch.setattr(calibration, "quantise_block", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path / "out", text, **changes)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("block-*.safetensors"))) == blocks
    monkeypatch.setattr(calibration, "quantise_block", lambda *args: done.append(args[0].name) or real(*args))
    # Which layers get 8 bits is known, also where the model is measured on another text.
    evaluated = {"evaluate": str(text)} if changes else {}
    monkeypatch.setattr(calibration, "choices_of", lambda *_: pytest.fail("measured again"))
    run(llama, tmp_path / "out", text, resume=True, **changes, **evaluated)
    assert done == [f"model.layers.{number}" for number in range(3)]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "whole")]
    assert reports[0]["layers"] == reports[1]["layers"]
    assert {layer["bits"] for layer in reports[0]["layers"]} == ({4, 8} if changes else {4})


def test_what_a_run_may_be_resumed_with(llama, bart, text, pairs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(running, "_quantise", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(llama, tmp_path / "out", text)
    with pytest.raises(SetupError, match="is left from an interrupted run"):
        run(llama, tmp_path / "out", text)
    for changes, message in (({"group_size": 32}, "group_size was 16 and is now 32"), ({"bits": 8}, "bits was 4")):
        with pytest.raises(SetupError, match=message):
            run(llama, tmp_path / "out", text, resume=True, **changes)
    other = tmp_path / "other.txt"
    other.write_text("in the beginning\n")
    with pytest.raises(SetupError, match=r"cannot resume with other settings: text"):
        run(llama, tmp_path / "out", other, resume=True)
    assert run(llama, tmp_path / "out", text, resume=True, evaluate=str(other)).measure == "perplexity"
    # It is complete: nothing is done again, and other settings are told.
    assert run(llama, tmp_path / "out", text, resume=True) is None
    with pytest.raises(SetupError, match="is not of this model, text and options"):
        run(llama, tmp_path / "out", text, resume=True, bits=8)
    with pytest.raises(SetupError, match="exists already"):
        run(llama, tmp_path / "out", text)
    assert run(llama, tmp_path / "out", text, overwrite=True, bits=8).bits == 8
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]


def test_a_run_that_ended_between_its_last_two_steps(llama, text, tmp_path, monkeypatch):
    from fastgen.pipeline.quantizing.work import Work

    with monkeypatch.context() as patch:
        patch.setattr(Work, "_drop", lambda self: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run(llama, tmp_path / "out", text)
    assert (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    assert run(llama, tmp_path / "out", text, resume=True) is None
    assert not (tmp_path / "out.partial").exists()


def test_what_fastgen_did_not_write_is_not_replaced(llama, text, tmp_path):
    for name in ("out", "other.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    for out in ("out", "other"):
        with pytest.raises(SetupError, match="was not written by fastgen-quantize"):
            run(llama, tmp_path / out, text, overwrite=True)
    assert (tmp_path / "out" / "mine").exists() and (tmp_path / "other.partial" / "mine").exists()


def test_two_runs_do_not_write_one_output(llama, text, tmp_path, monkeypatch):
    def second(*_):
        with pytest.raises(SetupError, match="another run is writing"):
            run(llama, tmp_path / "out", text, resume=True)
        raise Stop

    monkeypatch.setattr(running, "_quantise", second)
    with pytest.raises(Stop):
        run(llama, tmp_path / "out", text)


def test_a_full_disk(llama, text, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (10_000, 20_000):  # of a block, and of the model
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            with pytest.raises(PipelineError, match=r"cannot write .*(block|model).*--resume"):
                run(llama, tmp_path / "out", text, resume=(tmp_path / "out.partial").exists())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "out").exists()
    run(llama, tmp_path / "out", text, resume=True)
    run(llama, tmp_path / "whole", text)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_damaged_block_is_told(llama, text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(running, "save", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run(llama, tmp_path / "out", text)
    block = tmp_path / "out.partial" / "block-0001.safetensors"
    assert all(dequantized(layer.weight, torch.float32).isfinite().all() for layer in load_block(block).values())
    os.truncate(block, 100)
    with pytest.raises(SetupError, match=r"block-0001.safetensors is damaged"):
        run(llama, tmp_path / "out", text, resume=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "has no text"), (b"in the\n\xff\xfe\xfa\n", r"line 2: .*UTF-8"), (b"", "is empty|has no text"),
        (b"a\0b\n", "line 1: the text has a NUL"), (b"\xff\xfea\0b\0", "UTF-16"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_used(llama, tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(SetupError, match=message):
        run(llama, tmp_path / "out", tmp_path / "bad.txt")
    assert not (tmp_path / "out.partial").exists()


def test_columns_and_references(llama, bart, tmp_path):
    rows = [{"s": source, "t": source.upper()} for source in tiny.sentences(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = options(bart, tmp_path / "out", tmp_path / "rows.jsonl", input_column="s", reference_column="t")
    assert [tuple(text) for text in Texts(given.reading(given.calibration, None))] == [(r["s"], r["t"]) for r in rows]
    with pytest.raises(SetupError, match=r"choose the input column \(--input-column\)"):
        run(llama, tmp_path / "out", tmp_path / "rows.jsonl")
    (tmp_path / "sources.txt").write_text("in the beginning\n")
    with pytest.raises(SetupError, match="has sources without references"):
        run(bart, tmp_path / "out", tmp_path / "sources.txt", evaluate=str(tmp_path / "sources.txt"))


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


def test_the_choice_is_greedy():
    choice = calibration.Choice
    given = [choice(("a",), 1.0, 100, 0.25), choice(("b", "c"), 3.0, 200, 0.25), choice(("d",), 0.5, 10, 0.25)]
    assert calibration.most_gaining(given, 8.25) == {"a", "b", "c", "d"}
    assert calibration.most_gaining(given, 4.25) == frozenset()
    assert calibration.most_gaining(given, 4.4) == {"d"}
    assert calibration.most_gaining(given, 7.0) == {"d", "b", "c"}
    assert calibration.most_gaining(given, 6.0) == {"d", "a"}  # what does not fit is passed over


@pytest.mark.parametrize("again", ["resume", "overwrite"])
@pytest.mark.parametrize("killed_at", [1, 2, 4, 7])
def test_a_kill_while_the_directory_is_removed(killed_at, again, llama, text, tmp_path, monkeypatch):
    """Whatever is left says whose it is: the next run takes it over, or drops it."""
    with monkeypatch.context() as patch:
        patch.setattr(running, "_write", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run(llama, tmp_path / "out", text)
    removed = itertools.count(1)

    def until(remove):
        def removing(path, *args, **kwargs):
            if next(removed) == killed_at:
                raise Stop
            return remove(path, *args, **kwargs)

        return removing

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", until(os.unlink))
        patch.setattr(Path, "unlink", until(Path.unlink))
        patch.setattr(os, "rmdir", until(os.rmdir))
        with contextlib.suppress(Stop):
            run(llama, tmp_path / "out", text, overwrite=True)
    run(llama, tmp_path / "out", text, **{again: True})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]
