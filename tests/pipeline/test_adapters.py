"""A folder with adapters of peft alone: the commands run the model that they were trained for, with them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastgen.pipeline import SetupError, generate_dataset
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.journal import _plain, content
from tests.pipeline import tiny
from tests.pipeline.test_loading import settings

peft = pytest.importorskip("peft", reason="peft is not there")

KINDS = {
    "bart": (transformers.AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM", ["q_proj", "v_proj"]),
    "gpt2": (transformers.AutoModelForCausalLM, "CAUSAL_LM", ["c_attn"]),
}


def saved(name: str, base: Path, folder: Path) -> Path:
    """Adapters that change what the model says."""
    kind, task, layers = KINDS[name]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=layers, task_type=task, init_lora_weights=False)
    peft.get_peft_model(kind.from_pretrained(base), config).save_pretrained(folder)
    return folder


def change(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model, BART unless the test has several, and adapters for it."""
    name = getattr(request, "param", "bart")
    base = Path(shutil.copytree(request.getfixturevalue(name), tmp_path / name))
    return base, saved(name, base, tmp_path / "adapters")


of_both_kinds = pytest.mark.parametrize("both", KINDS, indirect=True)


@of_both_kinds
def test_it_runs_as_the_library_loads_it(both: tuple[Path, Path], inputs: Path, tmp_path: Path) -> None:
    """With the tokenizer of the model."""
    base, folder = both
    options = {"generation": {"max_new_tokens": 8}, "batch_size": 1, "device": "cpu", "quiet": True, "workers": 0}
    lines: dict[Path, list[str]] = {}
    for model in both:
        generate_dataset(model, inputs, tmp_path / "out.jsonl", overwrite=True, **options)
        lines[model] = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[base] != lines[folder]
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(base), KINDS[base.name][0].from_pretrained(folder)
    for line, text in zip(lines[folder][:5], inputs.read_text().splitlines(), strict=False):
        ids = tokenizer(text, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=8)[0, 0 if model.config.is_encoder_decoder else ids.shape[1] :]
        assert line.strip() == tokenizer.decode(made, skip_special_tokens=True).strip()


def test_a_line_says_where_they_are(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    load(settings(both[1]))
    assert f"with the adapters in {both[1]}\n" in capsys.readouterr().err


def test_a_tokenizer_beside_the_adapters(both: tuple[Path, Path]) -> None:
    """Training may have added tokens."""
    base, folder = both
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.bos_token = "god"
    tokenizer.save_pretrained(folder)
    assert load(settings(folder, quiet=True)).tokenizer.bos_token == "god"
    assert load(settings(base, quiet=True)).tokenizer.bos_token != "god"


def _without_weights(base: Path, folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _with_half(base: Path, folder: Path) -> None:
    tiny.change_weights(folder, lambda weights: weights.pop(min(weights)), "adapter_model.safetensors")


def _of_half_a_model(base: Path, folder: Path) -> None:
    tiny.change_weights(base, lambda weights: weights.pop(min(name for name in weights if name.endswith(".bias"))))


def _of_a_damaged_model(base: Path, folder: Path) -> None:
    (base / "generation_config.json").write_text("{")


def _of_a_model_with_adapters(base: Path, folder: Path) -> None:
    """Which the library loads by itself."""
    shutil.copy(folder / "adapter_config.json", base)
    shutil.copy(folder / "adapter_model.safetensors", base)
    change(base, megatron_config={"a": 1}, megatron_core="this")


DAMAGES: list[tuple[Callable[[Path, Path], object], str]] = [
    (_without_weights, "adapter_model"),
    (_with_half, "1 of its weights are missing, .*lora_A"),
    (_of_half_a_model, "1 of its weights are missing, .*bias"),
    (_of_a_damaged_model, "generation config"),
    (
        lambda base, folder: shutil.rmtree(base),
        "adapters alone, of a model that is not there: .* no such directory",
    ),
    (lambda base, folder: change(folder, megatron_config={"a": 1}, megatron_core="this"), "for Megatron"),
    (_of_a_model_with_adapters, "for Megatron"),
    (lambda base, folder: change(folder, alora_invocation_tokens=[5, 6]), "begin at tokens of the prompt"),
    (lambda base, folder: change(folder, base_model_name_or_path=None), "does not name their model"),
    (lambda base, folder: (folder / "adapter_config.json").write_text("{"), "of the adapters .* is not valid JSON"),
    (lambda base, folder: change(folder, peft_type="PROMPT_TUNING", num_virtual_tokens=4), "prompt learning"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_what_is_damaged(both: tuple[Path, Path], damage: Callable[[Path, Path], object], said: str) -> None:
    damage(*both)
    with pytest.raises(SetupError, match=said) as raised:
        load(settings(both[1]))
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_here(both: tuple[Path, Path], hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fails)
    change(both[1], base_model_name_or_path="a/b")
    with pytest.raises(SetupError, match=r"\(adapters for a/b\) cannot be loaded: there is no such folder"):
        load(settings(both[1]))


def test_without_peft(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    with pytest.raises(SetupError, match="has adapters alone, and needs the package peft, .*: pip install peft"):
        load(settings(both[1]))


@of_both_kinds
def test_a_run_is_not_resumed_with_other_adapters(both: tuple[Path, Path]) -> None:
    """The same weights count for more with another `lora_alpha`."""
    found = []
    for alpha in (64, 64, 32):
        change(both[1], lora_alpha=alpha)
        loaded = load(settings(both[1], quiet=True))
        found.append(content(loaded.model, loaded.tokenizer))
    assert found[0] == found[1] and found[0] != found[2]


def test_nothing_of_adapters_beside_a_whole_model_is_imported(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configuration of adapters for Megatron, peft imports what it names."""
    base, folder = both
    _of_a_model_with_adapters(base, folder)
    imported: list[str] = []
    load_module = importlib.import_module
    monkeypatch.setattr("importlib.import_module", lambda name, *rest: (imported.append(name), load_module(name))[1])
    with pytest.raises(SetupError, match="for Megatron"):
        load(settings(base))
    assert "this" not in imported


def test_a_run_knows_its_adapters_in_another_process_and_place() -> None:
    """A set of layers has another order in each process."""
    few = {f"layer_{number}" for number in range(16)}
    many = {*few, *map(str, range(1000))}
    for number in range(1000):
        many.discard(str(number))
    assert few == many and list(few) != list(many)
    there = {"base_model_name_or_path": "there", "revision": "main", "peft_version": "0.21"}
    assert _plain({"target_modules": few}) == _plain({"target_modules": many, **there})


def test_vectors_are_made_as_the_model_makes_them(tmp_path: Path) -> None:
    """With the pooling and the prompts of the model that the adapters were trained for."""
    from fastgen.pipeline.encoding.loading import load_embedder
    from fastgen.pipeline.settings import EmbedOptions
    from fastgen_serve.workers.encoders import VectorEncoder, classifies
    from fastgen_serve.workers.loading import generates

    base = tiny.bert(tmp_path / "bert")
    pooling = {"pooling_mode": "cls"}
    tiny.sentence_files(base, ("Pooling", pooling), ("Normalize", {}), prompts={"prompts": {"query": "q: "}})
    config = peft.LoraConfig(r=4, target_modules=["query"], task_type="FEATURE_EXTRACTION", init_lora_weights=False)
    peft.get_peft_model(transformers.AutoModel.from_pretrained(base), config).save_pretrained(tmp_path / "adapters")
    options = EmbedOptions(str(tmp_path / "adapters"), "-", "-", device="cpu", quiet=True)
    modules = load_embedder(options).modules
    assert modules.pooling == ("cls",) and [step.about["type"] for step in modules.steps] == ["Normalize"]
    assert VectorEncoder(options).info.prompts == {"query": "q: "}
    assert not (generates(options.model) or classifies(options.model))


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_head_that_is_with_the_adapters(kind: str, labels: int, tmp_path: Path) -> None:
    """The model that they were trained for has none, and does not say how many labels there are."""
    from fastgen.pipeline.encoding import classify_dataset
    from fastgen_serve.workers.encoders import classifies

    base, folder = tmp_path / kind, tmp_path / "adapters"
    getattr(tiny, kind)(base)
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    layers = {"bert": ["query"], "gpt2": ["c_attn"]}[kind]
    config = peft.LoraConfig(r=4, target_modules=layers, task_type="SEQ_CLS", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    texts = tiny.sentences(5)
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    options = {"device": "cpu", "quiet": True, "top_k": labels, "scores": "raw"}
    classify_dataset(folder, tmp_path / "in.txt", tmp_path / "out.jsonl", **options)
    librarys = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=labels).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for text, line in zip(texts, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        found = json.loads(line)
        with torch.no_grad():
            numbers = librarys(**tokenizer(text, return_tensors="pt")).logits[0]
        order = numbers.argsort(descending=True).tolist()
        assert found["labels"] == [f"LABEL_{number}" for number in order]
        assert found["scores"] == pytest.approx(numbers[order].tolist(), abs=1e-5)
    assert classifies(str(folder)) and not classifies(str(base))


def test_half_a_head_with_the_adapters(tmp_path: Path) -> None:
    """That of BART has a name that peft does not look for."""
    from fastgen.pipeline.encoding import classify_dataset

    base, folder = tiny.bart(tmp_path / "bart"), tmp_path / "adapters"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    options = {"modules_to_save": ["classification_head.out_proj"], "task_type": "SEQ_CLS"}
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **options)).save_pretrained(folder)
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(SetupError, match=r"2 of its weights are missing, classification_head\.dense\.bias"):
        classify_dataset(folder, tmp_path / "in.txt", tmp_path / "out.jsonl", device="cpu", quiet=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Path]:
    """Has a folder be what has been downloaded of a name on the hub, which is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("fastgen.pipeline.loading._out_of_reach", set())

    def moved(folder: Path, name: str) -> Path:
        of_name = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (of_name / "refs").mkdir(parents=True)
        (of_name / "refs" / "main").write_text("a" * 40)
        return Path(shutil.move(folder, of_name / "snapshots" / ("a" * 40)))

    return moved


def test_names_of_the_hub(both: tuple[Path, Path], hub: Callable[[Path, str], Path]) -> None:
    from fastgen_serve.cache import identity_of
    from fastgen_serve.settings import ServeSettings
    from fastgen_serve.workers import loading

    base, folder = both
    expected, _ = loading.read_generating(str(folder), "fp32")
    change(folder, base_model_name_or_path="a/base")
    hub(base, "a/base")
    folder = hub(folder, "a/adapters")
    loaded = load(settings(Path("a/adapters"), quiet=True))
    found = dict(loaded.model.named_parameters())
    assert any("lora_" in name for name in found)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.named_parameters())
    assert loaded.tokenizer.get_vocab() == tiny.tokenizer(True).get_vocab()
    assert loading.generates("a/adapters") and identity_of("a/adapters", ServeSettings(models=(("a", "a/adapters"),)))
    assert load(settings(Path("a/base"), quiet=True)).model.name_or_path == "a/base"
    change(folder, megatron_config={"a": 1}, megatron_core="this")
    with pytest.raises(SetupError, match="a/adapters has adapters for Megatron"):
        load(settings(Path("a/adapters")))


class _OfTheTransport(Exception):
    """As a proxy that refuses, or a connection that is closed, is told of: no OSError."""


@pytest.mark.parametrize("error", [None, _OfTheTransport, OSError])
def test_a_name_of_the_hub_that_is_out_of_reach_is_asked_for_once(
    error: type[Exception] | None, hub: Callable[[Path, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find that there is no connection takes long."""
    import huggingface_hub

    asked: list[str] = []
    download = huggingface_hub.hf_hub_download

    def noted(name: str, file: str) -> str:
        asked.append(name)
        if error is not None:
            raise error("403 Forbidden")
        return download(name, file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", noted)
    for _ in range(2):
        with pytest.raises(SetupError, match=r"a/nothing cannot be loaded"):
            load(settings(Path("a/nothing")))
    assert asked == ["a/nothing"]


def test_quantising_refuses_them(both: tuple[Path, Path], tmp_path: Path) -> None:
    from fastgen.pipeline.quantizing import QuantizeOptions, quantize_model

    with pytest.raises(SetupError, match="has adapters alone: merge them"):
        quantize_model(QuantizeOptions(str(both[1]), str(tmp_path / "out"), method="rtn"))


@of_both_kinds
def test_a_server_reads_them(both: tuple[Path, Path]) -> None:
    """The files of the model count for a cache, too."""
    pytest.importorskip("fastgen_serve.workers.loading")
    from fastgen_serve.cache import identity_of
    from fastgen_serve.settings import ServeSettings
    from fastgen_serve.workers import loading

    base, folder = map(str, both)
    assert loading.generates(folder)
    assert loading.read_config(folder).model_type == loading.read_config(base).model_type
    assert loading.read_tokenizer(folder).get_vocab() == tiny.tokenizer(True).get_vocab()
    model, _ = loading.read_generating(folder, "fp32")
    assert any("lora_" in name for name, _ in model.named_parameters())
    serving = ServeSettings(models=(("adapted", folder),))
    before = identity_of(folder, serving)
    (both[0] / "config.json").write_text((both[0] / "config.json").read_text() + " ")
    assert identity_of(folder, serving) != before
